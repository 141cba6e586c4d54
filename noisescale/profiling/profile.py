# SPDX-License-Identifier: Apache-2.0
"""`profile`: the step times of a training at several batch sizes on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from noisescale.checks import require_folder_of
from noisescale.history.reading import read_run
from noisescale.history.run_files import only_run_in
from noisescale.lightning.resized_loaders import examples_in
from noisescale.profiling.around_run import MOST_STEPS, AroundRun
from noisescale.profiling.blocks import TimedFit
from noisescale.profiling.step_times import StepTimes
from noisescale.profiling.time_loader import time_loader
from noisescale.profiling.time_steps import time_steps
from noisescale.refusal import Refusal
from noisescale.report.numbers import number
from noisescale.step_time import FILE, DeviceTimes, StepTiming, fit_step_time
from noisescale.user_code.targets import (
    is_first,
    is_trainer_of_transformers,
    module_and_data,
    refuse_out_of_memory,
    train_and_val,
)

WARM_UP = 5
"""Optimizer steps of a fit that are not timed."""

_Part = tuple[Sequence[int] | None, Sequence[int] | None]
"""Device batch sizes, and numbers of micro-batches."""


class _ToTime(NamedTuple):
    parts: tuple[_Part, ...]
    steps: int
    own: int | None = None
    """The device batch size of the run, if there is one."""


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
    steps: int | None = None,
    run: str | PathLike[str] | None = None,
    output: str | PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> StepTimes:
    """Measure the step times of a training at several batch sizes on a device.

    Copies of the module are trained for a few steps each. The module, the data and the random
    number generators are left as they were.

    Args:
        target: A LightningModule or the Trainer of transformers, or a function that returns one,
            alone or with its data; or a text that names one of these, "file.py:name" or
            "package.module:name".
        data: A Dataset, a DataLoader, a LightningDataModule, or a pair to train and to validate on;
            or a function or a text as for `target`. Default: what the target returns, else the
            loaders that the module makes.
        device_batch_sizes: Examples on a device at once. Default: 1, 2, 4... while they fit in
            memory and bring more examples per second. With `run`: half of the run's own number, and
            1, 2, 4 and 8 times as many while they fit.
        accumulation: Numbers of micro-batches in a step. Default: 1 and 2. With `run`: 1, and at
            the run's own device batch its own number, too.
        devices: Devices on each node. The Trainer of transformers has this and the next four from
            its own arguments.
        nodes: Number of nodes. The same program has to be started on each.
        accelerator: As in training.
        strategy: As in training.
        precision: As in training.
        steps: Optimizer steps to time, after 5 steps that are not timed. Default: 20. With `run`: 5
            to 20, so that all of it takes about a minute.
        run: The folder of a run with a monitor. `predict` finds the times in it.
        output: A file of JSON to which the timings are added, each as soon as it is measured. Use
            one file for 1, 2, 4... devices. Default: none. With `run`: step_times.json in its
            folder.
        progress: Called with a sentence about each timing, for example `print`.

    Returns:
        The timings, and in `step_time` the model for `predict`. It is fitted to all timings of
        `output`. The seconds are those of rank 0.

    Raises:
        ValueError: If an argument is out of range, the data end too early, no size fits in
            memory, or the file has times of another device.
        OSError: If `output` cannot be written, or the run cannot be read.

    Examples:
        >>> from pytorch_lightning.demos.boring_classes import BoringModel
        >>> found = profile(BoringModel(), device_batch_sizes=[4, 8], steps=5, accelerator="cpu")
        >>> [(timing.device_batch_size, timing.accumulation) for timing in found.timings]
        [(4, 1), (4, 2), (8, 1), (8, 2)]
    """
    file = TimesFile(_file_for(run, output))
    module, found = module_and_data(target, data, or_trainer=True)
    examples = train_and_val(found)[0]
    say = progress or (lambda _: None)
    todo = _ToTime(((device_batch_sizes, accumulation),), MOST_STEPS if steps is None else steps)
    if run is not None and device_batch_sizes is None and accumulation is None:
        accumulates = getattr(module, "automatic_optimization", True)
        around = AroundRun.of(read_run(run), examples_in(examples))
        todo = _to_time_around(around, examples_in(examples), steps, accumulates)
        say(_announcement(around, todo))
    stopped: list[str] = []
    trainer_options = {
        **{"accelerator": accelerator, "devices": devices, "num_nodes": nodes},
        **{"strategy": strategy, "precision": precision},
    }
    if is_trainer_of_transformers(module):
        _refuse_options(trainer_options)
    kept = "" if file.path is None else "Earlier timings are in the file. "
    remedy = f"{kept}Find the largest size that fits on one device first."
    with refuse_out_of_memory("device_batch_sizes", remedy):
        timings = _timings(module, examples, todo, file, stopped.append, say, trainer_options)
        fastest = max(timings, key=lambda timing: timing.examples_per_second)
        loader = time_loader(
            *(module, examples, todo.own or int(fastest.device_batch_size)),
            steps=todo.steps,
            warm_up=WARM_UP,
            trainer_options=trainer_options,
        )
    file.note(loader=loader)
    return StepTimes(
        timings=tuple(timings),
        step_time=fit_step_time([*file.earlier, *timings]),
        stopped=tuple(stopped),
        loader=loader,
        output=None if file.path is None else str(file.path),
        run=None if run is None else str(run),
    )


def _refuse_options(given: dict[str, Any]) -> None:
    """Refuse what transformers' Trainer has from its own arguments, and from how it is started."""
    defaults = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    for name, value in given.items():
        if value != defaults.get(name):
            raise Refusal(
                "nodes" if name == "num_nodes" else name,
                "be left out for the Trainer of transformers, which has it from its arguments",
                repr(value),
                "Start several devices by `torchrun --nproc-per-node 2 -m noisescale profile ...`.",
            )


def _timings(
    module: Any,
    examples: Any,
    todo: _ToTime,
    file: TimesFile,
    on_stop: Callable[[str], None],
    say: Callable[[str], None],
    trainer_options: dict[str, Any],
) -> list[StepTiming]:
    """Time steps, and add each time to a file as soon as it is measured."""

    def keep(fit: TimedFit) -> None:
        timing = fit.timing
        file.add(fit)
        say(
            f"{timing.device_batch_size:,} examples x {timing.accumulation}:"
            f" {number(1000 * timing.seconds)} ms/step,"
            f" {number(timing.examples_per_second)} examples/s"
        )

    timings: list[StepTiming] = []
    for sizes, micro_batches in todo.parts:
        timings += time_steps(
            *(module, examples, sizes),
            accumulation=micro_batches,
            steps=todo.steps,
            warm_up=WARM_UP,
            on_fit=keep,
            on_too_large=lambda size: file.note(too_large=size),
            on_stop=on_stop,
            **trainer_options,
        )
    if not timings:
        raise Refusal(
            "device_batch_sizes",
            "begin with a size that fits in memory",
            "no such size",
            "Give smaller sizes.",
        )
    return timings


def _file_for(run: str | PathLike[str] | None, output: str | PathLike[str] | None) -> Path | None:
    """Return the file of the times; None if nothing was said of one."""
    if run is not None:
        folder = only_run_in(Path(run))
        if output is None and folder.parent.is_file():  # in a database
            raise Refusal(
                "run",
                "have a folder, for the times",
                f"{folder} in a database",
                "Pass `output` too, and its file to `predict` as `step_times`.",
            )
        output = output or (folder if folder.is_dir() else folder.parent) / FILE
    if output is None:
        return None
    require_folder_of("output", Path(output))
    return Path(output)


def _to_time_around(
    around: AroundRun, examples: float, steps: int | None, accumulates: bool
) -> _ToTime:
    """Sizes around that of a run, alone; and the run's own size with its micro-batches."""
    sizes = around.sizes(examples)
    own = ((around.own,), (around.accumulation,))
    return _ToTime(
        ((sizes, (1,)), own) if accumulates else ((sizes, (1,)),),
        around.steps(sizes, WARM_UP) if steps is None else steps,
        around.own,
    )


def _announcement(around: AroundRun, todo: _ToTime) -> str:
    """Return what will be timed, and how long it takes at most."""
    sizes = todo.parts[0][0] or ()
    seconds = around.forecast(sizes, todo.steps, WARM_UP)
    took = "" if seconds is None else f": at most about {number(seconds)} seconds"
    return f"{sizes[0]} to {sizes[-1]} examples on a device{took}"


class TimesFile:
    """The file to which a profile adds its times, each as soon as it is measured.

    Args:
        path: The file, which may hold earlier times; None if nothing is to be written.

    Raises:
        ValueError: If the file exists and holds something else.
        OSError: If it cannot be read.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._found: DeviceTimes | None = None
        if path is not None and path.exists():
            self._found = DeviceTimes.read(path)
        self.earlier = () if self._found is None else self._found.timings
        """The times that were in the file."""

    def add(self, fit: TimedFit) -> None:
        """Add the time of a fit. It replaces an earlier time of the same configuration.

        Raises:
            ValueError: If the file has times of another device.
        """
        memory, peak = (None, None) if fit.memory is None else (fit.memory.total, fit.memory.peak)
        earlier = self._found or DeviceTimes((), fit.device, torch.__version__, memory)
        if earlier.device != fit.device:
            raise Refusal(
                self.path or "output",
                f"have times of this device, {fit.device}",
                f"times of {earlier.device}",
                "Remove the file, or give another one as `output`.",
            )
        self._found = replace(earlier, torch=torch.__version__).with_timing(fit.timing, peak)
        self._write()

    def note(self, **known: Any) -> None:
        """Add what else is known: `loader`, or the size that is `too_large`."""
        if self._found is not None:
            self._found = replace(self._found, **known)
            self._write()

    def _write(self) -> None:
        if self._found is not None and self.path is not None and is_first():
            self._found.write(self.path)
