# SPDX-License-Identifier: Apache-2.0
"""`noisescale profile TARGET`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noisescale.cli.training import (
    Accelerator,
    Data,
    Devices,
    Nodes,
    Precision,
    Strategy,
    Target,
    check_output,
)
from noisescale.cli.values import flags_of, numbers
from noisescale.made.targets import is_first, module_and_data, shorten_errors
from noisescale.printable import printable, printable_json
from noisescale.refusal import Refusal, rename_arguments

if TYPE_CHECKING:
    from rich.table import Table

    from noisescale.step_time import StepTiming

TOO_LARGE = (
    "`--device-batch-sizes` must fit in memory with several devices, got a size that does not."
    " Finished timings are kept. Find the largest size that fits with `--devices 1`."
)

NEARLY_ALL = 0.9
"""At the knee a device processes at least this share of its highest number of examples/s."""


EXAMPLE = "noisescale profile train.py:make --devices 2"


def profile_steps(
    target: Target,
    data: Data = None,
    device_batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Examples on a device at once, for example 8,16. Default: 1,2,4... while they"
            " fit in memory."
        ),
    ] = None,
    accumulation: Annotated[
        str | None, typer.Option(help="Micro-batches in a step, for example 1,4. Default: 1,2.")
    ] = None,
    devices: Devices = 1,
    nodes: Nodes = 1,
    accelerator: Accelerator = "auto",
    strategy: Strategy = "auto",
    precision: Precision = None,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps to time, after 5 steps that are not timed.")
    ] = 20,
    output: Annotated[
        Path,
        typer.Option(
            help="CSV file to which the times are added. Use one file for 1, 2, 4... devices."
        ),
    ] = Path("step_times.csv"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the step times of a LightningModule at several batch sizes on a device."""
    from rich.console import Console

    from noisescale.step_time import read_timings, write_timings

    sizes = numbers("device-batch-sizes", device_batch_sizes)
    repeats = numbers("accumulation", accumulation)
    check_output(output)
    if output.exists():
        read_timings(output)  # fails now, not after the timing, if it is no file of timings
    module, examples = module_and_data(target, data)

    from noisescale.lightning.profiling.profiling import examples_per_second, profile_step_times
    from noisescale.made.data import train_and_val

    console = Console(stderr=True, highlight=False, quiet=not is_first())
    reasons: list[str] = []
    with console.status("Timing the first steps...") as status:

        def note(timing: StepTiming) -> None:
            if is_first():
                write_timings(output, [timing])
            status.update(
                f"{timing.device_batch_size} examples x {timing.accumulation}:"
                f" {1000 * timing.seconds:.4g} ms/step,"
                f" {examples_per_second(timing):,.0f} examples/s. Timing more..."
            )

        with rename_arguments(flags_of(profile_steps)), shorten_errors(TOO_LARGE):
            timings = profile_step_times(
                module,
                train_and_val(examples)[0],
                sizes,  # type: ignore[arg-type]  # it names those that are not whole
                accumulation=repeats,  # type: ignore[arg-type]  # as with sizes
                steps=steps,
                on_timing=note,
                on_stop=reasons.append,
                accelerator=accelerator,
                devices=devices,
                num_nodes=nodes,
                strategy=strategy,
                precision=precision,
            )
    if not is_first():
        return
    for reason in reasons:
        console.print(printable(reason), markup=False)
    if not timings:
        raise Refusal(
            "--device-batch-sizes",
            "begin with a size that fits in memory",
            "no such size",
            "Give smaller sizes.",
        )
    knee = _knee(timings)
    if as_json:
        rows = [asdict(timing) for timing in timings]
        found = {"step_times": rows, "knee": knee, "stopped": reasons}
        print(printable_json(json.dumps(found, indent=1)))
    else:
        Console(highlight=False).print(_table(timings, knee))
    words = ["noisescale", "predict", "RUN", "--step-times", printable(output)]
    console.print(f"Next: {shlex.join(words)}", markup=False, soft_wrap=True)


def _knee(timings: Sequence[StepTiming]) -> float | None:
    """Return the smallest device batch size with nearly the highest examples/s, if not the last."""
    from noisescale.lightning.profiling.profiling import examples_per_second

    fewest = min(timing.accumulation for timing in timings)
    speeds = {
        timing.device_batch_size: examples_per_second(timing)
        for timing in timings
        if timing.accumulation == fewest
    }
    knee = min(b for b, speed in speeds.items() if speed >= NEARLY_ALL * max(speeds.values()))
    return knee if knee < max(speeds) else None


def _table(timings: Sequence[StepTiming], knee: float | None) -> Table:
    from rich.table import Table

    from noisescale.lightning.profiling.profiling import examples_per_second

    caption = f"knee: at least {NEARLY_ALL:.0%} of the highest examples/s" if knee else None
    table = Table(title="Step times", caption=caption)
    for name in ("device batch size", "accumulation", "devices", "ms/step", "examples/s", ""):
        table.add_column(name, justify="right" if name else "left")
    for timing in timings:
        at_knee = timing.device_batch_size == knee
        table.add_row(
            f"{timing.device_batch_size:,}",
            f"{timing.accumulation}",
            f"{timing.devices}",
            f"{1000 * timing.seconds:.4g}",
            f"{examples_per_second(timing):,.0f}",
            "knee" if at_knee else "",
            style="bold" if at_knee else None,
        )
    return table
