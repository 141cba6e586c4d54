# SPDX-License-Identifier: Apache-2.0
"""What `branch` returns: the branches, the critical batch size, and what they say."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from noisescale._version import __version__
from noisescale.bounded import Bounded
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import count, number, with_bounds
from noisescale.report.records import finite

_HOW_TO_READ = (
    "All branches start from one checkpoint of the run and train until they reach the run's own"
    " later loss. A branch of batch size B takes S_min (1 + B_crit/B) steps to it: at the critical"
    " batch size B_crit twice the fewest."
)


@dataclass(frozen=True)
class Branches(Answer):
    """The branches of a run, and the critical batch size that they and the noise scale give."""

    branched: BranchedRun
    """The run and its branches, as the file has them."""
    by_noise_scale: Bounded
    """B_crit from the noise scale that the run measured over the same steps."""
    output: str
    """The file of the branches."""
    run: str | None = None
    """The folder of the run, if it was read from one."""

    @property
    def critical_batch_size(self) -> Bounded | None:
        """B_crit from the branches to their end; None if no branch reached the loss."""
        return self._critical_until(None)

    @property
    def critical_batch_size_half_way(self) -> Bounded | None:
        """B_crit from the branches up to their middle, as a check; None if it is not known."""
        half = self.branched.half_way
        return None if half is None else self._critical_until(half)

    def _critical_until(self, until: tuple[float, float] | None) -> Bounded | None:
        with suppress(ValueError):
            return self.branched.critical_batch_size(until)
        return None

    def document(self) -> Document:
        """Return what branches say: the critical batch size, and the steps at each batch size."""
        branched, by_noise_scale = self.branched, self.by_noise_scale
        critical = _critical(self.critical_batch_size)
        parts = []
        if branched.half_way is not None:
            half = self.critical_batch_size_half_way
            parts.append(Statement("half way", _critical(half), half, basis="measured"))
        said = "not resolved in the same steps of the run"
        if math.isfinite(by_noise_scale.value):
            said = f"{with_bounds(by_noise_scale)} examples, in the same steps of the run"
        parts.append(Statement("by the noise scale", said, by_noise_scale, basis="measured"))
        following = []
        if self.run is not None:
            words = ["noisescale", "predict", self.run, "--branches", self.output]
            following = [f"Predict the run: {shlex.join(words)}"]
        return Document(
            title="Branches of a run - noisescale",
            headline=f"Critical batch size: {critical}",
            answers=[
                Statement(
                    "Critical batch size",
                    f"{critical}, by branches from step {branched.start:,.0f} to"
                    f" {branched.end:,.0f}",
                    self.critical_batch_size,
                    basis="measured",
                    parts=parts,
                )
            ],
            tables=[_table(branched)],
            doubts=branched.doubts,
            how_to_read=_HOW_TO_READ,
            written=[f"Branches: {self.output}"],
            next=following,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the branches in builtin types.

        | key | meaning |
        |---|---|
        | `version` | of noisescale |
        | `critical_batch_size`, `critical_batch_size_half_way` | by branches; None: not known |
        | `critical_batch_size_by_noise_scale` | from the noise scale, over the same steps |
        | `warnings` | whole sentences |
        | all others | the fields of `BranchedRun`, as the file has them |

        A quantity with bounds is `{"value", "low", "high"}`. None is unknown or unbounded.
        """
        record: dict[str, Any] = finite(
            {
                "version": __version__,
                "critical_batch_size": self.critical_batch_size,
                "critical_batch_size_half_way": self.critical_batch_size_half_way,
                "critical_batch_size_by_noise_scale": self.by_noise_scale,
                **asdict(self.branched),
                "warnings": self.branched.doubts,
            }
        )
        return record


def _critical(found: Bounded | None) -> str:
    if found is None:
        return "not known: no branch at another batch size reached the loss"
    if not math.isfinite(found.value):
        return f"at least {number(found.low)} examples"
    if not found.value:
        return f"at most {number(found.high)} examples"
    return f"{with_bounds(found)} examples"


def _table(branched: BranchedRun) -> Table:
    """Return a table of the steps of the branches, half way and to their end."""
    ends = [x for x in (branched.half_way, branched.falling[-1]) if x is not None]
    headings = ["batch size", "learning rate", "orders", *(f"to step {x[0]:,.0f}" for x in ends)]
    own = [f"{step - branched.start:,.0f}" for step, _ in ends]
    texts = [count(branched.batch_size), "x 1", "the run", *own]
    lines = [Line(list(map(Cell, texts)))]
    for size in sorted({branch.batch_size for branch in branched.branches}):
        alike = [branch for branch in branched.branches if branch.batch_size == size]
        cells = [_steps(alike, loss) for _, loss in ends]
        used = sorted({branch.learning_rate_factor for branch in alike})
        factor = f"x {' and '.join(map(number, used))}"
        lines.append(Line([Cell(count(size)), Cell(factor), Cell(str(len(alike))), *cells]))
    return Table(
        "Steps to the loss of the run",
        headings,
        lines,
        ["orders: branches, each with its own order of the data. The range is over them."],
    )


def _steps(branches: Sequence[Branch], loss: float) -> Cell:
    reached = [steps for branch in branches if (steps := branch.steps_to(loss)) is not None]
    if not reached:
        return Cell("not reached")
    mean = math.exp(float(np.mean(np.log(reached))))
    around = f"{number(min(reached))}–{number(max(reached))}" if len(reached) > 1 else ""
    missed = len(branches) - len(reached)
    return Cell(number(mean), ", ".join(filter(None, (around, f"{missed} not" if missed else ""))))
