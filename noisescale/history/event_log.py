# SPDX-License-Identifier: Apache-2.0
"""A run in TensorBoard's event files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from noisescale.extras import need
from noisescale.history.log import Log
from noisescale.history.metric_names import ROOT
from noisescale.printable import printable
from noisescale.refusal import Refusal

HEAD, TAIL = 12, 4
"""Bytes before a record, its length and the checksum of the length; bytes of its own checksum."""

SHORT = 1024
"""Records of up to this number of bytes are always checked. Longer ones are pictures or texts."""

HYPERPARAMETERS = "_hparams_/"
"""The beginning of the tags of TensorBoard's page of hyperparameters."""

ENOUGH_NAMES = 5
"""The number of names of other metrics that are read, for error messages."""


class EventLog(Log):
    """The event files of a run, in order. A resumed run adds a file.

    TensorBoard's own reader computes the checksum of every record, in Python. For 80 MB of pictures
    it takes ten seconds. This reader leaves out the checksums of long records in which no wanted
    name stands, and parses the others with TensorBoard's classes.

    Args:
        path: The run, for errors.
        *names: Parts of the names of metrics that are wanted, besides the monitor's.
        every: Whether every metric is wanted.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
    """

    def __init__(self, path: Path, *names: str, every: bool = False) -> None:
        super().__init__()
        need("tensorboard", f"Reading the event files of {printable(path)}")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        self.hyperparameters: dict[str, float | str | bool] = {}
        """The hyperparameters that were logged for TensorBoard's page of them."""
        self._parsed, self._checksum = Event.FromString, masked_crc32c
        self._wanted = tuple(name.encode() for name in (ROOT, *names))
        self._every = every
        self._unasked = 0
        self._files: dict[Path, _EventFile] = {}

    @property
    def unread(self) -> int:
        """The bytes after the last whole record of each file: a part of a record, or damage."""
        return sum(file.size - file.whole for file in self._files.values())

    def replaced(self, files: list[Path]) -> bool:
        """Return whether a file that was read is missing, or shorter than before."""
        read = self._files.values()
        return any(f.path not in files or f.path.stat().st_size < f.whole for f in read)

    def read(self, files: list[Path]) -> bool:
        """Read what was added. Return whether there was anything new.

        Raises:
            ValueError: If a value of a monitor is not finite.
        """
        before = sum(file.whole for file in self._files.values())
        for path in files:
            if path not in self._files:
                self._files[path] = _EventFile(
                    path, len(self._files), before=self._seconds_so_far()
                )
            file = self._files[path]
            for record, wanted in file.records(self._checksum, self._is_wanted):
                if wanted or file.began is None or self._unasked < ENOUGH_NAMES:
                    self._add(file, self._parsed(record))
        return sum(file.whole for file in self._files.values()) > before

    def check_endings(self, *, allow_truncated: bool = False) -> None:
        """Raise an error unless every file was read to its end.

        A part of a record, or zeros, are what a run leaves that was killed. `allow_truncated`
        allows these.

        Raises:
            ValueError: If a file is damaged or empty, or ends within a record.
        """
        for file in self._files.values():
            if file.damaged:
                raise Refusal(
                    file.name,
                    "have whole events",
                    f"a damaged one after {file.whole:,} of {file.size:,} bytes",
                    "What follows it cannot be read: copy the file again, or leave it out.",
                )
            if not file.whole and not allow_truncated:
                raise Refusal(
                    file.name,
                    "contain events",
                    f"{file.size} bytes without a whole event",
                    "Name the folder of a run that was logged.",
                    word="empty",
                )
            if file.whole < file.size and not allow_truncated:
                raise Refusal(
                    file.name,
                    "end with a whole record",
                    f"{file.size - file.whole:,} bytes after the last whole record (step"
                    f" {self._last_step(file)})",
                    "If the file is still being written, or if you can do without these bytes,"
                    " pass `allow_truncated=True`.",
                    word="truncated",
                )

    def _is_wanted(self, record: bytes) -> bool:
        return self._every or any(name in record for name in self._wanted)

    def _seconds_so_far(self) -> float:
        """Return the seconds from the first to the last event of each file, in sum."""
        if not (file := next(reversed(self._files.values()), None)) or file.began is None:
            return file.before if file else 0.0
        return file.before + max(0.0, float(self._parsed(file.last).wall_time) - file.began)

    def _last_step(self, file: _EventFile) -> int:
        return int(self._parsed(file.last).step)

    def _add(self, file: _EventFile, event: Any) -> None:
        if file.began is None:
            file.began = event.wall_time
        where = f"at step {event.step} of {file.name}"
        for value in event.summary.value:
            if value.tag.startswith(HYPERPARAMETERS):
                self.hyperparameters.update(_hyperparameters(value))
            if ROOT not in value.tag:
                self._unasked += value.tag not in self.places
                self.places.setdefault(value.tag, len(self.places))
            number = _number_in(value)
            if number is None and ROOT not in value.tag:
                continue
            self.add(
                value.tag,
                math.nan if number is None else number,
                where,
                step=event.step,
                seconds=file.before + event.wall_time - file.began,
                part=file.number,
            )
            if ROOT in value.tag:
                self.last_row_at = event.wall_time


@dataclass
class _EventFile:
    """One event file. Each reading continues after the last whole record that was read."""

    path: Path
    number: int
    """The place of the file among the files of the run."""
    before: float
    """Seconds in the files before it."""
    whole: int = 0
    """Bytes of the records that were read."""
    size: int = 0
    """Bytes of the file when it was read: it may have grown since."""
    damaged: bool = False
    """Whether a damaged record follows those that were read."""
    began: float | None = None
    """Time of the first event, in seconds since the epoch."""
    last: bytes = b""
    """The last record."""

    @cached_property
    def name(self) -> str:
        """The path, for errors."""
        return printable(self.path)

    def records(
        self, checksum: Callable[[bytes], int], is_wanted: Callable[[bytes], bool]
    ) -> Iterator[tuple[bytes, bool]]:
        """Yield the whole records that were added, and whether each is wanted.

        A record is its length (8 bytes), the length's checksum, the content and its checksum. Both
        checksums have 4 bytes. All numbers begin with their lowest byte.
        """
        self.size, self.damaged = self.path.stat().st_size, False
        with self.path.open("rb") as file:
            file.seek(self.whole)
            while self.whole + HEAD <= self.size:
                head = file.read(HEAD)
                if not any(head):
                    return
                length = int.from_bytes(head[:8], "little")
                if checksum(head[:8]) != int.from_bytes(head[8:], "little"):
                    self.damaged = True
                    return
                if self.whole + HEAD + length + TAIL > self.size:
                    return
                record, tail = file.read(length), file.read(TAIL)
                wanted = is_wanted(record)
                if wanted or length <= SHORT:
                    self.damaged = checksum(record) != int.from_bytes(tail, "little")
                if self.damaged:
                    return
                self.whole += HEAD + length + TAIL
                self.last = record
                yield record, wanted


def _hyperparameters(value: Any) -> Iterator[tuple[str, float | str | bool]]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logged = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for name, each in logged.session_start_info.hparams.items():
        if (kind := each.WhichOneof("kind")) in ("number_value", "string_value", "bool_value"):
            yield name, getattr(each, kind)


def _number_in(value: Any) -> float | None:
    """Return the number of a value; None if it is something else than a scalar."""
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = make_ndarray(value.tensor)
    return float(tensor.item()) if tensor.size == 1 and tensor.dtype.kind in "fiu" else None
