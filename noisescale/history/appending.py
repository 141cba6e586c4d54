# SPDX-License-Identifier: Apache-2.0
"""Append to a file all of it or nothing: a full disk leaves no half of a line or of a record."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file, which need not exist; its folder must.

    If that fails, the file is as long as before: a smaller file needs no room on the disk.

    Args:
        path: The file.
        content: What is appended.

    Raises:
        OSError: If not all of it could be written.
    """
    with path.open("ab", buffering=0) as file:  # a buffer would be tried again when it is closed
        before, rest = file.tell(), memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def cut_half_line(path: Path) -> None:
    """Cut off what follows the last line end: half a line, which a killed run left.

    Raises:
        OSError: If the file cannot be read or cut.
    """
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        if not size:
            return
        file.seek(size - 1)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
