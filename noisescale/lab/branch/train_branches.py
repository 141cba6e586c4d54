# SPDX-License-Identifier: Apache-2.0
"""Branch a run at larger batch sizes, until each branch reaches the run's own later loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.history.segments import Segments
from noisescale.lab.branch.fit_to_loss import BranchSetup, fit_to_loss, measure_losses
from noisescale.lab.branch.planning import Branching, BranchOptions, plan_branches
from noisescale.lab.jobs.jobs import Training
from noisescale.lab.jobs.trial_process import write_result
from noisescale.lightning.checkpoints import Checkpoint
from noisescale.lightning.resized_loaders import held_examples, is_stream
from noisescale.lightning.trainer_access import isolate_rng
from noisescale.lightning.training import plain_trainer, quiet, seed_all
from noisescale.plan import Plan
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.prediction.run_hardware import largest_device_batch
from noisescale.refusal import Refusal
from noisescale.user_code.targets import is_first

if TYPE_CHECKING:
    import pytorch_lightning as pl


def train_branches(
    branching: Branching,
    module: pl.LightningModule,
    data: Any,
    output: Path,
    *,
    loss_examples: int = 2048,
    progress: Callable[[str], None] = lambda _: None,
    **trainer_options: Any,
) -> BranchedRun:
    """Train the branches that are missing, and save each branch in a file when it ends.

    Args:
        branching: The plan from `plan_branches`.
        module: The LightningModule of the run, newly made. A copy of it is trained.
        data: The training data, see `time_steps`.
        output: A JSON file. Branches in this file are not trained again.
        loss_examples: Number of examples on which losses are evaluated. They are always the same.
        progress: Called with a sentence about the run, and with one about each branch.
        trainer_options: Arguments of the Trainer.

    Raises:
        ValueError: If the file has branches with other settings, the checkpoints are of another
            module, or the run's loss did not fall.
    """
    branched, setup = begin_branches(
        branching, module, data, output, loss_examples=loss_examples, **trainer_options
    )
    progress(say_course(branched))
    with quiet(), isolate_rng():
        done = {(branch.batch_size, branch.order) for branch in branched.branches}
        for order in range(branching.orders):
            for plan in branching.plans:
                if (float(plan.batch_size), order) in done:
                    continue
                known = [b for b in branched.branches if b.batch_size == float(plan.batch_size)]
                branch = _train_branch(branching, setup, plan, order, branched.goal, known)
                branched = replace(branched, branches=(*branched.branches, branch))
                _keep(branched, output)
                many = len(branching.plans) * branching.orders
                progress(say_branch(branch, len(branched.branches), many))
    return branched


def begin_branches(
    branching: Branching,
    module: pl.LightningModule,
    data: Any,
    output: Path,
    *,
    loss_examples: int = 2048,
    **trainer_options: Any,
) -> tuple[BranchedRun, BranchSetup]:
    """Return the branches that the file has, or measure the losses of the run's checkpoints.

    The arguments are those of `train_branches`. Nothing is trained.
    """
    _check(module, loss_examples, trainer_options)
    with quiet(), isolate_rng():
        setup = _setup(branching, module, data, loss_examples, trainer_options)
        return _read_or_begin(branching, setup, output, loss_examples), setup


def train_branch_task(
    module: pl.LightningModule, data: Any, spec: Mapping[str, Any], folder: Path
) -> None:
    """Train one branch for a worker, and write it into its folder.

    Args:
        module: The LightningModule of the run, newly made.
        data: The training data.
        spec: From `BranchJob.next_tasks`.
        folder: Of the task.
    """
    branching = plan_branches(BranchOptions(**spec["asked"]))
    options = Training(**spec["training"]).trainer_options
    known = [] if spec["known"] is None else [Branch.from_record(spec["known"])]
    begun = BranchedRun.from_record(spec["begun"])
    with quiet(), isolate_rng():
        setup = _setup(branching, module, data, spec["loss_examples"], options)
        plan = branching.plans[spec["plan"]]
        branch = _train_branch(branching, setup, plan, spec["order"], begun.goal, known)
    if is_first():
        write_result({"branch": asdict(branch)}, folder)


def _check(
    module: pl.LightningModule, loss_examples: int, trainer_options: Mapping[str, Any]
) -> None:
    if not module.automatic_optimization:
        raise Refusal(
            "module",
            "use automatic optimization for branches",
            "manual optimization",
            "Compare two whole runs instead: `noisescale predict --second-run`.",
        )
    if loss_examples < 1:
        raise Refusal("loss_examples", "be at least 1", loss_examples, "Give 2048.")
    if any(way in str(trainer_options.get("strategy")) for way in ("fork", "spawn", "notebook")):
        raise Refusal(
            "strategy",
            "start the whole command again for each device",
            f"{trainer_options['strategy']!r}, which starts only a function",
            "Give ddp.",
        )


def _setup(
    branching: Branching,
    module: pl.LightningModule,
    data: Any,
    loss_examples: int,
    trainer_options: dict[str, Any],
) -> BranchSetup:
    history = branching.history
    own = max(1, round(largest_device_batch(history, Segments.of(history))))  # of a device
    seed_all(0)  # the same examples whenever the command is called
    with _with_trainer(data, module, trainer_options):
        held = held_examples(data, loss_examples, own)
    return BranchSetup(module, data, held, trainer_options)


@contextmanager
def _with_trainer(
    data: Any, module: pl.LightningModule, trainer_options: dict[str, Any]
) -> Iterator[None]:
    """Give a data module a trainer, as its `setup` may need one."""
    if getattr(data, "trainer", True) is not None:
        yield
        return
    data.trainer = plain_trainer(module, trainer_options)
    try:
        yield
    finally:
        data.trainer = None


def _keep(branched: BranchedRun, output: Path) -> None:
    """Write the file on one rank."""
    if is_first():
        branched.to_file(output)


def _train_branch(
    branching: Branching,
    setup: BranchSetup,
    plan: Plan,
    order: int,
    goal: float,
    known: Sequence[Branch],
) -> Branch:
    """Train one branch. The first branch of a batch size also tries smaller learning rates.

    The law holds for batch sizes at their own best learning rates, and a rule is only a first
    guess. So the first branch tries smaller powers of the rule's factor, as long as each reaches
    the goal sooner. Later orders start with the factor that was found, and try smaller ones if they
    diverge.
    """
    factors = branching.factors(plan.batch_size)
    if known:
        factors = [factor for factor in factors if factor <= known[0].learning_rate_factor]
    best, diverged, slower = None, [], []
    for factor in factors:
        branch = fit_to_loss(branching, setup, plan, order, goal, factor)
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
    """Return whether a branch reached the goal in fewer steps, or came nearer to it."""
    steps, others = branch.steps_to(goal), other.steps_to(goal)
    if steps is None:
        return others is None and not branch.diverged and branch.losses[-1] < other.losses[-1]
    return others is None or steps < others


def _read_or_begin(
    branching: Branching, setup: BranchSetup, output: Path, loss_examples: int
) -> BranchedRun:
    """Return the branches in the file, or a new record with the losses of the checkpoints."""
    if output.exists():
        known = BranchedRun.from_file(output)
        now = (branching.checkpoint.step, branching.end, branching.rule, loss_examples)
        then = (int(known.start), int(known.until), known.rule, known.loss_examples)
        if now != then or not math.isclose(known.batch_size, branching.batch_size, rel_tol=1e-3):
            raise Refusal(
                "output",
                "have branches with the same settings",
                f"{output} with steps {then[0]} to {then[1]}, rule {then[2]!r} and"
                f" {then[3]} examples",
                f"The settings now are steps {now[0]} to {now[1]}, rule {now[2]!r} and"
                f" {now[3]} examples. Name another file.",
            )
        return known
    checkpoints = [branching.checkpoint, *(Checkpoint.read(path) for path in branching.course)]
    losses = measure_losses(setup, checkpoints)
    course = tuple((float(c.step), loss) for c, loss in zip(checkpoints, losses, strict=True))
    parameters = branching.history.parameters
    branched = BranchedRun(
        branching.batch_size,
        course,
        loss_examples,
        branching.rule,
        parameters=None if math.isnan(parameters) else parameters,
        learning_rate_change=branching.learning_rate_at(branching.steps),
        of_a_stream=is_stream(setup.held),
    )
    if not branched.falls:
        raise Refusal(
            "until",
            "have a lower loss than `checkpoint`",
            f"{course[-1][1]:.4g} at step {course[-1][0]:,.0f} after {course[0][1]:.4g} at"
            f" step {course[0][0]:,.0f}, on {loss_examples} examples",
            "Choose checkpoints that are farther apart.",
        )
    _keep(branched, output)
    return branched


def say_course(found: BranchedRun) -> str:
    """Return where branches start, and what loss they train for."""
    return (
        f"The loss of the run is {found.course[0][1]:.4g} at step {found.start:,.0f} and"
        f" {found.goal:.4g} at step {found.end:,.0f}. Branches train until they reach the"
        " second one."
    )


def say_branch(branch: Branch, done: int, many: int) -> str:
    """Return how a branch ended, and how many of all branches are done."""
    diverged = ""
    if branch.diverged_at:
        tried = ", ".join(f"{factor:.3g}" for factor in branch.diverged_at)
        diverged = (
            f"; learning rate x {branch.learning_rate_factor:.3g}, after it diverged at x {tried}"
        )
    return (
        f"Branch {done} of {many}: batch size {branch.batch_size:,.4g}, order {branch.order + 1}:"
        f" loss {branch.losses[-1]:.4g} after {branch.steps[-1]:,.0f} steps,"
        f" {branch.seconds:,.0f} s{diverged}"
    )
