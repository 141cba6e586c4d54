# SPDX-License-Identifier: Apache-2.0
"""`noisescale profile TARGET`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Details, Html, Json, show
from noisescale.cli.training import TRAINED, TRAINER
from noisescale.cli.values import numbers

EXAMPLE = "noisescale profile train.py:make --run lightning_logs/version_0"


@command_from(
    "profile",
    {
        **TRAINED,
        "target": "A function that returns a LightningModule and its data, or transformers'"
        " Trainer. Written as package.module:name or file.py:name.",
        "device_batch_sizes": Given(
            str,
            "Examples on a device at once, for example 8,16. Default: 1,2,4... while they fit in"
            " memory; with --run sizes around the run's own.",
            read=partial(numbers, "device-batch-sizes"),
        ),
        "accumulation": Given(
            str,
            "Micro-batches in a step, for example 1,4. Default: 1,2; with --run 1, and the run's"
            " own number at its own size.",
            read=partial(numbers, "accumulation"),
        ),
        "run": "Folder of a run with a monitor. The times are written into it, where `noisescale"
        " predict` finds them.",
        "output": "File of JSON to which the times are added. Use one file for 1, 2, 4... devices."
        " Default: step_times.json, with --run in its folder.",
    },
    positional="target",
    panels=TRAINER,
)
def profile_steps(
    values: Values, details: Details = False, as_json: Json = False, html: Html = None
) -> None:
    """Measure the step times of a training at several batch sizes on a device."""
    from rich.console import Console

    from noisescale.profiling.profile import profile
    from noisescale.user_code.targets import is_first, shorten_errors

    if values["run"] is None:
        values["output"] = values["output"] or Path("step_times.json")
    console = Console(stderr=True, highlight=False, quiet=not is_first())
    with console.status("Timing the first steps...") as status, shorten_errors():
        found = profile(**values, progress=lambda line: status.update(f"{line}. Timing more..."))
    if is_first():
        show(found, details=details, as_json=as_json, html=html)
