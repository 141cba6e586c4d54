# SPDX-License-Identifier: Apache-2.0
"""Branch a run at larger batch sizes, until each branch has the loss that the run itself had."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer

from noisescale.bounded import Bounded
from noisescale.history.history import History
from noisescale.history.optimizers import OptimizerKind, has_decayed
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array, Segments
from noisescale.lightning.branching.branched_fit import (
    Ground,
    branched_fit,
    losses_at,
    seed_all,
)
from noisescale.lightning.branching.checkpoints import Checkpoint, steps_in
from noisescale.lightning.profiling.timed_fit import quiet
from noisescale.lightning.resized_loaders import held_examples, is_stream
from noisescale.lightning.trainer_access import isolate_rng
from noisescale.plan import Plan
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.prediction.costing import largest_device_batch
from noisescale.prediction.theory import theory_band
from noisescale.printable import printable
from noisescale.scheduling.learning_rate import factors_for

if TYPE_CHECKING:
    import pytorch_lightning as pl

MOST_STEPS = 1.5
"""A branch at a larger batch size is given up after so many times the steps of the run."""

MOST_STEPS_ALIKE = 3.0
"""So is one at the run's own, which has the whole scatter of small batches."""

MOST_CHECKPOINTS = 8
"""Of the run between the checkpoint and the end, whose losses are taken."""

SAME_SIZE = 1.1
"""The largest batch size over the smallest, of a run along which it does not change."""

POWERS = (1.0, 0.5, 0.25, 0.0)
"""Of a rule's factor on the learning rate: tried while branches diverge, or get there sooner."""

RULES = ("auto", "linear", "sqrt", "adascale", "capped_sqrt", "none")


@dataclass(frozen=True)
class Branching:
    """What is to be branched: see `plan_branches`."""

    history: History
    checkpoint: Checkpoint
    course: tuple[Path, ...]
    """Other checkpoints of the run whose losses are taken; the last is the run's end."""
    end: int
    learning_rates: tuple[Array, Array]
    """Steps of the run, and its learning rate there over that of the checkpoint."""
    batch_size: float
    plans: tuple[Plan, ...]
    orders: int
    rule: str
    by_noise_scale: Bounded
    """B_crit by the noise scale from the checkpoint to the end."""

    @property
    def steps(self) -> int:
        """Of the run, from the checkpoint to the end."""
        return self.end - self.checkpoint.step

    def learning_rate_at(self, steps: float) -> float:
        """Return the run's learning rate so many steps on, over that of the checkpoint."""
        at = self.checkpoint.step + min(steps, self.steps)
        return float(np.interp(at, *self.learning_rates))

    def factor(self, batch_size: float) -> float:
        """Return what the run's learning rate is multiplied by."""
        found = self.by_noise_scale
        return factors_for(
            self.rule,  # type: ignore[arg-type]  # one of RULES
            batch_size=batch_size,
            base_batch_size=self.batch_size,
            noise_scale=found.value if math.isfinite(found.value) else found.low,
        ).learning_rate

    def steps_at(self, batch_size: float) -> Bounded:
        """Return the steps that a branch is expected to take, as far off as the theory has been."""
        band = theory_band(
            self.history.optimizer or OptimizerKind.OTHER, decayed=has_decayed(self.history)
        ).factor
        found = self.by_noise_scale
        if not math.isfinite(found.value):
            ends = float(self.steps), self.steps * self.batch_size / batch_size
            return Bounded(math.sqrt(math.prod(ends)), min(ends), max(ends))
        high = found.high if math.isfinite(found.high) else found.value
        ends = band.low * found.low, band.high * high

        def steps(critical: float) -> float:
            return self.steps * (1 + critical / batch_size) / (1 + critical / self.batch_size)

        several = sorted(map(steps, (*ends, found.value)))
        return Bounded(steps(found.value), several[0], several[-1])

    @property
    def device_hours(self) -> Bounded:
        """What all branches cost, at the run's own seconds an example; unknown without these."""
        seconds, steps = self.history["seconds_per_step"], Segments.of(self.history).steps
        timed = seconds > 0
        if not timed.any():
            return Bounded(math.nan, math.nan, math.nan)
        devices = self.history["devices"]
        used = float(devices[-1]) if math.isfinite(devices[-1]) else 1.0
        step = float((seconds * steps)[timed].sum() / steps[timed].sum()) * used / 3600
        parts = []
        for plan in self.plans:
            searched = 0 if self.factor(plan.batch_size) == 1 else 1
            examples = (self.orders + searched) * plan.batch_size / self.batch_size
            parts.append(self.steps_at(plan.batch_size) * (step * examples))
        sums = (sum(getattr(part, end) for part in parts) for end in ("value", "low", "high"))
        return Bounded(*sums)


def plan_branches(
    history: Mapping[str, Array],
    checkpoint: Path,
    *,
    until: Path | None = None,
    batch_sizes: Sequence[str | float] = ("1x", "4x", "16x"),
    orders: int = 3,
    rule: str = "auto",
    devices: int = 1,
    max_device_batch_size: int | None = None,
) -> Branching:
    """Decide what is trained, and say what is wrong with what was given, before anything is.

    Args:
        history: Of the run.
        checkpoint: A file that ModelCheckpoint wrote, with the optimizer's state, or a folder of
            such files, of which the one nearest to the middle of the run is taken.
        until: A later one, whose loss branches are to reach. Default: the latest beside the first.
        batch_sizes: Of the branches: "4x" is four times the run's, a number counts examples. One at
            the run's own tells whether branches do what the run did.
        orders: Branches of each batch size, each with its own order of the data.
        rule: Of the learning rate, see `factors_for`. "auto" is the square root for Adam and its
            kin. For SGD it is linear with the gain of a step, (1 + b/B0)/(1 + b/B), which is B/B0
            far below the noise scale b; that alone where the noise scale is not resolved.
        devices: That branches are trained on.
        max_device_batch_size: The most examples of a device at once. Default: the run's own.

    Raises:
        ValueError: If something of that cannot be.
        OSError: If a checkpoint cannot be read.
    """
    if not isinstance(history, History):
        history = History.from_columns(dict(history))
    last = float(history["step"][-1])
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {', '.join(RULES)}, got {rule!r}. Take auto.")
    for name, given, usual in (("orders", orders, "3"), ("devices", devices, "1")):
        if given < 1:
            raise ValueError(f"`{name}` must be at least 1, got {given}. Give {usual}.")
    if max_device_batch_size is not None and max_device_batch_size < 1:
        raise ValueError(
            f"`max_device_batch_size` must be at least 1, got {max_device_batch_size}."
            " Leave it out: it is then the run's own."
        )
    if checkpoint.is_dir():
        checkpoint = _middle(checkpoint, last)
    first = Checkpoint.read(checkpoint, to_train=True)
    ends = {path: step for path, step in steps_in(checkpoint.parent).items() if path != checkpoint}
    if until is None:
        within = [path for path, step in ends.items() if first.step < step <= last]
        if not within:
            raise ValueError(
                f"`until` must be a later checkpoint of the run, got none beside {first.path.name}"
                f" (step {first.step}) up to step {last:,.0f}. Name one."
            )
        until = max(within, key=lambda path: ends[path])
    last_one = Checkpoint.read(until, name="until")
    end = last_one.step
    if not first.step < end <= last:
        raise ValueError(
            f"`until` must be later than `checkpoint`, within the run of {last:,.0f} steps, got"
            f" step {end} after step {first.step}. Name another."
        )
    between = sorted(
        (path for path, step in ends.items() if first.step < step < end), key=lambda x: ends[x]
    )
    if len(between) > MOST_CHECKPOINTS:
        chosen = np.linspace(0, len(between) - 1, MOST_CHECKPOINTS).round().astype(int)
        between = [between[k] for k in chosen]
    span = Segments.of(history.between(first.step, end))
    if span.batch_size.max() > SAME_SIZE * span.batch_size.min():
        raise ValueError(
            "`run` must have one batch size from `checkpoint` to `until`, got"
            f" {span.batch_size.min():,.4g} to {span.batch_size.max():,.4g}. Name checkpoints"
            " between which it did not change."
        )
    size = float((span.steps * span.batch_size).sum() / span.steps.sum())
    learning_rates = _learning_rates(history, first, last_one)
    kind = history.optimizer
    most = max_device_batch_size or round(largest_device_batch(history, Segments.of(history)))
    wanted = [_batch_size(given, size) for given in batch_sizes]
    plans = tuple(dict.fromkeys(_plan(x, devices, most) for x in wanted))
    if not any(plan.batch_size > 1.5 * size or plan.batch_size < size / 1.5 for plan in plans):
        raise ValueError(
            f"`batch_sizes` must have another than the run's own, {size:.4g}, got"
            f" {', '.join(map(str, batch_sizes))}. Give 4x,16x."
        )
    by_noise_scale = RunLaw.of(span, Bounded(1.0, 1.0, 1.0)).critical_batch_size
    if rule == "auto" and kind in (OptimizerKind.SGD, OptimizerKind.MOMENTUM):
        rule = "adascale" if math.isfinite(by_noise_scale.value) else "linear"
    elif rule == "auto":
        rule = "sqrt"
    course = (*between, until)
    return Branching(
        history, first, course, end, learning_rates, size, plans, orders, rule, by_noise_scale
    )


def train_branches(
    branching: Branching,
    module: pl.LightningModule,
    data: Any,
    output: Path,
    *,
    loss_examples: int = 2048,
    on_course: Callable[[BranchedRun], None] = lambda _: None,
    on_start: Callable[[Plan, int], None] = lambda *_: None,
    on_branch: Callable[[Branch], None] = lambda _: None,
    **trainer_options: Any,
) -> BranchedRun:
    """Train what is missing of the branches, and keep each in a file as soon as it is there.

    Args:
        branching: From `plan_branches`.
        module: The LightningModule of the run, as it was made; a copy is trained.
        data: What it trains on, see `profile_step_times`.
        output: A JSON file. Branches that are in it already are not trained again.
        loss_examples: Over which losses are taken, the same ones every time.
        on_course: Called when the losses of the run's checkpoints are known.
        on_start: Called with the plan and the order of a branch that begins.
        on_branch: Called with a branch that ended.
        trainer_options: For the Trainer.

    Raises:
        ValueError: If the file is of other branches, the checkpoints are not the module's, or the
            run's loss did not fall.
    """
    if not module.automatic_optimization:
        raise ValueError(
            "`module` must be trained by automatic optimization for branches, got one with manual"
            " optimization. Compare whole runs: `noisescale predict --second-run`."
        )
    if loss_examples < 1:
        raise ValueError(f"`loss_examples` must be at least 1, got {loss_examples}. Give 2048.")
    if any(way in str(trainer_options.get("strategy")) for way in ("fork", "spawn", "notebook")):
        raise ValueError(
            "`strategy` must start the command once more for each device, got"
            f" {trainer_options['strategy']!r}, which starts functions of it. Give ddp."
        )
    largest = max(int(plan.device_batch_size) for plan in branching.plans)
    with quiet(), isolate_rng():
        seed_all(0)  # the same examples whenever the command is called
        held = held_examples(data, loss_examples, largest)
        ground = Ground(module, data, held, trainer_options)
        branched = _known_or_new(branching, ground, output, loss_examples)
        on_course(branched)
        done = {(branch.batch_size, branch.order) for branch in branched.branches}
        for order in range(branching.orders):
            for plan in branching.plans:
                if (float(plan.batch_size), order) in done:
                    continue
                on_start(plan, order)
                known = [b for b in branched.branches if b.batch_size == float(plan.batch_size)]
                branch = _branch(branching, ground, plan, order, branched.goal, known)
                branched = replace(branched, branches=(*branched.branches, branch))
                _keep(branched, output)
                on_branch(branch)
    return branched


def _keep(branched: BranchedRun, output: Path) -> None:
    """Write the file, on one rank alone."""
    if getattr(rank_zero_only, "rank", 0) == 0:
        branched.to_file(output)


def _branch(
    branching: Branching,
    ground: Ground,
    plan: Plan,
    order: int,
    goal: float,
    known: Sequence[Branch],
) -> Branch:
    """Train one branch, and the first one of a batch size at smaller learning rates, too.

    The law is of batch sizes at their own best learning rates, and a rule is no more than a start:
    of the powers of its factor the first branch goes down as long as it gets there sooner. Later
    orders have what was found, and go on from there if they diverge.
    """
    factors = list(dict.fromkeys(branching.factor(plan.batch_size) ** p for p in POWERS))
    if known:
        factors = [factor for factor in factors if factor <= known[0].learning_rate_factor]
    best, diverged, slower = None, [], []
    for factor in factors:
        branch = _trained(branching, ground, plan, order, goal, factor)
        if branch.diverged and best is None:
            diverged.append(factor)
            last = branch
            continue
        if best is not None and not _sooner(branch, best, goal):
            slower.append(factor)
            break
        if best is not None:
            slower.append(best.learning_rate_factor)
        best = branch
        if known:
            break
    return replace(best or last, diverged_at=tuple(diverged), slower_at=tuple(slower))


def _sooner(branch: Branch, other: Branch, goal: float) -> bool:
    """Whether a branch reached the goal in fewer steps, or came nearer to it."""
    steps, others = branch.steps_to(goal), other.steps_to(goal)
    if steps is None:
        return others is None and not branch.diverged and branch.losses[-1] < other.losses[-1]
    return others is None or steps < others


def _trained(
    branching: Branching, ground: Ground, plan: Plan, order: int, goal: float, factor: float
) -> Branch:
    size, ratio = float(plan.batch_size), plan.batch_size / branching.batch_size
    expected = branching.steps_at(size)
    clock = branching.steps / expected.value
    most = MOST_STEPS if ratio > 1.5 else MOST_STEPS_ALIKE

    def settle(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
            if "betas" in group and len(group["betas"]) == 2:
                beta1, beta2 = group["betas"]
                # The same half-life in examples (Marek et al. 2025).
                group["betas"] = (beta1, beta2**ratio)

    course = branched_fit(
        ground,
        branching.checkpoint,
        device_batch_size=int(plan.device_batch_size),
        accumulation=plan.accumulation,
        steps=math.ceil(most * branching.steps * max(1.0, 1 / ratio)),
        seed=1 + order,
        goal=goal,
        first_look=math.floor(min(expected.low, branching.steps / ratio) / 3),
        settle=settle,
        learning_rate=lambda steps: branching.learning_rate_at(clock * steps),
    )
    seconds = round(course.seconds, 2)
    return Branch(size, order, factor, course.steps, course.losses, seconds, course.diverged)


def _known_or_new(
    branching: Branching, ground: Ground, output: Path, loss_examples: int
) -> BranchedRun:
    """What is in the file, if it is of these branches; else the losses of the checkpoints."""
    if output.exists():
        known = BranchedRun.from_file(output)
        now = (branching.checkpoint.step, branching.end, branching.rule, loss_examples)
        then = (int(known.start), int(known.until), known.rule, known.loss_examples)
        if now != then or not math.isclose(known.batch_size, branching.batch_size, rel_tol=1e-3):
            raise ValueError(
                f"`output` must be of the same branches, got {printable(output)}, of steps"
                f" {then[0]} to {then[1]} by the {then[2]!r} rule and {then[3]} examples (now"
                f" {now[0]} to {now[1]}, {now[2]!r}, {now[3]}). Name another file."
            )
        return known
    checkpoints = [branching.checkpoint, *(Checkpoint.read(path) for path in branching.course)]
    losses = losses_at(ground, checkpoints)
    course = tuple((float(c.step), loss) for c, loss in zip(checkpoints, losses, strict=True))
    parameters = branching.history.parameters
    branched = BranchedRun(
        branching.batch_size,
        course,
        loss_examples,
        branching.rule,
        parameters=None if math.isnan(parameters) else parameters,
        learning_rate_change=branching.learning_rate_at(branching.steps),
        of_a_stream=is_stream(ground.held),
    )
    if not branched.falls:
        raise ValueError(
            f"`until` must be of a lower loss than `checkpoint`, got {course[-1][1]:.4g} at step"
            f" {course[-1][0]:,.0f} after {course[0][1]:.4g} at step {course[0][0]:,.0f}, over"
            f" {loss_examples} examples. Branch over more of the run."
        )
    _keep(branched, output)
    return branched


def _learning_rates(history: History, first: Checkpoint, last: Checkpoint) -> tuple[Array, Array]:
    """The course of the learning rate from one checkpoint to the other, from 1 on."""
    start, end = first.learning_rate, last.learning_rate
    if not start > 0:
        raise ValueError(
            f"`checkpoint` must be at a positive learning rate, got {start:g} in"
            f" {printable(first.path)}. Name a later one."
        )
    within = (history["step"] > first.step) & (history["step"] < last.step)
    recorded = history["learning_rate"]
    within &= np.isfinite(recorded)
    if not within.any() and math.isfinite(end) and not math.isclose(start, end, rel_tol=1e-3):
        raise ValueError(
            f"`run` must have recorded its learning rate, which went from {start:g} to {end:g},"
            " got none: its logs are older. Train it again."
        )
    steps = [float(first.step), *history["step"][within], float(last.step)]
    rates = [start, *recorded[within], end]
    if math.isnan(end):
        steps, rates = steps[:-1], rates[:-1]
    return np.array(steps), np.array(rates) / start


def _batch_size(given: str | float, own: float) -> float:
    """Examples: "4x" is four times the run's own."""
    text = str(given).strip()
    try:
        size = float(text[:-1]) * own if text.endswith("x") else float(text)
    except ValueError:
        size = math.nan
    if not 1 <= size < math.inf:
        raise ValueError(
            f"`batch_sizes` must be numbers of examples, or times the run's own, got {given!r}."
            " Give for instance 4x,16x."
        )
    return size


def _plan(size: float, devices: int, most: int) -> Plan:
    """Micro-batches of nearly the device's most, all alike."""
    accumulation = max(1, math.ceil(size / (devices * most) / 1.0001))
    return Plan(max(1, round(size / (devices * accumulation))), accumulation, devices)


def _middle(folder: Path, last: float) -> Path:
    """The checkpoint nearest to the middle of a run."""
    found = {path: step for path, step in steps_in(folder).items() if 0 < step < last}
    if not found:
        raise ValueError(
            f"`checkpoint` must be a checkpoint within the run, or a folder of some, got"
            f" {printable(folder)} without. Save them with"
            " `ModelCheckpoint(every_n_train_steps=1000, save_top_k=-1)`."
        )
    return min(found, key=lambda path: abs(found[path] - last / 2))
