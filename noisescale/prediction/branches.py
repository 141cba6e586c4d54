# SPDX-License-Identifier: Apache-2.0
"""Branches of a run: steps at other batch sizes from a checkpoint to the run's later loss."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from noisescale.bounded import Bounded
from noisescale.history.history import History, as_history
from noisescale.history.metrics import Goal
from noisescale.history.run_law import RunLaw, critical_batch_size_over
from noisescale.history.segments import Array, Segments
from noisescale.refusal import Refusal
from noisescale.tradeoff.profile import STEPS_SCATTER
from noisescale.tradeoff.regimes import find_regimes

FORMAT = "noisescale branches 2"
"""The value of the key `format` in a file."""

UNLIKE = 1.5
"""Branches at the run's own batch size differ from it if their steps differ by this factor."""

LEAST_ALIKE = 2
"""The number of branches at the run's own batch size that replace the run itself."""

LEAST_STEPS = 0.5
"""The number of steps that is assumed for a branch whose loss was low enough from the start."""

SAME_SIZE = 0.02
"""Batch sizes count as the run's own within this share. The last batch of an epoch is smaller."""

_LOSS = "loss"


@dataclass(frozen=True)
class Branch:
    """One training from the checkpoint, at one batch size and with one order of the data."""

    batch_size: float
    order: int
    """The number of the order of the data, from 0."""
    learning_rate_factor: float
    """The factor on the learning rate of the run."""
    steps: tuple[float, ...]
    """The steps of the branch at which its loss was evaluated. The first is 0."""
    losses: tuple[float, ...]
    """The losses at these steps, on the same examples as the losses of the run."""
    seconds: float
    """The time of the training, with the evaluations of the loss."""
    diverged: bool = False
    """Whether it was stopped: its loss was not finite, or far above the loss at the start."""
    diverged_at: tuple[float, ...] = ()
    """Larger factors on the learning rate with which the branch diverged before."""
    slower_at: tuple[float, ...] = ()
    """Other factors on the learning rate that took longer with this order of the data."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Branch:
        """Return the branch that `dataclasses.asdict` was called on, also if JSON had it."""
        return cls(**{name: _as_tuple(value) for name, value in record.items()})

    def steps_to(self, loss: float) -> float | None:
        """Return the steps that the branch took to a loss; None if it did not reach the loss."""
        if self.diverged:
            return None
        course = np.array(self.steps), np.array(self.losses)
        return Goal(_LOSS, loss).first_step(*course)


@dataclass(frozen=True)
class BranchedRun:
    """A run, and branches from one of its checkpoints.

    The run itself is the branch at its own batch size B: from the checkpoint it took s steps to its
    later loss. A branch at another batch size B' takes s(B') = s_min + e_min/B' steps to that loss.
    McCandlish et al. define the critical batch size as e_min/s_min of this law. This definition
    needs no tolerance, and it holds for any optimizer.

    References:
        McCandlish et al. 2018, arXiv:1812.06162, equation 2.11. Merrill et al. 2025,
        arXiv:2505.23971, for branches.
    """

    batch_size: float
    """The batch size of the run, in examples."""
    course: tuple[tuple[float, float], ...]
    """Steps and losses of the run's checkpoints. Branches start from the first checkpoint."""
    loss_examples: int
    """The number of examples on which losses are evaluated."""
    rule: str
    """The rule by which the learning rate follows the batch size."""
    branches: tuple[Branch, ...] = field(default=())
    parameters: float | None = None
    """The number of trained numbers in the model, if it is known."""
    learning_rate_change: float = 1.0
    """The run's learning rate at the end, divided by its learning rate at the checkpoint."""
    of_a_stream: bool = False
    """Whether the data are a stream: all orders then had nearly the same examples."""

    @property
    def start(self) -> float:
        """The step of the run at which branches start."""
        return self.course[0][0]

    @property
    def until(self) -> float:
        """The step of the last checkpoint whose loss was evaluated."""
        return self.course[-1][0]

    @cached_property
    def falling(self) -> tuple[tuple[float, float], ...]:
        """Steps and losses of the run, averaged so that the loss falls from each to the next.

        A single loss may be low or high by chance. So neighbours are averaged, at their mean step,
        until each loss is lower than the loss before it (isotonic regression).
        """
        pools: list[list[tuple[float, float]]] = []
        for point in self.course[1:]:
            pool = [point]
            while pools and np.mean(pools[-1], axis=0)[1] <= np.mean(pool, axis=0)[1]:
                pool = pools.pop() + pool
            pools.append(pool)
        means = [tuple(map(float, np.mean(pool, axis=0))) for pool in pools]
        below = [(step, loss) for step, loss in means if loss < self.course[0][1]]
        return (self.course[0], *below)

    @property
    def falls(self) -> bool:
        """Whether the run had a lower loss after the checkpoint."""
        return len(self.falling) > 1

    @property
    def end(self) -> float:
        """The step at which the run had the loss that branches are to reach."""
        return self.falling[-1][0]

    @property
    def goal(self) -> float:
        """The loss that branches are to reach, at step `end`."""
        return self.falling[-1][1]

    @property
    def half_way(self) -> tuple[float, float] | None:
        """Step and loss of the run near the middle of the branches; None if none is known."""
        within = [
            point
            for point in self.falling[1:-1]
            if 0.25 <= (point[0] - self.start) / (self.end - self.start) <= 0.75
        ]
        middle = (self.start + self.end) / 2
        return min(within, key=lambda point: abs(point[0] - middle), default=None)

    def critical_batch_size(self, until: tuple[float, float] | None = None) -> Bounded:
        """Return B_crit of the run after the checkpoint, with its profile interval of 95 %.

        Each batch size is one point: the median over its orders of the data. Its error has two
        parts: the scatter of the orders, and `STEPS_SCATTER`, because its learning rate is hardly
        tuned. The run itself is only a point if there are too few branches at its own batch size.
        Otherwise it is left out: a run that ends when it reaches its result often ends at a loss
        that is low by luck. Branches at its batch size took 1.0 to 1.4 times as many steps.

        Args:
            until: Step and loss of the run at which branches end. Default: `end` and `goal`.

        Raises:
            ValueError: If no branch at another batch size reached the loss.
        """
        step, loss = until or self.falling[-1]
        reached = self._logs_of_steps(loss)
        if not reached.keys() - {self.batch_size}:
            raise Refusal(
                "branches",
                f"reach the run's own loss, {loss:.4g}",
                f"no branch that did at a batch size other than {self.batch_size:g}: {self.fates}",
                "Train branches at smaller batch sizes, or with another `learning_rate` rule.",
            )
        if len(reached.get(self.batch_size, ())) < LEAST_ALIKE:
            reached.setdefault(self.batch_size, []).append(math.log(step - self.start))
        spreads = [np.var(logs, ddof=1) for logs in reached.values() if len(logs) > 1]
        many = float(np.mean([len(logs) for logs in reached.values()]))
        of_orders = float(np.mean(spreads)) if spreads else 0.0
        scatter = math.sqrt(STEPS_SCATTER**2 + of_orders / many)
        steps_of_each = [math.exp(float(np.median(logs))) for logs in reached.values()]
        found = find_regimes(list(reached), steps_of_each, scatter=scatter)
        return found.critical_batch_size

    def _logs_of_steps(self, loss: float) -> dict[float, list[float]]:
        """Return the logarithms of the steps of branches to a loss, by batch size.

        Batch sizes at which fewer than half of the branches reached the loss are left out. At the
        others, a branch that did not reach the loss counts as a slow one.
        """
        found: dict[float, list[float]] = {}
        for branch in self.branches:
            same = math.isclose(branch.batch_size, self.batch_size, rel_tol=SAME_SIZE)
            size = self.batch_size if same else branch.batch_size
            steps = branch.steps_to(loss)
            log = math.inf if steps is None else math.log(max(steps, LEAST_STEPS))
            found.setdefault(size, []).append(log)
        reached = {}
        for size, logs in found.items():
            middle = sorted(logs)[(len(logs) - 1) // 2]
            if math.isfinite(middle):  # those that did not: as far above it as the fastest is below
                slowest = 2 * middle - min(logs)
                reached[size] = [slowest if math.isinf(log) else log for log in logs]
        return reached

    @property
    def fates(self) -> str:
        """How the branches ended that did not reach the loss, in words."""
        lost = [b for b in self.branches if b.steps_to(self.goal) is None]
        said = [
            f"{b.batch_size:g} (order {b.order + 1}) diverged"
            if b.diverged
            else f"{b.batch_size:g} (order {b.order + 1}) had a loss of {b.losses[-1]:.4g}"
            f" after {b.steps[-1]:,.0f} steps"
            for b in lost
        ]
        return "; ".join(said) or "no branch has been trained"

    def by_noise_scale(self, history: Mapping[str, Array]) -> Bounded:
        """Return B_crit from the noise scale that the run measured over the same steps."""
        return critical_batch_size_over(as_history(history), self.start, self.end)

    def law(self, history: History, kappa: Bounded) -> RunLaw:
        """Return the law of a whole run, from its branches.

        After the checkpoint, B_crit comes from the branches, also after their end. Before the
        checkpoint B_crit differs, because there is less noise early in a run: the second half of a
        run had 2 to 10 times the B_crit of the first half in the benchmark. There it comes from
        the noise scale times kappa, or from the branches if the noise scale is not resolved.
        """
        found, last = self.critical_batch_size(), float(history["step"][-1])
        law = RunLaw.with_critical_batch_size(
            Segments.of(history.between(self.start, self.end)), found
        )
        if last > self.end:
            law += RunLaw.with_critical_batch_size(
                Segments.of(history.between(self.end, last)), found
            )
        if not self.start:
            return law
        before = Segments.of(history.until(self.start))
        by_noise_scale = RunLaw.of(before, kappa)
        if math.isnan(by_noise_scale.middle.min_steps):
            by_noise_scale = RunLaw.with_critical_batch_size(before, found)
        return by_noise_scale + law

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons not to trust the answer, in whole sentences."""
        found = []
        lost = [b for b in self.branches if b.steps_to(self.goal) is None]
        if lost:
            found.append(
                f"Some branches did not reach the loss of the run, {self.goal:.4g}: {self.fates}."
            )
        found += [*self._doubts_on_the_run(), *self._doubts_on_learning_rates()]
        if self.of_a_stream:
            found.append(
                "The data are a stream, so all orders had nearly the same examples. Other examples"
                " would give another B_crit, and its interval does not include this error."
            )
        if self.half_way is None:
            found.append(
                "At their start the branches change batch size and learning rate at once. It was"
                " not checked whether this change still affects B_crit at their end. The check"
                " needs a checkpoint of the run near the middle of the branches, whose loss lies"
                " between the losses at their start and their end. Save more checkpoints."
            )
            return tuple(found)
        try:
            early, late = (self.critical_batch_size(x) for x in (self.half_way, None))
        except ValueError:
            return tuple(found)
        if early.high < late.value or late.value < early.low:
            found.append(
                f"Up to step {self.half_way[0]:,.0f} of the run the branches give a B_crit of"
                f" {early.value:.3g} ({early.low:.3g} to {early.high:.3g}). Up to step"
                f" {self.end:,.0f} they give {late.value:.3g}. So the change of batch size and"
                " learning rate at their start still affects B_crit. Choose checkpoints that are"
                " farther apart."
            )
        return tuple(found)

    def _doubts_on_the_run(self) -> Iterator[str]:
        """Yield reasons to doubt that branches train like the run."""
        own = self.end - self.start
        means = {b: math.exp(np.median(x)) for b, x in self._logs_of_steps(self.goal).items()}
        if (again := means.pop(self.batch_size, None)) is not None:
            if not 1 / UNLIKE < again / own < UNLIKE:
                yield (
                    f"Branches at the run's own batch size took {again:,.0f} steps, and the run"
                    f" took {own:,.0f}. So the branches do not train like the run. They may lack"
                    " its gradient clipping, a callback, or code that depends on `global_step`."
                    " Give them the same settings."
                )
            own = again
        for size, steps in means.items():
            if size > self.batch_size and steps < own * self.batch_size / size / UNLIKE:
                yield (
                    f"At {size / self.batch_size:.3g} times the batch size, branches took"
                    f" {steps:,.0f} steps instead of {own:,.0f}. Even perfect scaling would take"
                    f" {own * self.batch_size / size:,.0f}. Either the run's own learning rate was"
                    " too small, or the branches do not train like the run. B_crit reads too high."
                )

    def _doubts_on_learning_rates(self) -> Iterator[str]:
        for size in sorted({b.batch_size for b in self.branches if b.diverged_at}):
            alike = [b for b in self.branches if b.batch_size == size and b.diverged_at]
            tried = max(max(b.diverged_at) for b in alike)
            used = ", ".join(sorted({f"{b.learning_rate_factor:.3g}" for b in alike}))
            yield (
                f"Branches at a batch size of {size:g} diverged with {tried:.3g} times the learning"
                f" rate, and were trained with {used} times the learning rate. If this is not"
                " their best learning rate, B_crit is wrong."
            )
        if not 1 / 1.2 < self.learning_rate_change < 1.2:
            yield (
                "During the steps of the branches the run's learning rate changed by a factor of"
                f" {self.learning_rate_change:.3g}. Branches spread this change over the number of"
                " steps that the noise scale predicts. This moves B_crit towards the noise scale."
            )

    def to_file(self, path: str | PathLike[str]) -> None:
        """Write the run and its branches as JSON. The file is never left half-written."""
        path = Path(path)
        written = path.with_name(path.name + ".part")
        written.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))
        written.replace(path)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> BranchedRun:
        """Read a file that `to_file` wrote.

        Raises:
            ValueError: If the file was not written by `to_file`.
            OSError: If the file cannot be read.
        """
        try:
            read: dict[str, Any] = json.loads(Path(path).read_text())
            if read.pop("format") != FORMAT:
                raise KeyError("format")
            return cls.from_record(read)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refusal(
                path,
                "be a file of `noisescale branch`",
                f"{type(error).__name__}: {error}",
                "Name another file, or train the branches again into a new file.",
            ) from error

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> BranchedRun:
        """Return the run that `dataclasses.asdict` was called on, also if JSON had it."""
        fields = dict(record)
        branches = tuple(Branch.from_record(branch) for branch in fields.pop("branches"))
        course = tuple((float(step), float(loss)) for step, loss in fields.pop("course"))
        return cls(course=course, branches=branches, **fields)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
