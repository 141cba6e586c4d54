# SPDX-License-Identifier: Apache-2.0
"""`noisescale branch RUN CHECKPOINT TARGET`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescale.cli.showing import show
from noisescale.cli.training import (
    TRAINER,
    Accelerator,
    Data,
    Devices,
    Nodes,
    Precision,
    Strategy,
    Target,
)
from noisescale.cli.values import flags_of
from noisescale.lab.jobs.worker_options import (
    Cold,
    LauncherOptions,
    LauncherOrNone,
    Lease,
    StorageOrNone,
    WorkerCount,
    launcher_options,
)
from noisescale.printable import printable
from noisescale.refusal import rename_arguments

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
    cold: Cold = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cost, and train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the critical batch size by training branches of a run at larger batch sizes."""
    from rich.console import Console

    from noisescale.lab.branch.branch import branch, branch_cost
    from noisescale.made.targets import is_first, shorten_errors

    planned: dict[str, Any] = {
        "batch_sizes": batch_sizes,
        "until": until,
        "orders": orders,
        "learning_rate": learning_rate,
        "loss_examples": loss_examples,
        "max_device_batch_size": max_device_batch_size,
        "devices": devices,
        "nodes": nodes,
        "monitor": monitor,
    }
    console = Console(stderr=True, highlight=False, quiet=not is_first())
    with rename_arguments(flags_of(branch_run)), shorten_errors():
        if dry_run:
            show(branch_cost(run, checkpoint, target, data, **planned), as_json=as_json)
            return
        with console.status("Training branches..."), _keep_if_interrupted(output):
            found = branch(
                run,
                checkpoint,
                target,
                data,
                **planned,
                gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
                accelerator=accelerator,
                strategy=strategy,
                precision=precision,
                output=output,
                storage=storage,
                launcher=launcher,
                launcher_options=launcher_options(launcher_option),
                workers=workers,
                lease=lease,
                cold=cold,
                progress=lambda line: console.print(printable(line), markup=False),
            )
    if is_first():
        show(found, as_json=as_json)


@contextmanager
def _keep_if_interrupted(output: Path) -> Iterator[None]:
    """Take SIGTERM for Ctrl-C, and say after either where the results are."""
    from noisescale.made.targets import is_first

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
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
    finally:
        signal.signal(signal.SIGTERM, before)
