# SPDX-License-Identifier: Apache-2.0
"""`noisescale branch RUN CHECKPOINT TARGET`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

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
from noisescale.extras import need
from noisescale.lab.branch.branching_by_workers import branched_by_workers
from noisescale.lab.jobs.workers import (
    LauncherOptions,
    LauncherOrNone,
    Lease,
    StorageOrNone,
    WorkerCount,
    workers_to_start,
)
from noisescale.made.targets import is_first, module_and_data, shorten_errors
from noisescale.printable import printable, printable_json
from noisescale.refusal import Refusal, rename_arguments

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
    from noisescale.lab.branch import branch_shown
    from noisescale.lab.branch.branching import train_branches
    from noisescale.lab.branch.planning import plan_branches
    from noisescale.lab.jobs.jobs import Training
    from noisescale.made.data import train_and_val

    check_output(output)
    if dry_run and as_json:
        raise Refusal(
            ("--json", "--dry-run"),
            "not be combined",
            "both",
            "A dry run has no result: leave one of them out.",
        )
    flags = flags_of(branch_run) | {"rule": "--learning-rate"}
    with rename_arguments(flags):
        given = launcher_option if launcher or storage else None
        to_start = workers_to_start(workers, launcher or "local", given, lease, accelerator)
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
    branch_shown.print_costs(console, branching, orders, loss_examples)
    module, examples = module_and_data(target, data)
    if dry_run:
        return
    training = Training(
        *(target, data, devices, accelerator, strategy, precision),
        *(gradient_clip_val, gradient_clip_algorithm),
    )
    status = console.status("Measuring the losses of the run's checkpoints...")
    told = branch_shown.Told(console, status, orders)
    with _kept_if_interrupted(output), status, rename_arguments(flags), shorten_errors(TOO_LARGE):
        if launcher is None and storage is None:
            branched = train_branches(
                branching,
                module,
                train_and_val(examples)[0],
                output,
                loss_examples=loss_examples,
                on_course=told.course,
                on_start=told.start,
                on_branch=told.branch,
                **training.trainer_options,
                num_nodes=nodes,
            )
        else:
            need("optuna", "`--launcher` and `--storage`")
            if nodes > 1:
                raise Refusal(
                    "nodes",
                    "be 1 for branches by workers",
                    f"{nodes}: a worker trains on one machine",
                    "Leave `--launcher` and `--storage` out.",
                )
            branched = branched_by_workers(
                branching,
                module,
                train_and_val(examples)[0],
                output,
                training,
                run=run,
                monitor=monitor,
                orders=orders,
                max_device_batch_size=max_device_batch_size,
                loss_examples=loss_examples,
                place=storage or str(output.with_suffix(".journal")),
                to_start=to_start,
                told=told,
            )
    if not is_first():
        return
    if as_json:
        from noisescale.lab.branch.tables import as_json as json_of

        print(printable_json(json_of(branched, history)))
        return
    branch_shown.print_result(branched, history)
    words = ["noisescale", "predict", printable(run), "--branches", printable(output)]
    console.print(f"Next: {shlex.join(words)}", markup=False, soft_wrap=True)


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
