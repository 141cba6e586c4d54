# SPDX-License-Identifier: Apache-2.0
"""Plan the branches, and refuse bad arguments, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from noisescale.bounded import Bounded
from noisescale.checks import require_count
from noisescale.history.history import History, as_history
from noisescale.history.optimizers import OptimizerKind, OptimizerMix, has_decayed
from noisescale.history.reading import read_run
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array, Segments
from noisescale.lightning.checkpoints import Checkpoint, steps_in
from noisescale.plan import Plan
from noisescale.prediction.run_hardware import largest_device_batch
from noisescale.prediction.theory import theory_band
from noisescale.refusal import Refusal
from noisescale.scheduling.learning_rate import factors_for

MOST_CHECKPOINTS = 8
"""The most checkpoints, between the first and the last, whose losses are evaluated."""

SAME_SIZE = 1.1
"""The batch size counts as constant if the largest is at most this multiple of the smallest."""

MORE_STEPS = 1.05
"""The factor by which steps grow from one evaluation of a branch's loss to the next."""

BEYOND = 1.15
"""A branch ends after this multiple of the steps at which its loss was first below the goal."""

FORWARD = 1 / 3
"""The cost of an example without its gradient: the backward pass costs twice the forward pass."""

POWERS = (1.0, 0.5, 0.25, 0.0)
"""The powers of a rule's factor on the learning rate. They are tried in this order."""

ALIKE = 1.1
"""Two factors on the learning rate count as the same if their ratio is below this."""

RULES = ("auto", "linear", "sqrt", "adascale", "capped_sqrt", "none")


@dataclass(frozen=True)
class BranchOptions:
    """The arguments of `branch` that say which branches are trained."""

    run: Mapping[str, Array] | str | PathLike[str]
    checkpoint: str | PathLike[str]
    """A file that ModelCheckpoint wrote, with the optimizer's state; or a folder of such files."""
    batch_sizes: Sequence[str | float] | str = "1x,4x,16x"
    """"4x" is four times the run's batch size. "1x" checks that branches train like the run."""
    until: str | PathLike[str] | None = None
    """None for the last checkpoint of the run."""
    orders: int = 3
    learning_rate: str = "auto"
    """The rule by which the learning rate follows the batch size: one of `RULES`."""
    devices: int = 1
    """The devices on which each branch is trained, on all nodes."""
    max_device_batch_size: int | None = None
    """None for the number in the run."""
    monitor: str | None = None

    def history(self) -> History:
        """Return the history of the run.

        Raises:
            ValueError: If it is none.
            OSError: If it cannot be read.
        """
        read = self.run
        return as_history(
            read if isinstance(read, Mapping) else read_run(read, monitor=self.monitor)
        )


@dataclass(frozen=True)
class Branching:
    """A plan of branches, from `plan_branches`."""

    history: History
    checkpoint: Checkpoint
    course: tuple[Path, ...]
    """Later checkpoints of the run whose losses are evaluated. The last one is at step `end`."""
    end: int
    learning_rates: tuple[Array, Array]
    """Steps of the run, and its learning rates divided by the checkpoint's learning rate."""
    batch_size: float
    plans: tuple[Plan, ...]
    orders: int
    rule: str
    by_noise_scale: Bounded
    """B_crit from the checkpoint to the end, by the noise scale."""

    @property
    def steps(self) -> int:
        """Steps of the run from the checkpoint to the end."""
        return self.end - self.checkpoint.step

    def learning_rate_at(self, steps: float) -> float:
        """Return the run's learning rate after some steps, divided by the checkpoint's."""
        at = self.checkpoint.step + min(steps, self.steps)
        return float(np.interp(at, *self.learning_rates))

    def factors(self, batch_size: float) -> list[float]:
        """Return the factors on the run's learning rate to try. The first is the rule's own."""
        found = [self.factor(batch_size)]
        for power in POWERS[1:]:
            factor = found[0] ** power
            if max(factor, found[-1]) > ALIKE * min(factor, found[-1]):
                found.append(factor)
        return found

    def factor(self, batch_size: float) -> float:
        """Return the rule's factor on the run's learning rate."""
        found = self.by_noise_scale
        return factors_for(
            self.rule,  # type: ignore[arg-type]  # one of RULES
            batch_size=batch_size,
            base_batch_size=self.batch_size,
            noise_scale=found.value if math.isfinite(found.value) else found.low,
        ).learning_rate

    def steps_at(self, batch_size: float) -> Bounded:
        """Return the expected steps of a branch, with bounds from the errors of the theory."""
        optimizer = self.history.optimizer or OptimizerMix(OptimizerKind.OTHER)
        part = self.history.between(self.checkpoint.step, self.end)
        band = theory_band(optimizer, decayed=has_decayed(part)).factor
        found = self.by_noise_scale
        if not math.isfinite(found.value):
            ends = float(self.steps), self.steps * self.batch_size / batch_size
            return Bounded(math.sqrt(math.prod(ends)), min(ends), max(ends))
        high = found.high if math.isfinite(found.high) else found.value
        ends = band.low * found.low, band.high * high

        def steps(critical: float) -> float:
            return self.steps * (1 + critical / batch_size) / (1 + critical / self.batch_size)

        expected = band.value * found.value
        several = sorted(map(steps, (*ends, expected)))
        return Bounded(steps(expected), several[0], several[-1])

    def first_look(self, batch_size: float) -> int:
        """Return the step of a branch after which its loss is first evaluated."""
        soonest = self.steps * self.batch_size / batch_size
        return max(1, math.floor(min(self.steps_at(batch_size).low, soonest) / 3))

    def device_hours(self, loss_examples: int) -> Bounded:
        """Return the device-hours of all branches at the run's speed; NaN if it is not known.

        Args:
            loss_examples: Examples in each evaluation of the loss.
        """
        seconds, steps = self.history["seconds_per_step"], Segments.of(self.history).steps
        timed = seconds > 0
        if not timed.any():
            return Bounded(math.nan, math.nan, math.nan)
        devices = self.history["devices"]
        used = float(devices[-1]) if math.isfinite(devices[-1]) else 1.0
        step = float((seconds * steps)[timed].sum() / steps[timed].sum()) * used / 3600
        example = step / self.batch_size
        of_the_run = FORWARD * loss_examples * (1 + len(self.course))
        ends = []
        for end in ("value", "low", "high"):
            examples = of_the_run
            for plan in self.plans:
                last = BEYOND * getattr(self.steps_at(plan.batch_size), end)
                looks = 1 + sum(1 for _ in looks_from(self.first_look(plan.batch_size), last))
                searched = 1 if len(self.factors(plan.batch_size)) > 1 else 0
                one = last * plan.batch_size + FORWARD * looks * loss_examples
                examples += (self.orders + searched) * one
            ends.append(examples * example)
        return Bounded(*ends)


def looks_from(first: int, last: float) -> Iterator[int]:
    """Yield the steps of a branch after which its loss is evaluated."""
    step = first
    while step <= last:
        yield step
        step = look_after(step)


def look_after(step: int) -> int:
    """Return the step of the next evaluation of the loss."""
    return max(step + 1, math.ceil(step * MORE_STEPS))


def plan_branches(asked: BranchOptions) -> Branching:
    """Check the arguments and plan the branches, before anything is trained.

    Raises:
        ValueError: If an argument is wrong, or does not fit the run.
        OSError: If a checkpoint or the run cannot be read.
    """
    _check(asked)
    history = asked.history()
    first, last, course = _checkpoints(asked, float(history["step"][-1]))
    span = Segments.of(history.between(first.step, last.step))
    if span.batch_size.max() > SAME_SIZE * span.batch_size.min():
        raise Refusal(
            "run",
            "have one batch size from `checkpoint` to `until`",
            f"{span.batch_size.min():,.4g} to {span.batch_size.max():,.4g}",
            "Name checkpoints between which the batch size did not change.",
        )
    size = float((span.steps * span.batch_size).sum() / span.steps.sum())
    by_noise_scale = RunLaw.of(span, Bounded(1.0, 1.0, 1.0)).critical_batch_size
    return Branching(
        history,
        first,
        course,
        last.step,
        _learning_rates(history, first, last),
        size,
        _plans(asked, history, size),
        asked.orders,
        _rule(asked.learning_rate, history, by_noise_scale),
        by_noise_scale,
    )


def _check(asked: BranchOptions) -> None:
    if asked.learning_rate not in RULES:
        got = repr(asked.learning_rate)
        raise Refusal("learning_rate", f"be one of {', '.join(RULES)}", got, "Give auto.")
    require_count("orders", asked.orders, "Give 3.")
    require_count("devices", asked.devices, "Give 1.")
    if asked.max_device_batch_size is not None:
        remedy = "Leave it out to use the run's own."
        require_count("max_device_batch_size", asked.max_device_batch_size, remedy)


def _checkpoints(
    asked: BranchOptions, last_step: float
) -> tuple[Checkpoint, Checkpoint, tuple[Path, ...]]:
    """Return the first and the last checkpoint, and the files of all after the first one."""
    checkpoint = Path(asked.checkpoint)
    if checkpoint.is_dir():
        checkpoint = _middle(checkpoint, last_step)
    first = Checkpoint.read(checkpoint, to_train=True)
    steps = {path: step for path, step in steps_in(checkpoint.parent).items() if path != checkpoint}
    later = sorted((path for path in steps if steps[path] > first.step), key=steps.__getitem__)
    within = [path for path in later if steps[path] <= last_step]
    if asked.until is None and not within:
        raise Refusal(
            "until",
            "be a later checkpoint of the run",
            f"no checkpoint beside {first.path.name} (step {first.step}) up to step"
            f" {last_step:,.0f}",
            "Name a later checkpoint, or an earlier one to start from.",
        )
    until = within[-1] if asked.until is None else Path(asked.until)
    last = Checkpoint.read(until, name="until")
    if not first.step < last.step <= last_step:
        raise Refusal(
            "until",
            f"be a checkpoint after `checkpoint` (step {first.step}) and within the run"
            f" ({last_step:,.0f} steps)",
            f"step {last.step}",
            "Name another checkpoint.",
        )
    between = [path for path in later if steps[path] < last.step]
    if len(between) > MOST_CHECKPOINTS:
        chosen = np.linspace(0, len(between) - 1, MOST_CHECKPOINTS).round().astype(int)
        between = [between[k] for k in chosen]
    return first, last, (*between, until)


def _plans(asked: BranchOptions, history: History, own: float) -> tuple[Plan, ...]:
    """Return how the batches of each batch size are made up.

    Args:
        asked: What was asked for.
        history: Of the run.
        own: The batch size of the run.
    """
    given = asked.batch_sizes
    sizes = given.split(",") if isinstance(given, str) else given
    device_batch = largest_device_batch(history, Segments.of(history))
    most = asked.max_device_batch_size or round(device_batch)
    wanted = [_batch_size(size, own) for size in sizes]
    plans = tuple(dict.fromkeys(_plan(size, asked.devices, most) for size in wanted))
    if not any(plan.batch_size > 1.5 * own or plan.batch_size < own / 1.5 for plan in plans):
        raise Refusal(
            "batch_sizes",
            f"have a batch size that differs from the run's own, {own:.4g}",
            ", ".join(map(str, sizes)),
            "Give 4x,16x.",
        )
    return plans


def _rule(rule: str, history: History, by_noise_scale: Bounded) -> str:
    """Return the rule for the learning rate. "auto" follows the optimizer of the run.

    It is the square root for Adam and its variants. For SGD it is the gain of a step,
    (1 + b/B0)/(1 + b/B). Far below the noise scale b this is B/B0, which is also taken if the
    noise scale is not resolved.
    """
    if rule != "auto":
        return rule
    kinds = {OptimizerKind.OTHER} if history.optimizer is None else {*history.optimizer.kinds}
    if not kinds <= {OptimizerKind.SGD, OptimizerKind.MOMENTUM}:
        return "sqrt"
    return "adascale" if math.isfinite(by_noise_scale.value) else "linear"


def _learning_rates(history: History, first: Checkpoint, last: Checkpoint) -> tuple[Array, Array]:
    """Return the steps and learning rates from one checkpoint to the other. The first rate is 1."""
    start, end = first.learning_rate, last.learning_rate
    if not start > 0:
        raise Refusal(
            "checkpoint",
            "be at a positive learning rate",
            f"{start:g} in {first.path}",
            "Name a later checkpoint.",
        )
    within = (history["step"] > first.step) & (history["step"] < last.step)
    recorded = history["learning_rate"]
    within &= np.isfinite(recorded)
    if not within.any() and math.isfinite(end) and not math.isclose(start, end, rel_tol=1e-3):
        raise Refusal(
            "run",
            "have recorded its learning rate",
            "no learning rate between the checkpoints",
            f"It changed there from {start:g} to {end:g}. Train the run again.",
        )
    steps = [float(first.step), *history["step"][within], float(last.step)]
    rates = [start, *recorded[within], end]
    if math.isnan(end):
        steps, rates = steps[:-1], rates[:-1]
    return np.array(steps), np.array(rates) / start


def _batch_size(given: str | float, own: float) -> float:
    """Return a batch size in examples. "4x" is four times the run's own."""
    text = str(given).strip()
    try:
        size = float(text[:-1]) * own if text.endswith("x") else float(text)
    except ValueError:
        size = math.nan
    if not 1 <= size < math.inf:
        raise Refusal(
            "batch_sizes",
            "be numbers of examples, or multiples of the run's own",
            repr(given),
            "Write, for example, 4x,16x.",
        )
    return size


def _plan(size: float, devices: int, most: int) -> Plan:
    """Return a plan with equal micro-batches, as large as fit on the device."""
    accumulation = max(1, math.ceil(size / (devices * most) / 1.0001))
    return Plan(max(1, round(size / (devices * accumulation))), accumulation, devices)


def _middle(folder: Path, last: float) -> Path:
    """Return the checkpoint nearest to the middle of a run."""
    found = {path: step for path, step in steps_in(folder).items() if 0 < step < last}
    if not found:
        raise Refusal(
            "checkpoint",
            "be a checkpoint within the run, or a folder of such checkpoints",
            f"{folder} without any",
            "Save them with `ModelCheckpoint(every_n_train_steps=1000, save_top_k=-1)`.",
        )
    return min(found, key=lambda path: abs(found[path] - last / 2))
