# SPDX-License-Identifier: Apache-2.0
"""`noisescale sweep TARGET --goal METRIC<=VALUE --batch-sizes 16..2048`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from noisescale.lab.jobs.awaited import trained_in_sight
from noisescale.lab.jobs.workers import (
    TOO_LARGE,
    WORKERS,
    Launcher,
    LauncherOptions,
    Lease,
    WorkerCount,
    made_folder,
    stopped,
    workers_to_start,
)
from noisescale.made.targets import module_and_data, shorten_errors
from noisescale.printable import printable, printable_json
from noisescale.refusal import Refusal, renamed

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison
    from noisescale.lab.jobs.awaited import Shown
    from noisescale.lab.jobs.jobs import Entry, Training
    from noisescale.lab.sweep.settings import SweepJob

EXAMPLE = 'noisescale sweep train.py:make --goal "val_loss<=0.15" --batch-sizes 16..2048'

MOST_SEED = 2**31
"""Beyond it, a seed of a later round might be too large for the sampler."""

UNUSUAL_SEED = 67_280_421_310_721
"""Set before the script is loaded. If there is another one afterwards, the script has set it."""

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
            " database (postgresql://..., mysql://..., sqlite:///...); or grpc://host:port of"
            " Optuna's proxy. Default: sweep.journal in the folder of the results.",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the steps to a result at several batch sizes, each with its best learning rate.

    The same command with the same storage goes on where it was stopped.
    """
    from rich.console import Console

    need("optuna", "`noisescale sweep`")
    from noisescale.lab.jobs.jobs import Training
    from noisescale.lab.jobs.ledger import results_of
    from noisescale.lab.sweep import sweep_shown
    from noisescale.lab.sweep.sweep_doubts import doubts_before
    from noisescale.lab.sweep.table import comparison_of, sweep_progress, write_sweep
    from noisescale.report.text import Section

    flags = flags_of(sweep_batch_sizes) | {
        "goal": "--goal",
        "batch_sizes": "--batch-sizes",
        "target": "TARGET",
    }
    place = storage or str(output / "sweep.journal")
    err = Console(stderr=True, highlight=False)
    training = Training(
        *(target, data, devices, accelerator, strategy, precision),
        *(gradient_clip_val, gradient_clip_algorithm),
    )
    with renamed(flags), stopped(place):
        to_start = workers_to_start(workers, launcher, launcher_option, lease, accelerator)
        job = _job(
            training,
            goal,
            batch_sizes,
            search or (),
            trials=trials,
            repeats=repeats,
            seed=seed,
            epochs=epochs,
            max_device_batch_size=max_device_batch_size,
        )
        made_folder(output)
        doubts, written = doubts_before(job), set[str]()

        def shown(entries: Mapping[str, Entry]) -> Shown:
            nonlocal written
            if written != (ended := results_of(entries).keys()):
                write_sweep(job, entries, output)
                written = set(ended)
            progress = sweep_progress(job, entries)
            table = Section(sweep_shown.sizes_table(job.goal, progress.sizes))
            return sweep_shown.progress_line(progress), [table]

        entries = trained_in_sight(job, place, name, output, to_start, err, doubts, shown)
        write_sweep(job, entries, output)
    found = comparison_of(job, entries)
    if as_json:
        record = sweep_shown.status_as_dict(name, job, entries)
        print(printable_json(json.dumps(record, indent=2, ensure_ascii=False)))
    else:
        _print_result(job, entries, found, doubts)
    if not found.reached:
        raise typer.Exit(1)
    fits = any(each.regimes is not None for each in found.sweeps)
    for command in _next(output, goal, fits=fits):
        err.print(f"Next: {shlex.join(command)}", markup=False, soft_wrap=True)


def _print_result(
    job: SweepJob, entries: Mapping[str, Entry], found: Comparison, doubts: Sequence[str]
) -> None:
    from rich.console import Console

    from noisescale.lab.compare.comparison_answers import sweep_answers
    from noisescale.lab.sweep import sweep_shown
    from noisescale.lab.sweep.sweep_doubts import doubts_after
    from noisescale.lab.sweep.table import sweep_progress
    from noisescale.report.text import Section, bullets, pairs

    out = Console(highlight=False)
    progress = sweep_progress(job, entries)
    out.print(sweep_shown.progress_line(progress), markup=False)
    out.print(Section(sweep_shown.sizes_table(job.goal, progress.sizes)))
    warnings = [*doubts, *doubts_after(job, found, entries, progress)]
    answers = [line for each in found.sweeps for line in sweep_answers(each)]
    out.print(pairs([("", ""), *answers]))
    if warnings:
        out.print(*bullets("Warnings", warnings, "! ", "bold"), sep="\n")


def _job(
    training: Training,
    goal: str,
    batch_sizes: str,
    search: list[str] | tuple[str, ...],
    *,
    trials: int,
    repeats: int,
    seed: int,
    epochs: float,
    max_device_batch_size: int | None,
) -> SweepJob:
    """Return the settings of the sweep, once module and data were tried for one step."""
    from noisescale.checks import checked_count, checked_positive
    from noisescale.lab.parameter_texts import swept_parameters
    from noisescale.lab.sweep.search import Search
    from noisescale.lab.sweep.settings import SweepJob, check_goal, read_batch_sizes

    wanted, sizes, parameters = (
        check_goal(goal),
        read_batch_sizes(batch_sizes),
        swept_parameters(search),
    )
    if checked_count("trials", trials, "Give 9.") < 3:
        raise Refusal("trials", "be at least 3", trials, "Give 9.")
    checked_count("repeats", repeats, "Give 3.")
    if not 0 <= seed < MOST_SEED:
        raise Refusal("seed", f"be from 0 to below {MOST_SEED:,}", f"{seed:,}", "Give 0.")
    checked_positive("epochs", epochs, "Give 50, for example.")
    checked_count("devices", training.devices, "Give 1.")
    if max_device_batch_size is not None:
        checked_count("max_device_batch_size", max_device_batch_size, "Leave it out for no limit.")
    import torch

    from noisescale.lab.sweep.trial_fit import Made, describe

    torch.manual_seed(UNUSUAL_SEED)
    module, data = module_and_data(training.target, training.data)
    seeded = torch.initial_seed() != UNUSUAL_SEED
    with shorten_errors(TOO_LARGE):
        searched = [parameter.name for parameter in parameters]
        own = describe(Made(module, data), training, wanted, min(sizes), searched)
    if not own.learning_rate > 0:
        raise Refusal(
            "configure_optimizers",
            "set a positive learning rate",
            f"{own.learning_rate:g}",
            "The sweep multiplies it.",
        )
    found = Search(parameters, trials, repeats, seed)
    own = replace(own, seeded=seeded)
    return SweepJob(training, own, wanted, sizes, found, epochs, max_device_batch_size)


def _next(output: Path, goal: str, *, fits: bool) -> list[list[str]]:
    from noisescale.lab.sweep.table import SWEEP, TRIALS

    fit = ["noisescale", "fit", printable(output / SWEEP)]
    return [
        *([fit] if fits else []),
        [
            "noisescale",
            "compare",
            printable(output / TRIALS),
            "--goal",
            goal,
            "--html",
            "sweep.html",
        ],
    ]
