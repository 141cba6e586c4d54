# SPDX-License-Identifier: Apache-2.0
"""Step times of one device, and the file that `profile` leaves of them in a run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from noisescale.checks import require_positive
from noisescale.plan import Plan
from noisescale.refusal import FileRefusal, Refusal

FILE = "step_times.json"
"""The name of the file in a run's folder."""


SLOW = 0.8
"""A loader bounds a training if a batch takes it longer than this share of a step."""


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


@dataclass(frozen=True)
class LoaderTiming:
    """How long a data loader takes for a batch, and how long a step takes that need not wait."""

    batch_size: float
    """Examples of a batch, on one device."""
    seconds: float
    """Seconds of a batch, if nothing else runs."""
    step_seconds: float
    """Seconds of a step whose batch is there already."""
    workers: int
    """Processes that load; 0: the training waits while a batch is loaded."""

    @property
    def bounds_training(self) -> bool:
        """Whether the loader, not the device, decides how long a step takes."""
        return self.seconds > SLOW * self.step_seconds


@dataclass(frozen=True)
class DeviceTimes:
    """Timings of steps, and what they were taken on."""

    timings: tuple[StepTiming, ...]
    device: str
    """The name of the device, for example "NVIDIA H100 80GB HBM3"."""
    torch: str
    """The version of torch."""
    memory: float | None = None
    """Bytes of the device; None on the CPU, and where torch does not count them."""
    peaks: tuple[tuple[float, float], ...] = ()
    """Device batch sizes, and the most bytes that tensors had at once with each."""
    too_large: float | None = None
    """The smallest device batch size that did not fit."""
    loader: LoaderTiming | None = None

    def write(self, path: Path) -> None:
        """Write the file anew. Whoever reads it meanwhile reads the old one."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["timings"] = [asdict(timing) for timing in self.timings]
        found["loader"] = self.loader and asdict(self.loader)
        partial = path.with_name(path.name + ".new")
        partial.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: str | PathLike[str]) -> DeviceTimes:
        """Read a file that `write` wrote.

        Raises:
            ValueError: If it is another file, or damaged.
            OSError: If it cannot be read.
        """
        path = Path(path)
        if not path.is_file():
            what = "a path without a file"
            raise FileRefusal(path, "be a file of `noisescale profile`", what, "Check it.")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            timings = tuple(_timing(each) for each in found["timings"])
            names = {name: str(found[name]) for name in ("device", "torch")}
            peaks = tuple((float(size), float(peak)) for size, peak in found["peaks"])
            memory, too_large = (
                None if found[name] is None else float(found[name])
                for name in ("memory", "too_large")
            )
            loader = found["loader"] and _loader(found["loader"])
        except (ValueError, TypeError, KeyError) as reason:
            raise Refusal(
                path,
                "be a file of `noisescale profile`",
                f"another one ({type(reason).__name__}: {reason})",
                "Remove it, and run `noisescale profile` again with `--run`.",
            ) from reason
        if not timings:
            raise Refusal(path, "have timings", "none", "Remove it.")
        return cls(timings, **names, memory=memory, peaks=peaks, too_large=too_large, loader=loader)

    def with_timing(self, timing: StepTiming, peak: float | None = None) -> DeviceTimes:
        """Return the same with another timing, which replaces one of the same configuration.

        Args:
            timing: The timing.
            peak: The most bytes that tensors had at once.
        """
        size, largest = timing.device_batch_size, self.too_large
        others = (other for other in self.timings if other.plan != timing.plan)
        known = dict(self.peaks) | ({} if peak is None else {size: peak})
        return replace(
            self,
            timings=(*others, timing),
            peaks=tuple(sorted(known.items())),
            too_large=None if largest is not None and size >= largest else largest,
        )


def _timing(found: dict[str, Any]) -> StepTiming:
    return StepTiming(**{field.name: found[field.name] for field in fields(StepTiming)})


def _loader(found: dict[str, Any]) -> LoaderTiming:
    size, seconds, step = (float(found[name]) for name in ("batch_size", "seconds", "step_seconds"))
    return LoaderTiming(size, seconds, step, int(found["workers"]))
