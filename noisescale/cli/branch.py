# SPDX-License-Identifier: Apache-2.0
"""`noisescale branch RUN CHECKPOINT TARGET`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisescale.cli.branching_by_workers import branched_by_workers
from noisescale.cli.targets import is_first, module_and_data, told_in_a_line
from noisescale.cli.training import (
    TRAINER,
    Accelerator,
    Data,
    Devices,
    Nodes,
    Precision,
    Strategy,
    Target,
    check_output,
)
from noisescale.cli.values import flags_of
from noisescale.cli.workers import (
    LauncherOptions,
    LauncherOrNone,
    Lease,
    StorageOrNone,
    WorkerCount,
    check_workers,
    options_of,
)
from noisescale.extras import need
from noisescale.printable import printable, printable_json
from noisescale.renamed import renamed

if TYPE_CHECKING:
    from noisescale.prediction.branches import Branch, BranchedRun

OF_THE_RUN = (
    "Branches use the module's code, the optimizer's state and the learning rate schedule of the"
    " run. They do not use the run's callbacks, and only the Trainer settings that you give here."
)

TOO_LARGE = (
    "`--max-device-batch-size` must fit in memory, got batches that do not. Finished branches are"
    " kept. Give a smaller number: larger batches are then accumulated."
)


EXAMPLE = (
    "noisescale branch lightning_logs/version_0 lightning_logs/version_0/checkpoints train.py:make"
)


def branch_run(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a TensorBoard or CSVLogger run."),
    ],
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint of the run, from which branches start. In a folder of checkpoints, the"
            " checkpoint nearest to the middle of the run is used.",
        ),
    ],
    target: Target,
    data: Data = None,
    batch_sizes: Annotated[
        str,
        typer.Option(
            help="Batch sizes of the branches. 4x is four times the run's batch size; 512 is 512"
            " examples. 1x checks that branches train like the run."
        ),
    ] = "1x,4x,16x",
    until: Annotated[
        Path | None,
        typer.Option(
            help="Later checkpoint of the run. Branches train until they reach its loss. Default:"
            " the last checkpoint."
        ),
    ] = None,
    orders: Annotated[
        int, typer.Option(help="Branches at each batch size. Each has its own order of the data.")
    ] = 3,
    learning_rate: Annotated[
        str,
        typer.Option(
            help="Rule by which the learning rate follows the batch size: sqrt, linear, adascale,"
            " capped_sqrt or none. auto: sqrt for Adam; for SGD adascale, or linear if the noise"
            " scale is not resolved."
        ),
    ] = "auto",
    loss_examples: Annotated[
        int, typer.Option(help="Examples in the average of a loss. They are always the same ones.")
    ] = 2048,
    max_device_batch_size: Annotated[
        int | None,
        typer.Option(help="Most examples that fit on a device. Default: the number in the run."),
    ] = None,
    gradient_clip_val: Annotated[
        float | None,
        typer.Option(
            help="Limit of gradient clipping, if the run clipped.", rich_help_panel=TRAINER
        ),
    ] = None,
    gradient_clip_algorithm: Annotated[
        str | None,
        typer.Option(
            help="Kind of gradient clipping, if the run clipped: norm or value.",
            rich_help_panel=TRAINER,
        ),
    ] = None,
    devices: Devices = 1,
    nodes: Nodes = 1,
    accelerator: Accelerator = "auto",
    strategy: Strategy = "auto",
    precision: Precision = None,
    output: Annotated[
        Path,
        typer.Option(help="File of the results. The same command with the same file continues."),
    ] = Path("branches.json"),
    monitor: Annotated[
        str | None, typer.Option(help="Name of the monitor, if it has a name.")
    ] = None,
    storage: StorageOrNone = None,
    launcher: LauncherOrNone = None,
    launcher_option: LauncherOptions = None,
    workers: WorkerCount = 1,
    lease: Lease = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cost, and train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the critical batch size by training branches of a run at larger batch sizes."""
    from rich.console import Console

    from noisescale.history.reading import read_run
    from noisescale.lightning.branching.branching import begin_branches, train_branches
    from noisescale.lightning.branching.planning import plan_branches
    from noisescale.report.branches import Planned, branches_table, cost_lines, headline
    from noisescale.report.branches import as_json as json_of
    from noisescale.tuning.branch_job import BranchJob
    from noisescale.tuning.jobs import Training

    check_output(output)
    if dry_run and as_json:
        raise ValueError(
            "`--json` and `--dry-run` must not be combined, got both. A dry run has no result:"
            " leave one of them out."
        )
    flags = flags_of(branch_run) | {"rule": "--learning-rate"}
    with renamed(flags):
        check_workers(workers, lease)
        history = read_run(run, monitor=monitor)
        branching = plan_branches(
            history,
            checkpoint,
            until=until,
            batch_sizes=batch_sizes.split(","),
            orders=orders,
            rule=learning_rate,
            devices=devices * nodes,
            max_device_batch_size=max_device_batch_size,
        )
    console = Console(stderr=True, highlight=False, quiet=not is_first())
    planned = [
        Planned(size, branching.steps_at(size), branching.factor(size))
        for size in (plan.batch_size for plan in branching.plans)
    ]
    steps = branching.checkpoint.step, branching.end
    for line in cost_lines(*steps, planned, orders, branching.device_hours(loss_examples)):
        console.print(line, markup=False)
    console.print(OF_THE_RUN, markup=False)
    module, examples = module_and_data(target, data)
    if dry_run:
        return
    status = console.status("Measuring the losses of the run's checkpoints...")
    training = Training(
        target,
        data,
        devices,
        accelerator,
        strategy,
        precision,
        gradient_clip_val,
        gradient_clip_algorithm,
    )

    def on_course(found: BranchedRun) -> None:
        console.print(
            f"The loss of the run is {found.course[0][1]:.4g} at step {found.start:,.0f} and"
            f" {found.goal:.4g} at step {found.end:,.0f}. Branches train until they reach the"
            " second one.",
            markup=False,
        )

    def on_branch(one: Branch) -> None:
        console.print(
            f"{one.batch_size:,.4g}, order {one.order + 1}: loss {one.losses[-1]:.4g} after"
            f" {one.steps[-1]:,.0f} steps, {one.seconds:,.0f} s{_diverged(one)}",
            markup=False,
        )

    with _kept_if_interrupted(output), status, renamed(flags), told_in_a_line(TOO_LARGE):
        if launcher is None and storage is None:
            branched = train_branches(
                branching,
                module,
                examples,
                output,
                loss_examples=loss_examples,
                on_course=on_course,
                on_start=lambda plan, order: status.update(
                    f"Training a branch at {plan.batch_size:,.4g}, order {order + 1} of {orders}..."
                ),
                on_branch=on_branch,
                **training.trainer_options,
                num_nodes=nodes,
            )
        else:
            need("optuna", "`--launcher` and `--storage`")
            if nodes > 1:
                raise ValueError(
                    f"`nodes` must be 1 for branches by workers, got {nodes}: a worker trains on"
                    " one machine. Leave `--launcher` and `--storage` out."
                )
            branched = begin_branches(
                branching,
                module,
                examples,
                output,
                loss_examples=loss_examples,
                **training.trainer_options,
            )
            on_course(branched)
            job = BranchJob(
                training,
                {
                    "run": str(run.absolute()),
                    "monitor": monitor,
                    "checkpoint": str(branching.checkpoint.path.absolute()),
                    "until": str(branching.course[-1].absolute()),
                    "batch_sizes": [float(plan.batch_size) for plan in branching.plans],
                    "orders": orders,
                    "rule": branching.rule,
                    "devices": devices,
                    "max_device_batch_size": max_device_batch_size,
                },
                asdict(replace(branched, branches=())),
                tuple(float(plan.batch_size) for plan in branching.plans),
                orders,
                loss_examples,
            )
            branched = branched_by_workers(
                job,
                branched,
                output,
                storage or str(output.with_suffix(".journal")),
                workers=workers,
                launcher=launcher or "local",
                options=options_of(launcher_option),
                lease=lease,
                status=status,
                on_branch=on_branch,
            )
    if not is_first():
        return
    if as_json:
        print(printable_json(json_of(branched, history)))
        return
    answers = headline(branched, history)
    from noisescale.report.text import Section, listed, pairs

    out = Console(highlight=False)
    out.print(pairs(answers), Section(branches_table(branched)), sep="\n")
    if branched.doubts:
        out.print(*listed("Warnings", branched.doubts, "! ", "bold"), sep="\n")
    words = ["noisescale", "predict", printable(run), "--branches", printable(output)]
    console.print(f"Next: {shlex.join(words)}", markup=False, soft_wrap=True)


def _diverged(branch: Branch) -> str:
    """Return the learning rates at which a branch diverged before, as text."""
    if not branch.diverged_at:
        return ""
    tried = ", ".join(f"{factor:.3g}" for factor in branch.diverged_at)
    return f"; learning rate x {branch.learning_rate_factor:.3g}, after it diverged at x {tried}"


@contextmanager
def _kept_if_interrupted(output: Path) -> Iterator[None]:
    """After Ctrl-C, say where the results are."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stopped:
        interrupted = isinstance(stopped, KeyboardInterrupt) or stopped.code == 1
        if interrupted and output.exists() and is_first():
            print(
                f"noisescale: stopped. Finished branches are in {printable(output)}. Start the same"
                " command again to continue.",
                file=sys.stderr,
            )
        raise
