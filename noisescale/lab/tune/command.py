# SPDX-License-Identifier: Apache-2.0
"""`noisescale tune TARGET --search learning_rate=0.001..1 --metric val_loss --budget 1h`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from noisescale.lab.jobs.awaited import train_in_sight
from noisescale.lab.jobs.workers import (
    WORKERS,
    Launcher,
    LauncherOptions,
    Lease,
    WorkerCount,
    interruptible,
    make_folder,
    workers_to_start,
)
from noisescale.printable import printable, printable_json
from noisescale.refusal import Refusal, rename_arguments

if TYPE_CHECKING:
    from noisescale.lab.jobs.awaited import Shown
    from noisescale.lab.jobs.jobs import Entry
    from noisescale.lab.tune.standing import TuneProgress

EXAMPLE = (
    "noisescale tune train.py:make --search learning_rate=0.001..1 --search batch_size=16..1024"
    " --metric val_loss --budget 1h"
)

LIVE = 12
"""Lines of the front that are shown while the search goes on."""

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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with figures to this file.")
    ] = None,
) -> None:
    """Search parameters for the best result at each cost, by CARBS.

    The same command goes on where it was stopped, also with a larger budget.
    """
    from rich.console import Console

    for package in ("optuna", "sklearn"):
        need(package, "`noisescale tune`", extra="tune")
    if html is not None:
        need("plotly", "`--html`")
    from noisescale.lab.jobs.jobs import Training
    from noisescale.lab.tune import tune_shown
    from noisescale.lab.tune.standing import tune_progress, write_tuned
    from noisescale.lab.tune.tune_job_made import made_job
    from noisescale.lab.tune.tuned_tables import front_table
    from noisescale.report.text import Section

    place = storage or str(output / "tune.journal")
    err = Console(stderr=True, highlight=False)
    training = Training(
        *(target, data, devices, accelerator, strategy, precision),
        *(gradient_clip_val, gradient_clip_algorithm),
    )
    flags = flags_of(tune_parameters) | {"metric": "--metric", "goal": "--metric"}
    with rename_arguments(flags | {"center": "center"}), interruptible(place):
        to_start = workers_to_start(workers, launcher, launcher_option, lease, accelerator)
        if html is not None and not html.absolute().parent.is_dir():
            raise Refusal(
                "html", "be in a folder that exists", printable(html), "Create the folder first."
            )
        job = made_job(
            training,
            metric,
            search or (),
            space,
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
        )
        make_folder(output)
        doubts, written = tune_shown.doubts_before(job), -1

        def shown(entries: Mapping[str, Entry]) -> Shown:
            nonlocal written
            progress = tune_progress(job, entries)
            if written != (ended := len(progress.front.trials)):
                write_tuned(progress.front, output)
                written = ended
            tables = [Section(front_table(progress.front, LIVE))] if ended else []
            return tune_shown.progress_line(progress), tables

        entries = train_in_sight(job, place, name, output, to_start, err, doubts, shown)
        progress = tune_progress(job, entries)
        write_tuned(progress.front, output)
        if html is not None:
            from noisescale.lab.tune.tuned_html import write_tuned_html

            write_tuned_html(progress.front, html, warnings=doubts)
    if as_json:
        record = tune_shown.tuned_as_dict(job, progress)
        print(printable_json(json.dumps(record, indent=2, ensure_ascii=False)))
    else:
        _print_result(progress, doubts)
        if html is not None:
            print(f"Report: {printable(html)}")
    if progress.front.best is None:
        raise typer.Exit(1)


def _print_result(progress: TuneProgress, doubts: Sequence[str]) -> None:
    from rich.console import Console

    from noisescale.lab.tune import tune_shown
    from noisescale.lab.tune.tuned_tables import front_answers, front_tables
    from noisescale.report.text import Section, bullets, pairs

    out = Console(highlight=False)
    out.print(tune_shown.progress_line(progress), markup=False)
    out.print(pairs(front_answers(progress.front)))
    out.print(*map(Section, front_tables(progress.front)), sep="\n")
    if doubts:
        out.print(*bullets("Warnings", doubts, "! ", "bold"), sep="\n")
