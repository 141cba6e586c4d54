# SPDX-License-Identifier: Apache-2.0
"""`noisescale predict RUN`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Details, Html, Json, show
from noisescale.cli.values import flags_of, numbers
from noisescale.refusal import Refusal, rename_arguments

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction


EXAMPLE = "noisescale predict lightning_logs/version_0 --price-per-device-hour 2"


@command_from(
    "predict",
    {
        "run": Given(
            Path,
            "Folder of a run, with its file noise_scale.jsonl, or a checkpoint of it. For a folder"
            " with several runs a table is printed.",
        ),
        "batch_sizes": Given(
            str,
            "Global batch sizes, as 64,128. Default: powers of two.",
            read=partial(numbers, "batch-sizes"),
        ),
        "devices": Given(
            str,
            "Numbers of devices. Default: 1, 2, 4, 8 x the run's.",
            read=partial(numbers, "devices"),
        ),
        "calibration": "Critical batch size over noise scale. Default: by optimizer.",
        "sweep": Given(Path, "CSV file of a sweep of the model, as of `noisescale fit`."),
        "branches": Given(Path, "File of `noisescale branch`, or CSV of batch_size and loss."),
        "branch_step": "For a CSV file of --branches: the step at which they start.",
        "same_batch": "Say how the batch is shared by --devices, and what differs.",
        "ramp": Given(
            str,
            "Write a growing batch size for megatron, torchtitan, nanochat or lightning.",
        ),
        "sequence_length": "For --ramp: tokens of a sequence.",
        "unit": "Unit of batch sizes, as sequences. Default: the unit of the run.",
        "step_times": "File of `noisescale profile`, or a run of some steps at another batch size."
        " Default: the times that `noisescale profile --run` left in the run's folder, else those"
        " of the run's own steps.",
        "cost_per_prompt": "Cost of a prompt (a group of rows) without its rows.",
        "cost_per_generation": "Cost of a generation (a row), in the same unit.",
        "second_run": Given(Path, "Run of the same model at another batch size."),
    },
    positional="run",
    panels={
        "Measurements for a more certain critical batch size": "calibration sweep branches"
        " branch_step branch_examples loss_scatter second_run goal steps_scatter",
        "Step times and costs": "step_times max_device_batch_size devices_per_node"
        " cost_per_prompt cost_per_generation",
        "Reading the run": "unit optimizer monitor",
    },
)
def predict_run(
    values: Values, details: Details = False, as_json: Json = False, html: Html = None
) -> None:
    """Predict the cost of a run's result at other batch sizes and on more devices."""
    from noisescale.history.run_files import runs_in
    from noisescale.prediction.predict import predict
    from noisescale.prediction.runs import predict_runs

    def predict_one(run: Path) -> Prediction:
        with rename_arguments(flags_of(predict_run)):
            return predict(**(values | {"run": run}))

    run = values["run"]
    if len(runs := runs_in(run)) > 1:
        given = {"--details": details, "--html": html, "--same-batch": values["same_batch"]}
        given["--ramp"] = values["ramp"]
        if alone := next((flag for flag, value in given.items() if value), None):
            raise Refusal(
                alone,
                "be used with one run",
                f"{len(runs)} runs in {run}",
                "Name one of these runs.",
            )
        show(predict_runs(run, runs, predict_one), as_json=as_json)
        return
    show(predict_one(run), details=details, as_json=as_json, html=html)
