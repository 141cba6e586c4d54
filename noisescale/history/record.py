# SPDX-License-Identifier: Apache-2.0
"""The record of a run: every row of its histories, in one file beside the logger's files.

A logger gets what a person looks at. The record has all columns, in full precision. It is a file
with a JSON object in each line, which is a row of one history:

    {"of": "noise_scale/", "unit": "sequences", "loop": "lightning", "confidence": 0.95,
     "after": 50.0, "behind": 1.0, "optimizer_kind": 3.0, "parameters": 85002.0, "step": 100.0, ...}

`of` is the prefix of the metrics, so that several monitors share a file. Values that are not finite
are left out. `behind` is the row's step minus the step of the trainer's logs. `after` is the step
of the row before. A run that goes on from a checkpoint writes on in the same file: what an earlier
attempt wrote behind `after` does not count. So every row tells by itself what it follows, and a new
run in an old folder (`after` is 0) replaces the old run. A training that comes to its end adds
`{"of": "noise_scale/", "ended": true}`. Where the noise scale is withheld from some row on, a line
`{"of": "noise_scale/", "withheld": "..."}` says why.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from noisescale.history.growing_file import GrowingFile
from noisescale.history.history import History
from noisescale.history.log import AFTER, Log
from noisescale.history.trackers import RECORD
from noisescale.printable import printable
from noisescale.refusal import Refusal

BEHIND = "behind"

_TEXTS = ("of", "unit")


class Recorder:
    """Append the rows of one history to the record in a folder.

    If the record has no rows of this history, the rows before are written, too: a run that was
    resumed in a new folder has its whole history there.

    Args:
        folder: The folder, which need not exist.
        prefix: Prefix of the names of the metrics.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.path = folder / RECORD
        self._prefix = prefix
        self._begun = False

    def add(self, history: History, row: Mapping[str, float], behind: float) -> None:
        """Append a row, before it is appended to the history.

        Args:
            history: The history.
            row: Its next row.
            behind: The row's step minus the step of the trainer's logs.

        Raises:
            OSError: If the file cannot be written.
        """
        before: list[dict[str, float]] = []
        if not self._begun and not self._begin():
            before = [
                {name: float(values[k]) for name, values in history.items()}
                for k in range(len(history))
            ]
        steps = [0.0, *(each["step"] for each in before)]
        lines = [self._line(history, *each, behind) for each in zip(before, steps, strict=False)]
        lines.append(self._line(history, row, history.last_step, behind))
        self._begun = False  # a line may be half-written if this fails
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._begun = True

    def end(self) -> None:
        """Note that the training has come to its end.

        Raises:
            OSError: If the file cannot be written.
        """
        if self._begun:
            self._note(ended=True)
            self._begun = False  # once

    def withhold(self, reason: str) -> None:
        """Note that the noise scale is withheld, and why.

        Raises:
            OSError: If the file cannot be written.
        """
        self._note(withheld=reason)

    def _note(self, **facts: bool | str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"of": self._prefix, **facts}) + "\n")

    def _begin(self) -> bool:
        """Make the file ready for more lines. Return whether it has rows of this history."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return False
        content = self.path.read_bytes()
        os.truncate(self.path, content.rfind(b"\n") + 1)  # a killed run left half a line
        return self._line_begins.encode() in content

    @property
    def _line_begins(self) -> str:
        return json.dumps({"of": self._prefix}).removesuffix("}")

    def _line(self, history: History, row: Mapping[str, float], after: float, behind: float) -> str:
        numbers = {"confidence": history.confidence, AFTER: after, BEHIND: behind}
        numbers |= {} if history.optimizer is None else history.optimizer.numbers
        numbers |= {"parameters": history.parameters, **row}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        texts = {"of": self._prefix, "unit": history.unit}
        texts |= {"loop": history.loop} if history.loop else {}
        return json.dumps({**texts, **finite}) + "\n"


class RecordLog(Log):
    """The record of a run as a log. It may still grow.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file = GrowingFile()
        self.ended = False
        """Whether the training came to its end after the last row."""

    @property
    def unread(self) -> int:
        """The bytes after the last whole line."""
        return self._file.unread

    @property
    def steps_behind(self) -> float:
        """How many steps the trainer's logs are behind the optimizer: 0 or 1."""
        found = [self.metric(name).values for name in self.metrics if name.endswith(f"/{BEHIND}")]
        return float(max(values.max() for values in found).clip(0, 1)) if found else 0.0

    def replaced(self, files: list[Path]) -> bool:
        """Return whether the file was replaced, or written again from its beginning."""
        return self.path not in files or self._file.replaced(self.path)

    def read(self, files: list[Path]) -> bool:
        """Read what was added. Return whether there was anything new.

        Raises:
            ValueError: If a line is no row.
            OSError: If the file cannot be read.
        """
        before = self._file.lines
        for number, line in enumerate(self._file.read(self.path), start=before + 1):
            self._add_row(line, number)
            self.last_row_at = self._file.written
        return self._file.lines > before

    def check_endings(self, *, allow_truncated: bool = False) -> None:
        """Warn if the last line is not whole. It is left out, also with `allow_truncated`."""
        self._file.warn_of_rest(self.path)

    def _add_row(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
            self.ended = row.pop("ended", False) is True
            if self.ended:
                return
            if (reason := row.pop("withheld", None)) is not None:
                self.withheld[row["of"]] = str(reason)
                return
            prefix, unit = (row.pop(name) for name in _TEXTS)
            loop = str(row.pop("loop", ""))
            self.about[prefix] = str(unit), float(row.pop("confidence")), loop
            numbers = {str(name): float(value) for name, value in row.items()}
            if not numbers.get(AFTER, 0.0):  # a new run
                self.withheld.pop(prefix, None)
        except (ValueError, TypeError, AttributeError, KeyError):
            raise Refusal(
                self.path,
                "have a row of a history in each line",
                printable(line[:60].decode(errors="replace")),
                "Remove the line, or copy the file again.",
                at=(self.path, number),
            ) from None
        for name, value in numbers.items():
            where = f"in line {number} of {printable(self.path)}"
            self.add(prefix + name, value, where, step=0.0, seconds=math.nan, part=number)
