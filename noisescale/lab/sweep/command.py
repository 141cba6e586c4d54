# SPDX-License-Identifier: Apache-2.0
"""`noisescale sweep TARGET --goal METRIC<=VALUE --batch-sizes 16..2048`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.showing import show
from noisescale.cli.training import (
    Accelerator,
    Data,
    DevicesHere,
    GradientClipAlgorithm,
    GradientClipVal,
    MaxDeviceBatchSize,
    Precision,
    Strategy,
    Target,
)
from noisescale.cli.values import flags_of
from noisescale.extras import need
from noisescale.lab.jobs.live import in_sight
from noisescale.lab.jobs.worker_options import (
    WORKERS,
    Cold,
    Launcher,
    LauncherOptions,
    Lease,
    PerDevice,
    WorkerCount,
    launcher_options,
)

EXAMPLE = 'noisescale sweep train.py:make --goal "val_loss<=0.15" --batch-sizes 16..2048'

FLAGS = {
    "target": "TARGET",
    "goal": "--goal",
    "batch_sizes": "--batch-sizes",
    "launcher_options": "--launcher-option",
}
"""The names of arguments without a default, or with another name."""

SEARCHED = "The search at each batch size"


def sweep_batch_sizes(
    target: Target,
    goal: Annotated[
        str,
        typer.Option(
            metavar="GOAL",
            help="The result to reach, for example val_loss<=0.15 or val_acc>=0.9, in a metric that"
            " the module logs. It is evaluated by the module's validation.",
        ),
    ],
    batch_sizes: Annotated[
        str,
        typer.Option(
            help="Global batch sizes: 16..2048 for powers of two, or a list such as 16,64,256."
        ),
    ],
    data: Data = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANGE",
            help="Hyperparameter to search, and its range, for example momentum=0.5..0.99:"
            " learning_rate, momentum (for Adam its first beta) or weight_decay. May be repeated."
            " The learning rate is always searched, by default from 1/8 to 8 times the module's"
            " own.",
            rich_help_panel=SEARCHED,
        ),
    ] = None,
    trials: Annotated[
        int,
        typer.Option(
            help="Quasi-random settings at each batch size. A third as many refine the best one.",
            rich_help_panel=SEARCHED,
        ),
    ] = 9,
    repeats: Annotated[
        int,
        typer.Option(
            help="Trainings of the best setting, with different seeds.", rich_help_panel=SEARCHED
        ),
    ] = 3,
    epochs: Annotated[
        float,
        typer.Option(
            help="Most epochs of a training at the smallest batch size. At k times this size it is"
            " √k times as many.",
            rich_help_panel=SEARCHED,
        ),
    ] = 50.0,
    seed: Annotated[
        int, typer.Option(help="Seed of the quasi-random settings.", rich_help_panel=SEARCHED)
    ] = 0,
    max_device_batch_size: MaxDeviceBatchSize = None,
    gradient_clip_val: GradientClipVal = None,
    gradient_clip_algorithm: GradientClipAlgorithm = None,
    devices: DevicesHere = 1,
    accelerator: Accelerator = "auto",
    strategy: Strategy = "auto",
    precision: Precision = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("sweep"),
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where the state is kept: a journal file, also on a shared disk; the URL of a"
            " database (postgresql+psycopg://..., mysql+pymysql://..., sqlite:///...); or"
            " grpc://host:port of Optuna's proxy. Default: sweep.journal in the folder of the"
            " results.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(help="Name of the sweep in the storage.", rich_help_panel=WORKERS),
    ] = "sweep",
    workers: WorkerCount = 1,
    launcher: Launcher = "local",
    launcher_option: LauncherOptions = None,
    lease: Lease = 60.0,
    cold: Cold = False,
    per_device: PerDevice = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the steps to a result at several batch sizes, each with its best learning rate.

    The same command with the same storage goes on where it was stopped.
    """
    need("optuna", "`noisescale sweep`")
    from noisescale.lab.sweep.sweep import JOURNAL, sweep

    storage = storage or str(output / JOURNAL)
    flags = flags_of(sweep_batch_sizes) | FLAGS
    with in_sight(flags, storage) as progress:
        found = sweep(
            target,
            goal,
            batch_sizes,
            data=data,
            search=search or (),
            trials=trials,
            repeats=repeats,
            epochs=epochs,
            seed=seed,
            max_device_batch_size=max_device_batch_size,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            devices=devices,
            accelerator=accelerator,
            strategy=strategy,
            precision=precision,
            output=output,
            storage=storage,
            name=name,
            workers=workers,
            launcher=launcher,
            launcher_options=launcher_options(launcher_option),
            lease=lease,
            cold=cold,
            per_device=per_device,
            progress=progress,
        )
    show(found, as_json=as_json)
    if not found.reached:
        raise typer.Exit(1)
