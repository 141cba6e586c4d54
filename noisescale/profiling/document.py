# SPDX-License-Identifier: Apache-2.0
"""What a profile says: a document, and the same in builtin types."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from noisescale.profiling.step_times import NEARLY_ALL, StepTimesRecord
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import count, number, plural
from noisescale.step_time import FILE, LoaderTiming

_HOW_TO_READ = (
    "A step is one update of the weights. Accumulation is its number of micro-batches on a device."
    " Below the knee a device is partly idle: a larger device batch size costs little time. Above"
    " the knee the time of a step grows with the device batch size."
)


def document_of(found: StepTimesRecord) -> Document:
    """Return what a profile says: the throughput, the model of a step, and the timings."""
    largest = max(timing.device_batch_size for timing in found.timings)
    headline = (
        f"Larger device batch sizes are faster up to {count(largest)} examples, the largest one"
    )
    if found.knee is not None:
        headline = (
            f"A device batch size of {count(found.knee)} has {NEARLY_ALL:.0%} of the highest"
            " examples/s, or more"
        )
    written, following = [], []
    if found.output is not None:
        words = ["noisescale", "predict", found.run or "RUN"]
        if found.run is None or Path(found.output).name != FILE:
            words += ["--step-times", found.output]
        written = [f"Step times: {found.output}"]
        following = [f"Predict {'this' if found.run else 'a'} run: {shlex.join(words)}"]
    return Document(
        title="Step times - noisescale",
        headline=headline,
        answers=list(_statements(found)),
        tables=[_table(found)],
        assumptions=found.step_time.assumptions,
        how_to_read=_HOW_TO_READ,
        written=written,
        next=following,
    )


def _statements(found: StepTimesRecord) -> Iterator[Statement]:
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


def _table(found: StepTimesRecord) -> Table:
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


def as_dict(found: StepTimesRecord) -> dict[str, Any]:
    """Return the timings in builtin types.

    | key | meaning |
    |---|---|
    | `step_times` | the fields of each `StepTiming` |
    | `knee` | the smallest device batch size with nearly the highest examples/s, or None |
    | `stopped` | why no larger sizes were timed, in whole sentences |
    | `loader` | the fields of `LoaderTiming`, and `bounds_training`; or None |
    """
    rows = [asdict(timing) for timing in found.timings]
    loader = found.loader
    of_loader = loader and asdict(loader) | {"bounds_training": loader.bounds_training}
    record = {"step_times": rows, "knee": found.knee, "stopped": list(found.stopped)}
    return record | {"loader": of_loader}
