# SPDX-License-Identifier: Apache-2.0
"""A text file that a run may still write: its whole lines, as they are added."""

from __future__ import annotations

import warnings
from pathlib import Path

from noisescale.printable import printable


class GrowingFile:
    """Read the lines of a file that were added since the last reading.

    A last line without its end is not read: the run that wrote the file was killed, or still
    writes.
    """

    def __init__(self) -> None:
        self.lines = 0
        """The number of lines that were read."""
        self.written = 0.0
        """The time of the last write before the last reading, in seconds since the epoch."""
        self._start, self._inode = b"", 0
        self._end = self._size = 0

    @property
    def unread(self) -> int:
        """The number of bytes after the last whole line."""
        return self._size - self._end

    def replaced(self, path: Path) -> bool:
        """Return whether the file was replaced, or written again from its beginning.

        Raises:
            OSError: If the file does not exist any more.
        """
        if not self._end:
            return False
        found = path.stat()
        if found.st_ino != self._inode or found.st_size < self._end:
            return True
        with path.open("rb") as file:
            return file.read(len(self._start)) != self._start

    def read(self, path: Path) -> list[bytes]:
        """Return the whole lines that were added, with their ends.

        Raises:
            OSError: If the file cannot be read.
        """
        found = path.stat()
        self._inode, self.written = found.st_ino, found.st_mtime
        with path.open("rb") as file:
            file.seek(self._end)
            content = file.read()
        self._size = self._end + len(content)
        content = content[: content.rfind(b"\n") + 1]
        self._end += len(content)
        self._start = self._start or content[: content.find(b"\n") + 1]
        lines = content.splitlines(keepends=True)
        self.lines += len(lines)
        return lines

    def warn_of_rest(self, path: Path) -> None:
        """Warn if the last line is not whole, and so was left out."""
        if self.unread:
            warnings.warn(
                f"{printable(path)} ends within line {self.lines + 1}, as if the run was killed"
                " while it wrote this line. The line is left out.",
                stacklevel=4,
            )
