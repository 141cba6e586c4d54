# SPDX-License-Identifier: Apache-2.0
"""Branches of a run: what larger batches take from a checkpoint to the run's own later loss."""

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
from noisescale.printable import printable
from noisescale.tradeoff.profile import STEPS_SCATTER, profiled_critical_batch_size

FORMAT = "noisescale branches 2"
"""What the first key of a file says."""

UNLIKE = 1.5
"""Branches at the run's own batch size that take this many times its steps are no copies of it."""

LEAST_ALIKE = 2
"""From this many branches at the run's own batch size on, they replace the run itself."""

LEAST_STEPS = 0.5
"""Steps that count for a branch that was at the loss from the start."""

SAME_SIZE = 0.02
"""Of the run's batch size: its mean may be a little smaller, by the last batch of each epoch."""

_LOSS = "loss"


@dataclass(frozen=True)
class Branch:
    """One training from the checkpoint, with its own batch size and its own order of the data."""

    batch_size: float
    order: int
    """Seeds the order of the data."""
    learning_rate_factor: float
    """On the learning rate of the run."""
    steps: tuple[float, ...]
    """Of the branch, at which its loss was taken; the first is 0."""
    losses: tuple[float, ...]
    """On the same examples as those of the run."""
    seconds: float
    """That it trained, evaluations included."""
    diverged: bool = False
    """Whether it was given up: its loss was not finite, or far above the loss at the start."""
    diverged_at: tuple[float, ...] = ()
    """Larger factors on the learning rate at which it diverged before."""
    slower_at: tuple[float, ...] = ()
    """Other factors on the learning rate that took longer with this order of the data."""

    def steps_to(self, loss: float) -> float | None:
        """Return the steps that the branch took to a loss; None if it did not reach the loss."""
        if self.diverged:
            return None
        course = np.array(self.steps), np.array(self.losses)
        return Goal(_LOSS, loss).reached_at(*course)


@dataclass(frozen=True)
class BranchedRun:
    """A run, and branches from one of its checkpoints on.

    The run itself is the branch at its own batch size B: from the step of the checkpoint on it took
    s steps to its later loss. A branch at another batch size takes s(B') = s_min + e_min/B' steps
    to that loss. McCandlish et al. define the critical batch size as e_min/s_min of this law. It
    needs no tolerance, and it holds for any optimizer.

    References:
        McCandlish et al. 2018, arXiv:1812.06162, equation 2.11. Merrill et al. 2025,
        arXiv:2505.23971, for branches.
    """

    batch_size: float
    """Of the run, in examples."""
    course: tuple[tuple[float, float], ...]
    """Step and loss of the run's checkpoints: first the one that branches start from."""
    loss_examples: int
    """Examples that losses are taken over."""
    rule: str
    """By which the learning rate goes with the batch size."""
    branches: tuple[Branch, ...] = field(default=())
    parameters: float | None = None
    """Numbers that the run trained, if that is known."""
    learning_rate_change: float = 1.0
    """The run's learning rate at the end, over that at the checkpoint."""
    of_a_stream: bool = False
    """Whether all orders had nearly the same examples."""

    @property
    def start(self) -> float:
        """The step of the run that branches start from."""
        return self.course[0][0]

    @property
    def until(self) -> float:
        """The step of the last checkpoint whose loss was taken."""
        return self.course[-1][0]

    @cached_property
    def falling(self) -> tuple[tuple[float, float], ...]:
        """Steps and losses of the run, averaged where the loss does not fall.

        Neighbours are pooled, at their mean step, until each has a lower loss than the one before
        it (isotonic regression): a single loss may be low, or high, by chance.
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
        """Whether the run had a lower loss later."""
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
    def half(self) -> tuple[float, float] | None:
        """The step and loss of the run nearest to the middle; None if no loss is known near it."""
        within = [
            point
            for point in self.falling[1:-1]
            if 0.25 <= (point[0] - self.start) / (self.end - self.start) <= 0.75
        ]
        middle = (self.start + self.end) / 2
        return min(within, key=lambda point: abs(point[0] - middle), default=None)

    def critical_batch_size(
        self, until: tuple[float, float] | None = None, *, confidence: float = 0.95
    ) -> Bounded:
        """Return B_crit from the checkpoint on, with its profile interval.

        Each batch size is one point: the median over its orders of the data. Its error has two
        parts: the scatter of the orders, and `STEPS_SCATTER`, as its learning rate is hardly tuned.
        The run itself is a point only if it has too few branches at its own batch size. With more
        branches the run is left out: a run that ends when it reaches its result ends where its loss
        is low by luck.

        Args:
            until: Step and loss of the run up to which; default: its end.
            confidence: Coverage of the interval.

        Raises:
            ValueError: If no branch at another batch size reached the loss.
        """
        step, loss = until or self.falling[-1]
        reached = self._logs_of_steps(loss)
        if not reached.keys() - {self.batch_size}:
            raise ValueError(
                f"`branches` must reach the run's own loss, {loss:.4g}, got no branch that did at a"
                f" batch size other than {self.batch_size:g}: {self.fates}. Branch at smaller batch"
                " sizes, or with another `learning_rate` rule."
            )
        if len(reached.get(self.batch_size, ())) < LEAST_ALIKE:
            reached.setdefault(self.batch_size, []).append(math.log(step - self.start))
        spreads = [np.var(logs, ddof=1) for logs in reached.values() if len(logs) > 1]
        many = float(np.mean([len(logs) for logs in reached.values()]))
        of_orders = float(np.mean(spreads)) if spreads else 0.0
        scatter = math.sqrt(STEPS_SCATTER**2 + of_orders / many)
        steps_of_each = [math.exp(float(np.median(logs))) for logs in reached.values()]
        return profiled_critical_batch_size(
            list(reached), steps_of_each, scatter, confidence=confidence
        )

    def _logs_of_steps(self, loss: float) -> dict[float, list[float]]:
        """From batch size to the logarithms of the steps that its branches took to a loss.

        Of batch sizes at which half of the branches did; the others count as the slowest.
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
        """How branches that did not reach the loss ended, in words."""
        lost = [b for b in self.branches if b.steps_to(self.goal) is None]
        said = [
            f"{b.batch_size:g} (order {b.order + 1}) diverged"
            if b.diverged
            else f"{b.batch_size:g} (order {b.order + 1}) was at {b.losses[-1]:.4g}"
            f" after {b.steps[-1]:,.0f} steps"
            for b in lost
        ]
        return "; ".join(said) or "no branch has been trained"

    def by_noise_scale(self, history: Mapping[str, Array]) -> Bounded:
        """Return B_crit by the noise scale that the run measured over the same steps."""
        return critical_batch_size_over(as_history(history), self.start, self.end)

    def law(self, history: History, kappa: Bounded) -> RunLaw:
        """Return the law of a run: from the checkpoint on, it is the law of the branches.

        Before the checkpoint B_crit is another, as there is less noise early in a run. It comes
        from the noise scale times kappa there, or from the branches if the noise scale is not
        resolved. After the end of the branches, B_crit comes from the branches.
        """
        found, last = self.critical_batch_size(), float(history["step"][-1])
        law = RunLaw.at(Segments.of(history.between(self.start, self.end)), found)
        if last > self.end:
            law += RunLaw.at(Segments.of(history.between(self.end, last)), found)
        if not self.start:
            return law
        before = Segments.of(history.until(self.start))
        by_noise_scale = RunLaw.of(before, kappa)
        if math.isnan(by_noise_scale.middle.min_steps):
            by_noise_scale = RunLaw.at(before, found)
        return by_noise_scale + law

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons not to trust the answer, in whole sentences."""
        found = []
        lost = [b for b in self.branches if b.steps_to(self.goal) is None]
        if lost:
            found.append(
                f"Branches did not reach the loss of the run, {self.goal:.4g}: {self.fates}."
            )
        found += [*self._doubts_on_the_run(), *self._doubts_on_learning_rates()]
        if self.of_a_stream:
            found.append(
                "The data are a stream, so all orders had nearly the same examples. The interval"
                " does not include how much other examples would change B_crit."
            )
        if self.half is None:
            found.append(
                "It is not known whether the sudden change of batch size and learning rate still"
                " affects B_crit. That needs a checkpoint of the run near the middle of its steps"
                " that the branches cover. Save checkpoints more often."
            )
            return tuple(found)
        try:
            early, late = (self.critical_batch_size(x) for x in (self.half, None))
        except ValueError:
            return tuple(found)
        if early.high < late.value or late.value < early.low:
            found.append(
                f"Up to step {self.half[0]:,.0f} the branches give a B_crit of {early.value:.3g}"
                f" ({early.low:.3g} to {early.high:.3g}), up to step {self.end:,.0f} one of"
                f" {late.value:.3g}: the sudden change of batch size and learning rate still"
                " affects it. Branch over more of the run."
            )
        return tuple(found)

    def _doubts_on_the_run(self) -> Iterator[str]:
        """Whether branches do what the run did."""
        own = self.end - self.start
        means = {b: math.exp(np.median(x)) for b, x in self._logs_of_steps(self.goal).items()}
        if (again := means.pop(self.batch_size, None)) is not None:
            if not 1 / UNLIKE < again / own < UNLIKE:
                yield (
                    f"Branches at the run's own batch size took {again:,.0f} steps where the run"
                    f" took {own:,.0f}: the branches lack something that the run had, such as"
                    " gradient clipping, a callback, or code that depends on `global_step`."
                )
            own = again
        for size, steps in means.items():
            if size > self.batch_size and steps < own * self.batch_size / size / UNLIKE:
                yield (
                    f"At {size / self.batch_size:.3g} times the batch size {own:,.0f} steps became"
                    f" {steps:,.0f}, a larger gain than any batch size can give. Either the run's"
                    " own learning rate was too small, or the branches lack something that the run"
                    " had."
                )

    def _doubts_on_learning_rates(self) -> Iterator[str]:
        for size in sorted({b.batch_size for b in self.branches if b.diverged_at}):
            alike = [b for b in self.branches if b.batch_size == size and b.diverged_at]
            tried = max(max(b.diverged_at) for b in alike)
            used = ", ".join(sorted({f"{b.learning_rate_factor:.3g}" for b in alike}))
            yield (
                f"Branches at {size:g} diverged at {tried:.3g} times the learning rate, and were"
                f" trained at {used} times: if that is not their best learning rate, B_crit is"
                " wrong."
            )
        if not 1 / 1.2 < self.learning_rate_change < 1.2:
            yield (
                f"The run's learning rate changed {self.learning_rate_change:.3g}-fold along these"
                " steps. Branches go through this change in the number of steps that the noise"
                " scale predicts, which pulls B_crit towards the noise scale."
            )

    def to_file(self, path: str | PathLike[str]) -> None:
        """Write the run and its branches as JSON. The file is written whole or not at all."""
        path = Path(path)
        written = path.with_name(path.name + ".part")
        written.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))
        written.replace(path)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> BranchedRun:
        """Read what `to_file` wrote.

        Raises:
            ValueError: If the file is not one of branches.
            OSError: If it cannot be read.
        """
        try:
            read: dict[str, Any] = json.loads(Path(path).read_text())
            if read.pop("format") != FORMAT:
                raise KeyError("format")
            branches = tuple(
                Branch(**dict(zip(b, map(_tupled, b.values()), strict=True)))
                for b in read.pop("branches")
            )
            course = tuple((float(step), float(loss)) for step, loss in read.pop("course"))
            return cls(course=course, branches=branches, **read)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"`{printable(path)}` must be a file of `noisescale branch`, got"
                f" {type(error).__name__}: {printable(error)}. Branch anew into another file."
            ) from error


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
