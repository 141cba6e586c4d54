# SPDX-License-Identifier: Apache-2.0
"""Write scalars to an event file of TensorBoard."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from noisescale.extras import need
from noisescale.history.record import append_whole

MOST_WAITING = 10_000
"""Scalars that are kept while they cannot be written."""

SOON = 1.0
"""Seconds after which scalars are written that nobody has asked to write."""


class EventFile:
    """Write scalars to an event file, in the thread that gives them.

    torch's SummaryWriter writes in a thread of its own. If this thread fails once, as the disk is
    full, the writer fails for good. Here scalars wait until they can be written. A file that was
    deleted, or cannot be kept whole, is followed by another.

    Args:
        folder: The folder of the run, which need not exist.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
    """

    _numbers = count()

    def __init__(self, folder: Path) -> None:
        need("tensorboard", "Writing an event file")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        self._event: Callable[..., Any] = Event
        self._summary: Callable[..., Any] = Summary
        self._checksum: Callable[[bytes], int] = masked_crc32c
        self._folder = folder
        self._path: Path | None = None
        self._size = 0
        self._waiting: list[bytes] = []
        self._tried = 0.0

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Add scalars at a step, and write them soon."""
        for name, value in metrics.items():
            summary = self._summary(value=[{"tag": name, "simple_value": value}])
            self._waiting.append(self._record(step=step, summary=summary))
        if time.monotonic() - self._tried > SOON:
            self.write()

    def write(self) -> None:
        """Write what was added.

        Raises:
            OSError: If it cannot be written. It is written later.
        """
        self._tried = time.monotonic()
        del self._waiting[:-MOST_WAITING]
        if not self._waiting:
            return
        path, first = self._path, b""
        if path is None or not path.exists() or path.stat().st_size != self._size:
            self._folder.mkdir(parents=True, exist_ok=True)
            place = f"{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}.noise_scale"
            path = self._folder / f"events.out.tfevents.{int(time.time()):010d}.{place}"
            first = self._record(file_version="brain.Event:2")
        append_whole(path, first + b"".join(self._waiting))
        self._path, self._size, self._waiting = path, path.stat().st_size, []

    def _record(self, **event: Any) -> bytes:
        """Return an event with its length and both checksums, see `EventLog`."""
        content = self._event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(content))
        head = length + struct.pack("<I", self._checksum(length))
        return bytes(head + content + struct.pack("<I", self._checksum(content)))
