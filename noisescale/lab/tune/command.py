# SPDX-License-Identifier: Apache-2.0
"""`noisescale tune TARGET --search learning_rate=0.001..1 --metric val_loss --budget 1h`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisescale.checks import require_folder_of
from noisescale.cli.showing import check_html, show
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

EXAMPLE = (
    "noisescale tune train.py:make --search learning_rate=0.001..1 --search batch_size=16..1024"
    " --metric val_loss --budget 1h"
)

FLAGS = {"target": "TARGET", "metric": "--metric", "goal": "--metric"}
FLAGS |= {"launcher_options": "--launcher-option"}
"""The names of arguments without a default, or with another name."""

LENGTH, PRIOR = "How long a training is", "What a noise scale knows of it"


def tune_parameters(
    target: Target,
    metric: Annotated[
        str,
        typer.Option(
            help="The result, for example val_loss: a metric that the module logs. Its value at the"
            " end of a training counts. It is minimised."
        ),
    ],
    data: Data = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VALUES",
            help="A parameter to search, and its values, for example learning_rate=0.001..1,"
            " batch_size=16..1024, dropout=0..0.5:linear or act=relu,tanh. learning_rate,"
            " batch_size, weight_decay, momentum, epochs and steps are those of the training. All"
            " others are arguments of TARGET. Kinds: log, linear, logit, momentum, int, pow2."
            " May be repeated.",
        ),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(help="TOML file of parameters, with a table for each: low, high, kind, ..."),
    ] = None,
    maximize: Annotated[
        bool, typer.Option("--maximize", help="The metric is to rise, as an accuracy is.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Device-hours for all trainings, such as 2h or 30m. Those under way may end."
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="The most trainings.")] = None,
    max_cost: Annotated[
        str | None,
        typer.Option(help="The most device-time of one training, such as 10m. It then stops."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search and of its trainings.")] = 0,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Epochs of each training. Default: 10. The search begins there if it searches"
            " them.",
            rich_help_panel=LENGTH,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each training, instead of epochs.", rich_help_panel=LENGTH),
    ] = None,
    noise_scale: Annotated[
        float | None,
        typer.Option(
            help="The critical batch size, in examples. Epochs and steps are then those at the"
            " batch size of your loader; others are trained until they have made the same"
            " progress.",
            rich_help_panel=PRIOR,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="A run with a NoiseScaleMonitor, which has the noise scale and step times.",
            rich_help_panel=PRIOR,
        ),
    ] = None,
    max_device_batch_size: MaxDeviceBatchSize = None,
    gradient_clip_val: GradientClipVal = None,
    gradient_clip_algorithm: GradientClipAlgorithm = None,
    devices: DevicesHere = 1,
    accelerator: Accelerator = "auto",
    strategy: Strategy = "auto",
    precision: Precision = None,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("tune"),
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where the state is kept, as for `noisescale sweep`. Default: tune.journal in the"
            " folder of the results.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(help="Name of the search in the storage.", rich_help_panel=WORKERS)
    ] = "tune",
    workers: WorkerCount = 1,
    launcher: Launcher = "local",
    launcher_option: LauncherOptions = None,
    lease: Lease = 60.0,
    cold: Cold = False,
    per_device: PerDevice = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with figures to this file.")
    ] = None,
) -> None:
    """Search parameters for the best result at each cost, by CARBS.

    The same command goes on where it was stopped, also with a larger budget.
    """
    for package in ("optuna", "sklearn"):
        need(package, "`noisescale tune`", extra="tune")
    check_html(html)
    if html is not None:
        require_folder_of("--html", html)
    from noisescale.lab.tune.tune import JOURNAL, tune

    storage = storage or str(output / JOURNAL)
    flags = flags_of(tune_parameters) | FLAGS
    with in_sight(flags, storage) as progress:
        found = tune(
            target,
            metric,
            data=data,
            search=search or (),
            space=space,
            maximize=maximize,
            budget=budget,
            trials=trials,
            max_cost=max_cost,
            seed=seed,
            epochs=epochs,
            steps=steps,
            noise_scale=noise_scale,
            run=run,
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
    show(found, as_json=as_json, html=html)
    if found.front.best is None:
        raise typer.Exit(1)
