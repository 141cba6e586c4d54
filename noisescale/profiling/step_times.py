# SPDX-License-Identifier: Apache-2.0
"""What `profile` found: timings, the step-time model fitted to them, and what they say."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import count, number, plural
from noisescale.step_time import FILE, FittedStepTime, LoaderTiming, StepTiming

NEARLY_ALL = 0.9
"""A device processes at least this share of its highest number of examples/s at the knee."""


_HOW_TO_READ = (
    "A step is one update of the weights. Accumulation is its number of micro-batches on a device."
    " Below the knee a device is partly idle: a larger device batch size costs little time. Above"
    " the knee the time of a step grows with the device batch size."
)


@dataclass(frozen=True)
class StepTimes(Answer):
    """The seconds that steps took at several batch sizes on a device."""

    timings: tuple[StepTiming, ...]
    """A timing of each configuration. There is at least one."""
    step_time: FittedStepTime
    """The model for `predict`, fitted to these timings and to earlier ones in the file."""
    stopped: tuple[str, ...] = ()
    """Why no larger device batch sizes were timed, in whole sentences."""
    output: str | None = None
    """The file that has the timings, if they were written."""
    loader: LoaderTiming | None = None
    """The time of the data loader alone; None if its batch did not fit in memory."""
    run: str | None = None
    """The run that was timed, if one was given."""

    @property
    def fastest(self) -> StepTiming:
        """The timing with the most examples per second."""
        return max(self.timings, key=lambda timing: timing.examples_per_second)

    @property
    def knee(self) -> float | None:
        """The smallest device batch size with nearly the highest examples/s.

        None if it is the largest one: larger batches may then bring more.
        """
        fewest = min(timing.accumulation for timing in self.timings)
        speeds = {
            timing.device_batch_size: timing.examples_per_second
            for timing in self.timings
            if timing.accumulation == fewest
        }
        enough = NEARLY_ALL * max(speeds.values())
        knee = min(size for size, speed in speeds.items() if speed >= enough)
        return knee if knee < max(speeds) else None

    def document(self) -> Document:
        """Return what a profile says: the throughput, the model of a step, and the timings."""
        largest = max(timing.device_batch_size for timing in self.timings)
        headline = (
            f"Larger device batch sizes are faster up to {count(largest)} examples, the largest one"
        )
        if self.knee is not None:
            headline = (
                f"A device batch size of {count(self.knee)} has {NEARLY_ALL:.0%} of the highest"
                " examples/s, or more"
            )
        written, following = [], []
        if self.output is not None:
            words = ["noisescale", "predict", self.run or "RUN"]
            if self.run is None or Path(self.output).name != FILE:
                words += ["--step-times", self.output]
            written = [f"Step times: {self.output}"]
            following = [f"Predict {'this' if self.run else 'a'} run: {shlex.join(words)}"]
        return Document(
            title="Step times - noisescale",
            headline=headline,
            answers=list(_statements(self)),
            tables=[_table(self)],
            assumptions=self.step_time.assumptions,
            how_to_read=_HOW_TO_READ,
            written=written,
            next=following,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the timings in builtin types.

        | key | meaning |
        |---|---|
        | `step_times` | the fields of each `StepTiming` |
        | `knee` | the smallest device batch size with nearly the highest examples/s, or None |
        | `stopped` | why no larger sizes were timed, in whole sentences |
        | `loader` | the fields of `LoaderTiming`, and `bounds_training`; or None |
        """
        rows = [asdict(timing) for timing in self.timings]
        loader = self.loader
        of_loader = loader and asdict(loader) | {"bounds_training": loader.bounds_training}
        record = {"step_times": rows, "knee": self.knee, "stopped": list(self.stopped)}
        return record | {"loader": of_loader}


def _statements(found: StepTimes) -> Iterator[Statement]:
    fastest = found.fastest
    on = plural(fastest.devices, "device")
    yield Statement(
        "Highest throughput",
        f"{number(fastest.examples_per_second)} examples/s on {on}, with steps of"
        f" {plural(fastest.accumulation, 'micro-batch', 'micro-batches')} of"
        f" {count(fastest.device_batch_size)}",
        basis="timed",
    )
    constants = found.step_time.parameters
    several = len({timing.device_batch_size for timing in found.step_time.timings}) > 1
    yield Statement(
        "Micro-batch",
        f"takes {_ms(constants['a_c'])} and {_ms(constants['b_c'])} for each example",
        basis="timed" if several else "assumed",
    )
    if found.loader is not None:
        yield Statement("Data loader", _loader_sentence(found.loader), basis="timed")
    for sentence in found.stopped:
        yield Statement("Largest size", sentence)


def _loader_sentence(loader: LoaderTiming) -> str:
    batch = f"a batch of {count(loader.batch_size)}"
    took = f"{_ms(loader.seconds)} for {batch}, the step {_ms(loader.step_seconds)}"
    if not loader.bounds_training:
        return f"takes {took}"
    return (
        f"bounds this training: it takes {took}. A larger batch does not help until the loader is"
        f" faster: it has {plural(loader.workers, 'process', 'processes')} (`num_workers`). More"
        " devices help as far as each has a loader with processors of its own"
    )


def _table(found: StepTimes) -> Table:
    names = "device batch size", "accumulation", "devices", "ms/step", "fitted", "examples/s"
    lines = []
    for timing in found.timings:
        size, accumulation, devices = timing.device_batch_size, timing.accumulation, timing.devices
        fitted = found.step_time.seconds(size, accumulation, devices, timing.nodes)
        texts = [count(size), f"{accumulation}", f"{devices}"]
        texts += [number(1000 * seconds) for seconds in (timing.seconds, fitted.value)]
        texts += [number(timing.examples_per_second)]
        lines.append(Line(list(map(Cell, texts)), ["knee"] if size == found.knee else []))
    notes = ["fitted: ms/step by the model of the step time."]
    if found.knee is not None:
        notes += [f"knee: at least {NEARLY_ALL:.0%} of the highest examples/s."]
    return Table("Step times", names, lines, notes)


def _ms(seconds: float) -> str:
    return f"{number(round(1000 * seconds, 6))} ms"
