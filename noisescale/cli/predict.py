# SPDX-License-Identifier: Apache-2.0
"""`noisescale predict RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisescale.cli.showing import check_html, show
from noisescale.cli.values import flags_of, numbers
from noisescale.refusal import Refusal, rename_arguments

if TYPE_CHECKING:
    from noisescale.prediction.predict import Prediction


EXAMPLE = "noisescale predict lightning_logs/version_0 --price-per-device-hour 2 --hour-worth 30"

BETTER = "Measurements for a more certain critical batch size"
TIMES = "Step times"
READING = "Reading the run"


def predict_run(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a TensorBoard or CSVLogger run, or its CSV file. For a folder with"
            " several runs a table is printed.",
        ),
    ],
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Global batch sizes, for example 64,128. Default: a range of powers of two."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Numbers of devices. Default: 1, 2, 4 and 8 times the run's."),
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
            help="Critical batch size divided by noise scale. Default: by optimizer.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of a sweep of the same model, as for `noisescale fit`.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    branches: Annotated[
        Path | None,
        typer.Option(
            help="File of `noisescale branch`, or a CSV file with batch_size and loss.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    branch_step: Annotated[
        int | None,
        typer.Option(
            help="For a CSV file of --branches: the step of the run at which branches start.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    branch_examples: Annotated[
        float | None,
        typer.Option(
            help="For a CSV file of --branches: the examples of each branch.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    loss_scatter: Annotated[
        float | None,
        typer.Option(
            help="For a CSV file of --branches: the scatter of losses. Default: the scatter of"
            " repeated branches, or 0.01.",
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
            help="For --second-run: a result that both runs reached, for example val_loss=0.25."
            " Default: the ends of the runs.",
            rich_help_panel=BETTER,
        ),
    ] = None,
    steps_scatter: Annotated[
        float | None,
        typer.Option(
            help="For --second-run: the scatter of steps. Default: 0.15 (15 %).",
            rich_help_panel=BETTER,
        ),
    ] = None,
    step_times: Annotated[
        Path | None,
        typer.Option(
            help="File of `noisescale profile`, or a run of some steps at another batch size."
            " Default: the times that `noisescale profile --run` left in the run's folder, else"
            " those of the run's own steps.",
            rich_help_panel=TIMES,
        ),
    ] = None,
    max_device_batch_size: Annotated[
        float | None,
        typer.Option(
            help="Most examples that fit on a device. Default: the largest number that was timed.",
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
        str | None,
        typer.Option(
            help="Unit of batch sizes, for example sequences. Default: the unit of the run.",
            rich_help_panel=READING,
        ),
    ] = None,
    optimizer: Annotated[
        int,
        typer.Option(
            help="Number of the optimizer, if several were measured.",
            rich_help_panel=READING,
        ),
    ] = 0,
    monitor: Annotated[
        str | None,
        typer.Option(help="Name of the monitor, if it has a name.", rich_help_panel=READING),
    ] = None,
    allow_truncated: Annotated[
        bool,
        typer.Option(
            "--allow-truncated",
            help="Accept event files that end within a record, as in a run that still trains.",
            rich_help_panel=READING,
        ),
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also print the tables and the assumptions.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with figures to this file.")
    ] = None,
) -> None:
    """Predict the cost of a run's result at other batch sizes and on more devices."""
    from noisescale.history.run_files import runs_in
    from noisescale.prediction.predict import predict
    from noisescale.prediction.runs import predict_runs

    check_html(html)

    def predict_one(run: Path) -> Prediction:
        with rename_arguments(flags_of(predict_run)):
            return predict(
                run,
                numbers("batch-sizes", batch_sizes),
                numbers("devices", devices),
                price_per_device_hour,
                hour_worth=hour_worth,
                calibration=calibration,
                sweep=sweep,
                branches=branches,
                branch_step=branch_step,
                branch_examples=branch_examples,
                loss_scatter=loss_scatter,
                step_times=step_times,
                max_device_batch_size=max_device_batch_size,
                devices_per_node=devices_per_node,
                unit=unit,
                second_run=second_run,
                goal=goal,
                steps_scatter=steps_scatter,
                optimizer=optimizer,
                monitor=monitor,
                allow_truncated=allow_truncated,
            )

    if len(runs := runs_in(run)) > 1:
        if details or html is not None:
            raise Refusal(
                "--details" if details else "--html",
                "be used with one run",
                f"{len(runs)} runs in {run}",
                "Name one of these runs.",
            )
        show(predict_runs(run, runs, predict_one), as_json=as_json)
        return
    show(predict_one(run), details=details, as_json=as_json, html=html)
