# SPDX-License-Identifier: Apache-2.0
"""Measured seconds a step, and the CSV files that hold them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path

from noisescale.checks import require_positive
from noisescale.csv_lines import csv_lines
from noisescale.plan import Plan
from noisescale.refusal import Refusal


@dataclass(frozen=True)
class StepTiming:
    """How long an optimizer step took in one configuration.

    Args:
        device_batch_size: Examples of one device in one micro-batch.
        accumulation: Micro-batches of a step.
        devices: Devices that train together, on all nodes.
        nodes: Nodes that the devices are on.
        seconds: Seconds of a step, with all its micro-batches.

    Raises:
        ValueError: If a number is not positive and finite, a count is not whole, or there are more
            nodes than devices.
    """

    device_batch_size: float
    accumulation: int
    devices: int
    nodes: int
    seconds: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            remedy = "Leave the configuration out if it was not measured."
            require_positive(field.name, value, remedy)
            if field.type == "int" and value != int(value):
                raise Refusal(str(field.name), "be a whole number", repr(value), "Give one.")
        _ = self.plan  # which has no more nodes than devices

    @property
    def plan(self) -> Plan:
        """How the step was made up."""
        counts = int(self.accumulation), int(self.devices), int(self.nodes)
        return Plan(self.device_batch_size, *counts)

    @property
    def examples_per_second(self) -> float:
        """Examples per second of all devices together.

        Examples:
            >>> StepTiming(8, 2, devices=4, nodes=1, seconds=0.5).examples_per_second
            128.0
        """
        return self.plan.batch_size / self.seconds


COLUMNS = tuple(field.name for field in fields(StepTiming))


def write_timings(path: str | PathLike[str], timings: Iterable[StepTiming]) -> Path:
    """Add timings to a CSV file. A missing file is created.

    One file can collect timings with different numbers of devices.

    Raises:
        ValueError: If the file exists and does not hold timings.
    """
    path = Path(path)
    earlier = read_timings(path) if path.exists() else []
    partial = path.with_name(path.name + ".new")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(asdict(timing) for timing in (*earlier, *timings))
    return partial.replace(path)


def read_timings(path: str | PathLike[str]) -> list[StepTiming]:
    """Read timings from a CSV file that `write_timings` wrote, or one with the same columns.

    Raises:
        ValueError: If a column is missing, or a line holds anything but positive numbers.
        OSError: If the file cannot be read.
    """
    path = Path(path)
    lines = csv_lines(path)
    _, names = next(lines, (0, []))
    if missing := [name for name in COLUMNS if name not in names]:
        raise Refusal(
            path,
            f"have the columns {', '.join(COLUMNS)}",
            f"no {', '.join(missing)}",
            "Make it with `noisescale profile`.",
        )
    timings = []
    for number, cells in lines:
        line = dict(zip(names, cells, strict=True))
        try:
            size, accumulation, devices, nodes, seconds = (line[name] for name in COLUMNS)
            plan = int(accumulation), int(devices), int(nodes)
            timings.append(StepTiming(_number(size), *plan, float(seconds)))
        except ValueError as reason:
            raise Refusal(
                path,
                "have positive numbers, and whole numbers of accumulation, devices and nodes",
                repr(cells),
                "Correct or remove that line.",
                at=(path, number),
            ) from reason
    if not timings:
        raise Refusal(
            path,
            "have timings",
            "only column names",
            "Make it with `noisescale profile`.",
        )
    return timings


def _number(text: str) -> float:
    """Return the number; an integer if it is one, so that files stay as they were written."""
    value = float(text)
    return int(value) if value.is_integer() else value
