# SPDX-License-Identifier: Apache-2.0
"""`noisescale measure TARGET`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noisescale.cli.showing import check_html, show
from noisescale.cli.training import Accelerator, Data, Devices, Nodes, Precision, Strategy
from noisescale.cli.values import flags_of
from noisescale.refusal import Refusal, rename_arguments

EXAMPLE = "noisescale measure train.py:make --checkpoint last.ckpt"


def measure_weights(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A function that returns a LightningModule and its data, or transformers' Trainer."
            " Written as package.module:name or file.py:name.",
        ),
    ],
    data: Data = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint of Lightning, whose weights are measured.")
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            help="Folder of checkpoints. Each is measured, and the noise scale along the run is"
            " recorded for `noisescale predict`."
        ),
    ] = None,
    batches: Annotated[
        str,
        typer.Option(help="How many batches, or auto: until the interval is narrow enough."),
    ] = "auto",
    batch_size: Annotated[
        int | None,
        typer.Option(help="Examples in a batch of a device. Default: the data loader's own."),
    ] = None,
    width: Annotated[
        float,
        typer.Option(help="Upper over lower end of an interval that is narrow enough."),
    ] = 2.25,
    seconds: Annotated[
        float, typer.Option(help="Most seconds to go on for, with --batches auto.")
    ] = 600.0,
    group: Annotated[
        list[str] | None,
        typer.Option(
            help="A group of parameters as NAME=PATTERN, a regular expression of their names. It"
            " can be given several times."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the record of --checkpoints. Default: noise_scale beside them."
        ),
    ] = None,
    devices: Devices = 1,
    nodes: Nodes = 1,
    accelerator: Accelerator = "auto",
    strategy: Strategy = "auto",
    precision: Precision = None,
    details: Annotated[bool, typer.Option("--details", help="Also print the assumptions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the same as a page to this file.")
    ] = None,
) -> None:
    """Measure the noise scale at fixed weights, before a training or at its checkpoints."""
    from rich.console import Console

    from noisescale.frozen.along_run import measure_checkpoints
    from noisescale.frozen.measure import measure
    from noisescale.made.targets import is_first, shorten_errors

    check_html(html)
    console = Console(stderr=True, highlight=False, quiet=not is_first())
    options: dict[str, Any] = {
        "batches": int(batches) if batches.isdecimal() else batches,
        "batch_size": batch_size,
        "width": width,
        "seconds": seconds,
        "devices": devices,
        "nodes": nodes,
        "accelerator": accelerator,
        "strategy": strategy,
        "precision": precision,
    }
    with (
        console.status("Taking the first batches...") as status,
        rename_arguments(flags_of(measure_weights)),
        shorten_errors(),
    ):
        options |= {"progress": status.update, "groups": _groups(group)}
        found: Any = None
        if checkpoints is None:
            found = measure(target, data, checkpoint=checkpoint, **options)
        elif checkpoint is None:
            found = measure_checkpoints(target, data, checkpoints, output=output, **options)
        else:
            raise Refusal(("checkpoint", "checkpoints"), "be one of both", "both", "Leave one out.")
    if is_first():
        show(found, details=details, as_json=as_json, html=html)


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
                "group", "be written as NAME=PATTERN", each, "Write head=^net.2, for instance."
            )
    return {name: pattern for name, _, pattern in (each.partition("=") for each in given)}
