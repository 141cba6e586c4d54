# SPDX-License-Identifier: Apache-2.0
"""What the branches of a run say: a document, and the same in builtin types."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from noisescale._version import __version__
from noisescale.bounded import Bounded
from noisescale.lab.branch.measured_branches import BranchesRecord
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import count, number, with_bounds
from noisescale.report.records import finite

_HOW_TO_READ = (
    "All branches start from one checkpoint of the run and train until they reach the run's own"
    " later loss. A branch of batch size B takes S_min (1 + B_crit/B) steps to it: at the critical"
    " batch size B_crit twice the fewest."
)


def document_of(found: BranchesRecord) -> Document:
    """Return what branches say: the critical batch size, and the steps at each batch size."""
    branched = found.branched
    critical = _critical(found.critical_batch_size)
    parts = []
    if branched.half_way is not None:
        half = found.critical_batch_size_half_way
        parts.append(Statement("half way", _critical(half), half, basis="measured"))
    by_noise_scale = "not resolved in the same steps of the run"
    if math.isfinite(found.by_noise_scale.value):
        by_noise_scale = (
            f"{with_bounds(found.by_noise_scale)} examples, in the same steps of the run"
        )
    parts.append(
        Statement("by the noise scale", by_noise_scale, found.by_noise_scale, basis="measured")
    )
    following = []
    if found.run is not None:
        words = ["noisescale", "predict", found.run, "--branches", found.output]
        following = [f"Predict the run: {shlex.join(words)}"]
    return Document(
        title="Branches of a run - noisescale",
        headline=f"Critical batch size: {critical}",
        answers=[
            Statement(
                "Critical batch size",
                f"{critical}, by branches from step {branched.start:,.0f} to {branched.end:,.0f}",
                found.critical_batch_size,
                basis="measured",
                parts=parts,
            )
        ],
        tables=[_table(branched)],
        doubts=branched.doubts,
        how_to_read=_HOW_TO_READ,
        written=[f"Branches: {found.output}"],
        next=following,
    )


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


def as_dict(found: BranchesRecord) -> dict[str, Any]:
    """Return the branches in builtin types.

    | key | meaning |
    |---|---|
    | `version` | of noisescale |
    | `critical_batch_size`, `critical_batch_size_half_way` | from the branches; None: not known |
    | `critical_batch_size_by_noise_scale` | from the noise scale, over the same steps |
    | `warnings` | whole sentences |
    | all others | the fields of `BranchedRun`, as the file has them |

    A quantity with bounds is `{"value", "low", "high"}`. None is unknown or unbounded.
    """
    record: dict[str, Any] = finite(
        {
            "version": __version__,
            "critical_batch_size": found.critical_batch_size,
            "critical_batch_size_half_way": found.critical_batch_size_half_way,
            "critical_batch_size_by_noise_scale": found.by_noise_scale,
            **asdict(found.branched),
            "warnings": found.branched.doubts,
        }
    )
    return record
