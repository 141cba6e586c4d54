# SPDX-License-Identifier: Apache-2.0
"""A run as a document: a header for each of its histories, and their rows.

It is what stands in the file noise_scale.jsonl, one JSON object a line, and in each checkpoint, as
a list of these objects:

    {"of": "noise_scale/", "run": "3fa9c1d2.1", "format": 1, "unit": "sequences", ...,
     "columns": ["step", "examples", ...]}
    {"of": "noise_scale/", "run": "3fa9c1d2.1", "after": 0, "row": [50, 1600, ...]}
    {"of": "noise_scale/", "run": "3fa9c1d2.1", "after": 50, "row": [100, 3200, ...]}
    {"of": "noise_scale/", "run": "3fa9c1d2.1", "ended": true}
    {"of": "noise_scale/", "run": "3fa9c1d2.1", "look": {"step": 100, "noise_scale": 229, ...}}

`of` is the prefix of the metrics: several monitors and optimizers share a document. `run` is a name
that no other run has, the number of the attempt, and in a file two digits of its writer. A run that
goes on from a checkpoint keeps the name and begins with a header of its own: what an earlier writer
adds behind it does not count. An object without a row or columns changes the header.

`row` has the values of the columns. A value that is not finite is null. Whole numbers are exact,
others have nine digits. Values at the end that are those of the row before are left out. `after` is
the step of the row before: what an earlier attempt wrote behind that step does not count. `look` is
what `measure` found at a checkpoint, see `noisescale.history.looks`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisescale.history.history import LEVELS, History
from noisescale.history.looks import Look, is_of
from noisescale.history.optimizers import OptimizerMix
from noisescale.refusal import Refusal

FORMAT = 1
"""The number of the format. A reader refuses a later one."""

_SELDOM = (
    *("increment_measured_steps", "increment_weight", "increment_sq_weight"),
    *("batch_size", "skipped_steps", "peak_memory", "accumulation", "devices"),
    *("device_memory", "behind", *LEVELS),
)
"""What stays as it is for many rows, what changes most often first."""

Line = dict[str, Any]
"""An object of a document."""


def round_row(row: Mapping[str, float]) -> dict[str, float]:
    """Return a row as it is read back from a document. No upper end is an infinite one.

    Examples:
        >>> round_row({"step": 16777217.0, "low": 2 / 3, "high": float("nan")})
        {'step': 16777217.0, 'low': 0.666666667, 'high': inf}
    """
    exact = {name: x if x == x // 1 else float(f"{x:.9g}") for name, x in row.items()}
    high = exact.get("high", math.inf)
    return exact if math.isfinite(high) else {**exact, "high": math.inf}


class Lines:
    """Make the lines of a history, each row as short as the one before it allows."""

    def __init__(self, history: History, writer: str = "") -> None:
        run = f"{history.run}.{history.attempt}"
        self._begin = {"of": history.prefix, "run": f"{run}.{writer}" if writer else run}
        self._names = sorted(history, key=lambda x: x in _SELDOM and 1 + _SELDOM.index(x))
        self._header: Line = {}
        self._last = np.full((1, len(self._names)), 1e-300)  # unlike any row
        self.step = 0.0
        """The step of the last row."""

    def header(self, history: History) -> list[Line]:
        """Return what is new of the whole run: all of it at first, and nothing as a rule."""
        mix, parameters = history.optimizer, history.parameters
        header: Line = {
            "format": FORMAT,
            "unit": history.unit,
            "confidence": history.confidence,
            "loop": history.loop,
            "way": history.way,
            "optimizer": None if mix is None else mix.to_dict(),
            "parameters": None if math.isnan(parameters) else int(parameters),
            "withheld": history.withheld,
            "why_nothing": history.why_nothing,
            "columns": self._names,
        }
        if math.isfinite(history.planned_steps):
            header["planned_steps"] = history.planned_steps
        new = {name: x for name, x in header.items() if self._header.get(name, header) != x}
        self._header = header
        return [self._begin | new] if new else []

    def row(self, row: Mapping[str, float]) -> Line:
        """Return a row, which a header comes before."""
        (line,) = self._lines_of(np.array([[row.get(name, math.nan) for name in self._names]]))
        return line

    def rows(self, history: History) -> list[Line]:
        """Return the rows of a history that have not been made yet."""
        if history.last_step <= self.step:
            return []
        first = int(np.searchsorted(history["step"], self.step, side="right"))
        return self._lines_of(np.stack([history[name][first:] for name in self._names], axis=1))

    def _lines_of(self, rows: NDArray[np.float64]) -> list[Line]:
        """Return rows, all at once: a history has thousands."""
        before = np.vstack([self._last, rows[:-1]])
        same = (rows == before) | ~(np.isfinite(rows) | np.isfinite(before))
        ends = len(self._names) - np.argmin(same[:, ::-1], axis=1)  # steps differ
        steps = np.append(self.step, rows[:, self._names.index("step")]).tolist()
        self._last, self.step = rows[-1:], steps[-1]
        return [
            self._begin | {"after": _number(after), "row": [*map(_number, row[:end])]}
            for after, row, end in zip(steps, rows.tolist(), ends.tolist(), strict=False)
        ]

    def note(self, **words: Any) -> Line:
        """Return an object that changes the header."""
        return self._begin | words


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else value


def document_of(history: History) -> list[Line]:
    """Return all that a history has, in builtins, for a checkpoint."""
    lines = Lines(history)
    more = [lines.note(thinning=history.thinning)] if history.thinning else []
    looks = [lines.note(look=vars(look)) for look in history.looks]
    return [*lines.header(history), *lines.rows(history), *looks, *more]


class Part:
    """The rows of one history of one run in a document, as they are read."""

    def __init__(self) -> None:
        self.header: Line = {}
        self.lost: tuple[float, float] | None = None
        """The steps between which rows are missing."""
        self._looks: list[Look] = []
        self._rows: list[list[float | None]] = []
        self._last: list[float | None] = []
        self._step = 0

    def add(self, line: Line) -> None:
        """Take a line.

        Raises:
            ValueError, TypeError, KeyError: If it is none of a document.
        """
        if "columns" in line:
            if line["format"] > FORMAT:
                raise Refusal(
                    "document",
                    f"be of format {FORMAT}",
                    f"format {line['format']}",
                    "Read it with the version that wrote it: `pip install -U noisescale`.",
                )
            names = [str(name) for name in line["columns"]]
            if self._rows and names != self.header["columns"]:
                self._rows = _in_columns(self._rows, self.header["columns"], names)
            self.header, self._last = {**line, "columns": names}, []
            self._step = names.index("step")
        elif "look" in line:
            self._looks.append(Look.from_dict(line["look"]))
        elif "row" not in line:
            self.header |= line
            if len(line) <= 2 or not self.header.get("columns"):
                raise ValueError("a line that says nothing")
        else:
            self._add_row(float(line["after"]), line["row"])

    def _add_row(self, after: float, row: list[float | None]) -> None:
        whole = [*row, *self._last[len(row) :]]
        if len(whole) != len(self.header["columns"]) or not all(map(_is_value, row)):
            raise ValueError("not a value for each column")
        rows, at = self._rows, self._step
        if not self._last or (rows and float(rows[-1][at] or 0) > after):  # goes on from there
            self._looks = [look for look in self._looks if look.step <= after]
        while rows and float(rows[-1][at] or 0) > after:
            rows.pop()
        if self.lost is not None and after <= self.lost[0]:  # these rows came again
            self.lost = None
        last = float(rows[-1][at] or 0) if rows else 0.0
        if last < after:
            self.lost = last, after
        if float(whole[at] or 0) <= last:
            raise ValueError("a step that is none after the one before")
        rows.append(whole)
        self._last = whole

    def history(self) -> History:
        """Return the history.

        Raises:
            ValueError, TypeError, KeyError: If the header has something else than it should.
        """
        header, names = self.header, self.header["columns"]
        table = np.array(self._rows, dtype=np.float64).reshape(len(self._rows), len(names))
        columns = dict(zip(names, table.T, strict=True))
        if "high" in columns:
            columns["high"] = np.where(np.isnan(columns["high"]), math.inf, columns["high"])
        parameters = header["parameters"]
        found = History.from_columns(
            columns,
            unit=str(header["unit"]),
            confidence=float(header["confidence"]),
            optimizer=OptimizerMix.from_dict(header["optimizer"]),
            parameters=math.nan if parameters is None else float(parameters),
        )
        found.run, attempt, *_ = str(header["run"]).split(".")
        found.prefix, found.attempt = str(header["of"]), int(attempt)
        found.loop, found.way = str(header["loop"]), str(header["way"])
        found.why_nothing = str(header["why_nothing"])
        found.planned_steps = float(header.get("planned_steps", math.nan))
        looks = [x for x in self._looks if is_of(header, x.unit, x.parameters)]
        found.looks = tuple(sorted(looks, key=lambda look: look.step))
        if len(looks) < len(self._looks):
            warnings.warn(
                "A noise scale that was measured of another model, or in another unit, is left out"
                f" of the run {found.run}.",
                stacklevel=5,
            )
        if header["withheld"]:
            found.withhold(str(header["withheld"]))
        return found


class Document:
    """The parts of a document, by the prefix and the run. The one that began last is last.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: If something is no line of a document.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.parts: dict[tuple[str, str], Part] = {}
        self._last: dict[str, Part] = {}
        self.mixed: set[str] = set()
        """Prefixes of which a training went on after another one had begun."""
        for line in lines:
            self.add(line)

    def add(self, line: Line) -> None:
        """Add a line to its part."""
        of, run = str(line["of"]), str(line["run"]).partition(".")[0]
        if "columns" in line:
            self._last[of] = self.parts.pop((of, run)) if (of, run) in self.parts else Part()
            self.parts[of, run] = self._last[of]
        part = self.parts[of, run]
        if "columns" not in line and line["run"] != part.header["run"]:  # of an attempt given up
            self.mixed.add(of)
            return
        part.add(line)
        if part is not self._last[of]:
            self.mixed.add(of)

    @property
    def newest(self) -> dict[str, Part]:
        """The run of each prefix that began last."""
        return dict(self._last)

    def runs(self, prefix: str) -> dict[str, Part]:
        """Return the runs of a prefix by name."""
        return {run: part for (of, run), part in self.parts.items() if of == prefix}


def restore(history: History, lines: Iterable[Line]) -> None:
    """Continue with a history what `document_of` had saved.

    Raises:
        ValueError: If it counts in another unit.
    """
    (part,) = Document(lines).parts.values()
    earlier = part.history()
    if earlier.unit != history.unit:
        raise ValueError(f"the saved history counts {earlier.unit}, this run counts {history.unit}")
    history.go_on_from(earlier, part.header.get("thinning", {}))
    history.optimizer = earlier.optimizer


def _in_columns(
    rows: Iterable[list[float | None]], old: list[str], new: list[str]
) -> list[list[float | None]]:
    named = (dict(zip(old, row, strict=True)) for row in rows)
    return [[row.get(name) for name in new] for row in named]


def _is_value(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
