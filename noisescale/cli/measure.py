# SPDX-License-Identifier: Apache-2.0
"""`noisescale measure TARGET`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noisescale.cli.from_function import Given, Values, command_from
from noisescale.cli.showing import Details, Html, Json, show
from noisescale.cli.training import TRAINED, TRAINER
from noisescale.refusal import Refusal

EXAMPLE = "noisescale measure train.py:make --checkpoint last.ckpt"


def _groups(given: list[str] | None) -> dict[str, str] | None:
    """Return the groups of `--group`.

    Examples:
        >>> _groups(["head=^net.2", "body=^net.0"])
        {'head': '^net.2', 'body': '^net.0'}
    """
    if not given:
        return None
    for each in given:
        if "=" not in each:
            raise Refusal(
                "groups", "be written as NAME=PATTERN", each, "Write head=^net.2, for instance."
            )
    return {name: pattern for name, _, pattern in (each.partition("=") for each in given)}


@command_from(
    "measure",
    {
        **TRAINED,
        "target": "A function that returns a LightningModule and its data, or transformers'"
        " Trainer. Written as package.module:name or file.py:name.",
        "batches": Given(
            str,
            "How many batches, or auto: until the interval is narrow enough.",
            read=lambda text: int(text) if text.isdecimal() else text,
        ),
        "width": Given(
            float, "Upper over lower end of an interval that is narrow enough.", default=2.25
        ),
        "seconds": "Most seconds to go on for, with --batches auto.",
        "batch_size": "Examples in a batch of a device. Default: the data loader's own.",
        "groups": Given(
            list[str],
            "A group of parameters as NAME=PATTERN, a regular expression of their names. It can be"
            " given several times.",
            flag="--group",
            read=_groups,
        ),
    },
    positional="target",
    panels=TRAINER,
    without="loss batch_size_fn weight_fn ways elementwise unit confidence progress",
)
def measure_weights(
    values: Values,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Folder of checkpoints. Each is measured, and the noise scale along the run is"
            " recorded for `noisescale predict`."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the record of --checkpoints. Default: noise_scale beside them."
        ),
    ] = None,
    details: Details = False,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Measure the noise scale at fixed weights, before a training or at its checkpoints."""
    from rich.console import Console

    from noisescale.frozen.along_run import measure_checkpoints
    from noisescale.frozen.measure import measure
    from noisescale.user_code.targets import is_first, shorten_errors

    console = Console(stderr=True, highlight=False, quiet=not is_first())
    with console.status("Taking the first batches...") as status, shorten_errors():
        values["progress"] = status.update
        found: Any = None
        if checkpoints is None:
            found = measure(**values)
        elif values.pop("checkpoint") is None:
            found = measure_checkpoints(**values, checkpoints=checkpoints, output=output)
        else:
            raise Refusal(("checkpoint", "checkpoints"), "be one of both", "both", "Leave one out.")
    if is_first():
        show(found, details=details, as_json=as_json, html=html)
