# SPDX-License-Identifier: Apache-2.0
"""The file to which a profile adds its times, each as soon as it is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from noisescale.profiling.time_fit import TimedFit
from noisescale.refusal import Refusal
from noisescale.step_time import DeviceTimes, LoaderTiming, StepTiming, read_timings, write_timings


class TimesFile:
    """A file of times: JSON with the name of the device, or CSV without it.

    Args:
        path: The file. It may hold earlier times.

    Raises:
        ValueError: If the file exists and holds something else.
        OSError: If it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: DeviceTimes | None = None
        self.earlier: tuple[StepTiming, ...] = ()
        """The times that were in the file."""
        if not path.exists():
            return
        if path.suffix == ".json":
            self._found = DeviceTimes.read(path)
            self.earlier = self._found.timings
        else:
            self.earlier = tuple(read_timings(path))

    def add(self, fit: TimedFit) -> None:
        """Add the time of a fit. In JSON it replaces an earlier time of the same configuration.

        Raises:
            ValueError: If the file has times of another device.
        """
        if self.path.suffix != ".json":
            write_timings(self.path, [fit.timing])
            return
        memory, peak = (None, None) if fit.memory is None else (fit.memory.total, fit.memory.peak)
        earlier = self._found or DeviceTimes((), fit.device, torch.__version__, memory)
        if earlier.device != fit.device:
            raise Refusal(
                self.path,
                f"have times of this device, {fit.device}",
                f"times of {earlier.device}",
                "Remove the file, or give another one as `output`.",
            )
        earlier = replace(earlier, torch=torch.__version__)
        self._found = earlier.with_timing(fit.timing, peak)
        self._found.write(self.path)

    def add_loader(self, loader: LoaderTiming) -> None:
        """Add the time of the data loader, in JSON."""
        if self._found is not None:
            self._found = replace(self._found, loader=loader)
            self._found.write(self.path)

    def mark_too_large(self, size: int) -> None:
        """Add a device batch size that did not fit into memory, in JSON."""
        if self._found is not None:
            self._found = replace(self._found, too_large=size)
            self._found.write(self.path)
