# SPDX-License-Identifier: Apache-2.0
"""`profile`: the step times of a LightningModule at several batch sizes on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from noisescale.checks import require_folder_of
from noisescale.made.data import train_and_val
from noisescale.made.targets import is_first, module_and_data, refuse_out_of_memory
from noisescale.profiling.document import as_dict, document_of
from noisescale.profiling.step_times import StepTimesRecord
from noisescale.profiling.time_steps import time_steps
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.report.numbers import number
from noisescale.step_time import StepTiming, fit_step_time, read_timings, write_timings


class StepTimes(StepTimesRecord, Answer):
    """What `profile` found, and the ways to show it."""

    document = document_of
    to_dict = as_dict


def profile(
    target: Any,
    data: Any = None,
    *,
    device_batch_sizes: Sequence[int] | None = None,
    accumulation: Sequence[int] | None = None,
    devices: int = 1,
    nodes: int = 1,
    accelerator: str = "auto",
    strategy: Any = "auto",
    precision: Any = None,
    steps: int = 20,
    output: str | PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> StepTimes:
    """Measure the step times of a LightningModule at several batch sizes on a device.

    Copies of the module are trained for a few steps each. The module, the data and the random
    number generators are left as they were.

    Args:
        target: A LightningModule, or a function that returns one, alone or with its data; or a text
            that names one of these, "file.py:name" or "package.module:name".
        data: A Dataset, a DataLoader, a LightningDataModule, or a pair to train and to validate on;
            or a function or a text as for `target`. Default: what the target returns, else the
            loaders that the module makes.
        device_batch_sizes: Examples on a device at once. Default: 1, 2, 4... while they fit in
            memory and bring more examples per second.
        accumulation: Numbers of micro-batches in a step. Default: 1 and 2.
        devices: Devices on each node.
        nodes: Number of nodes. The same program has to be started on each.
        accelerator: As in training.
        strategy: As in training.
        precision: As in training.
        steps: Optimizer steps to time, after 5 steps that are not timed.
        output: A CSV file to which the timings are added, each as soon as it is measured. Use one
            file for 1, 2, 4... devices.
        progress: Called with a sentence about each timing, for example `print`.

    Returns:
        The timings, and in `step_time` the model for `predict`. It is fitted to all timings of
        `output`. The seconds are those of rank 0.

    Raises:
        ValueError: If an argument is out of range, the data end too early, or no size fits in
            memory.
        OSError: If `output` cannot be written.

    Examples:
        >>> from pytorch_lightning.demos.boring_classes import BoringModel
        >>> found = profile(BoringModel(), device_batch_sizes=[4, 8], steps=5, accelerator="cpu")
        >>> [(timing.device_batch_size, timing.accumulation) for timing in found.timings]
        [(4, 1), (4, 2), (8, 1), (8, 2)]
    """
    file = None if output is None else Path(output)
    earlier: list[StepTiming] = []
    if file is not None:
        require_folder_of("output", file)
        if file.exists():
            earlier = read_timings(file)  # fails now, not after the timing, if it has others
    module, examples = module_and_data(target, data)
    stopped: list[str] = []

    def keep(timing: StepTiming) -> None:
        if file is not None and is_first():
            write_timings(file, [timing])
        if progress is not None:
            progress(
                f"{timing.device_batch_size} examples x {timing.accumulation}:"
                f" {number(1000 * timing.seconds)} ms/step,"
                f" {number(timing.examples_per_second)} examples/s"
            )

    kept = "" if file is None else "Earlier timings are in the file. "
    with refuse_out_of_memory(
        "device_batch_sizes", f"{kept}Find the largest size that fits on one device first."
    ):
        timings = time_steps(
            module,
            train_and_val(examples)[0],
            device_batch_sizes,
            accumulation=accumulation,
            steps=steps,
            on_timing=keep,
            on_stop=stopped.append,
            accelerator=accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=strategy,
            precision=precision,
        )
    if not timings:
        raise Refusal(
            "device_batch_sizes",
            "begin with a size that fits in memory",
            "no such size",
            "Give smaller sizes.",
        )
    model = fit_step_time([*earlier, *timings])
    return StepTimes(tuple(timings), model, tuple(stopped), None if file is None else str(file))
