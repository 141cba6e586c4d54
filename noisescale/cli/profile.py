# SPDX-License-Identifier: Apache-2.0
"""`noisescale profile TARGET`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noisescale.cli.showing import check_html, show
from noisescale.cli.training import Accelerator, Data, Devices, Nodes, Precision, Strategy, Target
from noisescale.cli.values import flags_of, numbers
from noisescale.refusal import rename_arguments

EXAMPLE = "noisescale profile train.py:make --run lightning_logs/version_0"


def profile_steps(
    target: Target,
    data: Data = None,
    device_batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Examples on a device at once, for example 8,16. Default: 1,2,4... while they"
            " fit in memory; with --run sizes around the run's own."
        ),
    ] = None,
    accumulation: Annotated[
        str | None,
        typer.Option(
            help="Micro-batches in a step, for example 1,4. Default: 1,2; with --run 1, and the"
            " run's own number at its own size."
        ),
    ] = None,
    devices: Devices = 1,
    nodes: Nodes = 1,
    accelerator: Accelerator = "auto",
    strategy: Strategy = "auto",
    precision: Precision = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps to time, after 5 steps that are not timed. Default: 20; with"
            " --run 5 to 20, for about a minute in all."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run with a monitor. The times are written into it, where `noisescale"
            " predict` finds them."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to which the times are added, CSV or JSON. Use one file for 1, 2, 4..."
            " devices. Default: step_times.csv; with --run step_times.json in its folder."
        ),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Also print the assumptions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the same as a page to this file.")
    ] = None,
) -> None:
    """Measure the step times of a LightningModule at several batch sizes on a device."""
    from rich.console import Console

    from noisescale.made.targets import is_first, shorten_errors
    from noisescale.profiling.profile import profile

    check_html(html)
    sizes = numbers("device-batch-sizes", device_batch_sizes)
    repeats = numbers("accumulation", accumulation)
    console = Console(stderr=True, highlight=False, quiet=not is_first())
    with (
        console.status("Timing the first steps...") as status,
        rename_arguments(flags_of(profile_steps)),
        shorten_errors(),
    ):
        found = profile(
            target,
            data,
            device_batch_sizes=sizes,  # type: ignore[arg-type]  # it names those that are not whole
            accumulation=repeats,  # type: ignore[arg-type]  # as with sizes
            devices=devices,
            nodes=nodes,
            accelerator=accelerator,
            strategy=strategy,
            precision=precision,
            steps=steps,
            run=run,
            output=output or (Path("step_times.csv") if run is None else None),
            progress=lambda line: status.update(f"{line}. Timing more..."),
        )
    if is_first():
        show(found, details=details, as_json=as_json, html=html)
