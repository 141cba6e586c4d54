# SPDX-License-Identifier: Apache-2.0
"""`noisescale predict RUN`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noisescale.cli.runs import show_runs
from noisescale.cli.values import flags_of, numbers
from noisescale.extras import need
from noisescale.printable import printable, printable_json
from noisescale.renamed import renamed

if TYPE_CHECKING:
    from noisescale.history.history import History
    from noisescale.prediction import Calibration
    from noisescale.predictor import Prediction


EXAMPLE = "noisescale predict lightning_logs/version_0 --price-per-device-hour 2 --hour-worth 30"

BETTER = "Measurements that make the critical batch size surer"
TIMES = "Step times"
READING = "Reading the run"


def predict_run(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a TensorBoard or CSVLogger run, or its CSV file. Of a folder of several"
            " runs, a table.",
        ),
    ],
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Global batch sizes, such as 64,128. Default: a range."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Numbers of devices. Default: 1,2,4,8 times the run's."),
    ] = None,
    price_per_device_hour: Annotated[
        float | None, typer.Option(help="Price of one device for one hour, in any currency.")
    ] = None,
    hour_worth: Annotated[
        float | None, typer.Option(help="Cost of one hour of waiting, in the same currency.")
    ] = None,
    calibration: Annotated[
        float | None,
        typer.Option(
            help="Critical batch size over noise scale, if known. Default: 1.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            help="CSV of a sweep of the same model, as for `noisescale fit`.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    branches: Annotated[
        Path | None,
        typer.Option(
            help="File of `noisescale branch`, or CSV of batch_size and loss.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    branch_step: Annotated[
        int | None,
        typer.Option(
            help="For a CSV of --branches: step of the run they start from.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    branch_examples: Annotated[
        float | None,
        typer.Option(
            help="For a CSV of --branches: examples of each branch.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    loss_scatter: Annotated[
        float | None,
        typer.Option(
            help="For a CSV of --branches: scatter of losses. Default: that of repeated branches,"
            " or 0.01.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    second_run: Annotated[
        Path | None,
        typer.Option(
            help="Run of the same model at another batch size.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            help="For --second-run: result of both runs, such as val_loss=0.25. Default: the ends"
            " of the runs.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    steps_scatter: Annotated[
        float | None,
        typer.Option(
            help="For --second-run: scatter of steps. Default: 0.15 (15 %).",
            rich_help_panel=BETTER,
        ),
    ] = None,
    step_times: Annotated[
        Path | None,
        typer.Option(
            help="CSV of `noisescale profile`. Default: the run's times.", rich_help_panel=TIMES
        ),
    ] = None,
    max_device_batch_size: Annotated[
        float | None,
        typer.Option(
            help="Most examples that fit on a device. Default: as timed.",
            rich_help_panel=TIMES,
        ),
    ] = None,
    devices_per_node: Annotated[
        int | None,
        typer.Option(
            help="Devices in a node. Default: all devices are in one node.", rich_help_panel=TIMES
        ),
    ] = None,
    unit: Annotated[
        str,
        typer.Option(help="Unit of batch sizes, such as sequences.", rich_help_panel=READING),
    ] = "examples",
    optimizer: Annotated[
        int,
        typer.Option(
            help="Which optimizer, if several were measured.",
            rich_help_panel=READING,
        ),
    ] = 0,
    monitor: Annotated[
        str | None,
        typer.Option(help="Name of the monitor, if it was given one.", rich_help_panel=READING),
    ] = None,
    allow_truncated: Annotated[
        bool,
        typer.Option(
            "--allow-truncated",
            help="Accept event files that end within a record.",
            rich_help_panel=READING,
        ),
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Print the tables and the assumptions, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with figures to this file.")
    ] = None,
) -> None:
    """Predict what the result of a run costs at other batch sizes, on other devices."""
    from noisescale.history.reading import read_run, runs_in
    from noisescale.predictor import predict
    from noisescale.step_time import fit_step_time, read_timings

    if html is not None:
        need("plotly", "`--html`")
    flags = flags_of(predict_run)
    which: dict[str, Any] = {
        "optimizer": optimizer,
        "monitor": monitor,
        "allow_truncated": allow_truncated,
    }

    def predicted(run: Path) -> Prediction:
        with renamed(flags):
            history = read_run(run, **which)
            other = None
            if second_run is not None:
                with renamed({"run": "--second-run"}):
                    other = read_run(second_run, **which)
        kappa = _calibration(
            *(history, calibration, sweep, branches, branch_step),
            branch_examples=branch_examples,
            loss_scatter=loss_scatter,
        )
        step_time = None if step_times is None else fit_step_time(read_timings(step_times))
        others = {"kappa": "--calibration", "step_time": "--step-times", "history": "run"}
        others |= {"calibration": "--calibration`, `--sweep` or `--branches"} if kappa else {}
        with renamed(flags | others):
            return predict(
                history,
                numbers("batch-sizes", batch_sizes),
                numbers("devices", devices),
                price_per_device_hour,
                hour_worth=hour_worth,
                calibration=kappa,
                step_time=step_time,
                max_device_batch_size=max_device_batch_size,
                devices_per_node=devices_per_node,
                unit=unit,
                second_run=other,
                goal=goal,
                steps_scatter=steps_scatter,
            )

    if len(runs := runs_in(run)) > 1:
        if details or html is not None:
            raise ValueError(
                f"`{'--details' if details else '--html'}` must come with one run, got"
                f" {len(runs)} in {printable(run)}. Name one of them."
            )
        show_runs(run, runs, predicted, as_json=as_json)
        return
    prediction = predicted(run)
    if html is not None:
        with renamed({"path": "--html"}):
            prediction.to_html(html)
    if as_json:
        print(printable_json(prediction.to_json()))
        return
    from noisescale.report.text import print_report

    print_report(prediction, details=details, more="add --details")
    if html is not None:
        print(f"Report: {printable(html)}")


def _calibration(
    history: History,
    kappa: float | None,
    sweep: Path | None,
    branches: Path | None,
    branch_step: int | None,
    *,
    branch_examples: float | None = None,
    loss_scatter: float | None = None,
) -> Calibration | float | None:
    import numpy as np

    from noisescale.csv_lines import csv_lines
    from noisescale.history.run_law import critical_batch_size_over
    from noisescale.history.segments import noise_scale_at
    from noisescale.prediction import Calibration
    from noisescale.prediction.branches import BranchedRun
    from noisescale.tradeoff.fit import fit_tradeoff
    from noisescale.tradeoff.sweep_files import read_sweeps

    if sum(given is not None for given in (kappa, sweep, branches)) > 1:
        raise ValueError(
            "`--calibration`, `--sweep` and `--branches` must not be combined, got several of them."
            " Give the one that you trust."
        )
    if branch_step is not None and branches is None:
        raise ValueError(
            f"`--branch-step` must come with `--branches`, got {branch_step} alone."
            " Give the CSV file of what the branches ended with, too."
        )
    if sweep is not None:
        (curve,) = read_sweeps(sweep).values()
        names = {"batch_sizes": "batch_size", "history": "run", "kappa": "--sweep"}
        with warnings.catch_warnings(), renamed(names):
            warnings.simplefilter("ignore")  # they are among those of the prediction
            return Calibration.from_sweep(history, fit_tradeoff(*curve))
    of_losses = {
        "--branch-step": branch_step,
        "--branch-examples": branch_examples,
        "--loss-scatter": loss_scatter,
    }
    given = [name for name, value in of_losses.items() if value is not None]
    if given and (branches is None or branches.suffix == ".json"):
        raise ValueError(
            f"`{given[0]}` must come with `--branches` of a CSV of losses, got"
            f" {'none' if branches is None else printable(branches)}. Leave it out."
        )
    if branches is not None and branches.suffix == ".json":
        with renamed({"history": "run"}):
            return Calibration.from_branched_run(history, BranchedRun.from_file(branches))
    if branches is not None:
        if branch_step is None:
            raise ValueError(
                "`--branches` must come with `--branch-step`, got none."
                " Give the step of the run that the branches started from."
            )
        (_, columns), *_ = list(csv_lines(branches)) or [(0, [])]
        by = "order" if "order" in columns else None
        curves = read_sweeps(branches, measured="loss", by=by)
        sizes = [size for curve in curves.values() for size in curve.batch_sizes]
        losses = [loss for curve in curves.values() for loss in curve.measured]
        orders = [name for name, curve in curves.items() for _ in curve.measured]
        with renamed({"step": "--branch-step", "history": "run", "noise_scale": "--branch-step"}):
            noise_scale = noise_scale_at(history, branch_step)
            if branch_examples is not None:
                seen = np.interp(branch_step, history["step"], history["examples"])
                if seen + branch_examples > 1.01 * history["examples"][-1]:
                    raise ValueError(
                        f"`--branch-examples` must be of the run, got {branch_examples:,.0f} from"
                        f" {seen:,.0f} on, of {history['examples'][-1]:,.0f} in all. Leave it out."
                    )
                end = np.interp(seen + branch_examples, history["examples"], history["step"])
                noise_scale = critical_batch_size_over(history, branch_step, float(end))
        names = {"batch_sizes": "batch_size", "losses": "loss", "kappa": "--branches"}
        with renamed(names | {"scatter": "--loss-scatter"}):
            return Calibration.from_branches(
                noise_scale, sizes, losses, scatter=loss_scatter, orders=orders if by else None
            )
    return kappa
