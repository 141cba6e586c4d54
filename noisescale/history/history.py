# SPDX-License-Identifier: Apache-2.0
"""The history of a run: the noise scale at each log step, in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from noisescale.extras import need
from noisescale.history.increments import INCREMENTS, merge_increments
from noisescale.history.looks import Look
from noisescale.history.metric_names import ROOT
from noisescale.history.optimizers import OptimizerMix
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    import pandas

LEVELS = (
    *("between", "between_low", "between_high", "within", "within_low", "within_high"),
    *("balance", "balance_low", "balance_high", "groups", "rows_per_group", "still"),
)
"""Columns of the noise between and within groups of rows."""

COLUMNS = (
    "step",
    "examples",
    "batch_size",
    "grad_sq_norm",
    "noise_trace",
    "noise_scale",
    "low",
    "high",
    "seconds_per_step",
    "skipped_steps",
    "measured_steps",
    "measuring_cost",
    "first_step",
    "devices",
    "accumulation",
    "learning_rate",
    "peak_memory",
    "device_memory",
    "behind",
    *INCREMENTS,
    *LEVELS,
)


_MEASURED = frozenset(
    {"grad_sq_norm", "noise_trace", "noise_scale", "low", "high", *INCREMENTS, *LEVELS}
)
"""Columns of the noise scale."""


class History(Mapping[str, NDArray[np.float64]]):
    """A run in columns: a mapping from a column's name to its values, one for each log step.

    | column | meaning |
    |---|---|
    | `step` | optimizer steps so far |
    | `examples` | examples so far, over all ranks |
    | `batch_size` | global batch size of the step |
    | `grad_sq_norm`, `noise_trace` | averages of the two moments |
    | `noise_scale`, `low`, `high` | B_simple and its interval; NaN and infinite if not resolved |
    | `increment_measured_steps` | n, the number of steps measured since the row before |
    | `increment_weight`, `increment_sq_weight` | Σw and Σw²; w is the batch size of a measured \
      step times the number of steps since the measured step before |
    | `increment_noise_trace`, `increment_grad_sq_norm` | Σw·S and Σw·Q of the relative moments |
    | `increment_noise_trace_squares`, `increment_products`, `increment_grad_sq_norm_squares` | \
      Σw²(S - S̄)², Σw²(S - S̄)(Q - Q̄) and Σw²(Q - Q̄)² around the row's own means |
    | `seconds_per_step` | mean since the log step before; NaN if no step was timed |
    | `skipped_steps` | measured steps so far that were left out |
    | `measured_steps` | measured steps so far that were not left out |
    | `measuring_cost` | cost of measuring so far, in plain steps: see `Cadence` |
    | `first_step` | the first step that `noise_scale` is of; the last is the last measured one |
    | `devices` | number of ranks |
    | `accumulation` | micro-batches of each rank in the step |
    | `learning_rate` | the largest learning rate of the optimizer's parameter groups |
    | `peak_memory`, `device_memory` | the most memory so far on the device of rank 0, and its \
      memory, in bytes; NaN on the CPU |
    | `behind` | `step` minus the step of the trainer's logs |
    | `training_loss` | mean loss of the steps measured since the row before, weighted by w; NaN \
      if it is no cross-entropy alone |
    | `between`, `within`, `balance` | the noise scale between groups of rows, in groups, and \
      within them, in rows; the second over the first. Each has columns with `_low` and `_high` |
    | `groups`, `rows_per_group`, `still` | groups of a step, rows of each, and the share of \
      groups without a gradient, see `Levels` |
    | `group/<name>` | B_simple of a parameter group; NaN if not resolved |

    The relative moments of a step are tr(Σ) and |G|², divided by the trailing |g|² of the steps
    before it, see `noisescale.estimation.level.Level`. With the increments, any segment of a run
    can be averaged with its interval, whatever the number of steps between two rows.

    The length of a history is its number of rows. When it reaches `most_rows`, every second row is
    merged into the next one, and from then on every second log step is kept. This repeats as
    needed. So the rows of a run of any length are evenly spaced, and no increments are lost.

    Examples:
        >>> history = History()
        >>> history.append(step=50, examples=1600.0, noise_scale=19.0)
        >>> history["step"], history["low"]
        (array([50.]), array([nan]))
        >>> len(history)
        1
    """

    def __init__(
        self,
        most_rows: int = 4096,
        extra_columns: Iterable[str] = (),
        *,
        unit: str = "examples",
        confidence: float = 0.95,
        optimizer: OptimizerMix | None = None,
        parameters: float = math.nan,
    ) -> None:
        if most_rows < 2:
            raise Refusal("most_rows", "be at least 2", repr(most_rows), "Pass 4096.")
        self.unit = unit
        """The unit of examples and batch sizes."""
        self.confidence = confidence
        """Coverage of the intervals."""
        self.optimizer = optimizer
        """What the run's optimizer is; None if it was not recorded."""
        self.parameters = parameters
        """The number of trained numbers in the model; NaN if it was not recorded."""
        self.prefix = ROOT
        """The prefix of the metrics of its monitor and optimizer."""
        self.run = uuid4().hex[:8]
        """The name of the run, which is unlike that of any other. A resumed run keeps it."""
        self.attempt = 1
        """The number of the training: 2 after the run was resumed once."""
        self.source: Path | None = None
        """The folder or file that the history was read from."""
        self.under_way = False
        """Whether the run still trained when the history was read."""
        self.optimizers: tuple[int, ...] = (0,)
        """The numbers of the optimizers that its monitor measured, in the record of the run."""
        self.loop = ""
        """What took the steps: "lightning", "transformers" or "own"; "" if it was not recorded."""
        self.way = ""
        """What measured: the name of the collector; "" if it was not recorded."""
        self.withheld = ""
        """Why the noise scale of the run is withheld, and what to do; "" if it is not."""
        self.why_nothing = ""
        """Why no step was measured, and what to do; "" if some were, or it is not known."""
        self.planned_steps = math.nan
        """The last step of the training as the trainer knows it; NaN if it does not."""
        self.looks: tuple[Look, ...] = ()
        """The noise scale at checkpoints, as `measure` found it, by rising step."""
        self._most_rows = most_rows
        self._stride = 1
        self._seen = 0
        self.last_step = 0.0
        """`step` of the last appended row, even if that row was merged; 0 without rows."""
        self._pending: dict[str, float] | None = None  # increments of rows that were not kept
        self._columns = {name: array("d") for name in (*COLUMNS, *extra_columns)}

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, NDArray[np.float64]],
        *,
        unit: str = "examples",
        confidence: float = 0.95,
        optimizer: OptimizerMix | None = None,
        parameters: float = math.nan,
    ) -> History:
        """Return a history with the given columns. All rows are kept.

        Raises:
            ValueError: If the columns differ in length, or there is no column `step`.
        """
        rows = {name: len(values) for name, values in columns.items()}
        if "step" not in rows or len(set(rows.values())) > 1:
            raise Refusal(
                "columns",
                "include `step` and be equally long",
                rows,
                "Fill missing values with NaN.",
            )
        extra = [name for name in columns if name not in COLUMNS]
        history = cls(
            *(max(2, 2 * rows["step"]), extra),
            unit=unit,
            confidence=confidence,
            optimizer=optimizer,
            parameters=parameters,
        )
        unknown = np.full(rows["step"], np.nan)
        for name, values in history._columns.items():
            values.frombytes(np.asarray(columns.get(name, unknown), dtype=np.float64).tobytes())
        history._seen = rows["step"]
        history.last_step = float(columns["step"][-1]) if rows["step"] else 0.0
        return history

    def until(self, step: float) -> History:
        """Return the part of the run up to a step. The step may lie between two rows.

        The last row then ends at this step: its examples are counted up to the step, and its
        measured values are kept.

        Raises:
            ValueError: If the run has no such step.
        """
        steps = self["step"]
        if not 0 < step <= steps[-1]:
            raise Refusal(
                "step", "be a step of the run", f"{step:g}", f"The run has {steps[-1]:,.0f} steps."
            )
        rows = int(np.searchsorted(steps, step)) + 1
        columns = {name: self[name][:rows] for name in self}
        before = [0.0 if rows == 1 else self[x][rows - 2] for x in ("step", "examples")]
        share = (step - before[0]) / (steps[rows - 1] - before[0])
        columns["examples"][-1] = before[1] + share * (columns["examples"][-1] - before[1])
        columns["step"][-1] = step
        return self._part(columns)

    def between(self, start: float, end: float) -> History:
        """Return the part of the run after `start` and up to `end`. Its steps begin at 0.

        Raises:
            ValueError: If the run has no such steps.
        """
        whole = self.until(end)
        steps = whole["step"]
        first = int(np.searchsorted(steps, start, side="right"))
        if not 0 <= start < end:
            raise Refusal(
                "start", f"be a step before {end:g}", f"{start:g}", "Pass a step of the run."
            )
        columns = {name: whole[name][first:] for name in whole}
        if start:
            columns["examples"] -= np.interp(start, [0, *steps], [0, *whole["examples"]])
            columns["step"] -= start
        return self._part(columns, start)

    def _part(self, columns: Mapping[str, NDArray[np.float64]], start: float = 0.0) -> History:
        """Return other rows of the run, of which the same is known."""
        part = self.from_columns(columns)
        vars(part).update({name: value for name, value in vars(self).items() if name[0] != "_"})
        part.last_step, part.under_way = float(columns["step"][-1]), False
        looks = (replace(look, step=look.step - start) for look in self.looks)
        part.planned_steps = self.planned_steps - start
        part.looks = tuple(look for look in looks if 0 < look.step <= part.last_step)
        return part

    def append(self, **row: float) -> None:
        """Add the row of one log step. Columns that are not given become NaN."""
        if unknown := row.keys() - self._columns.keys():
            raise Refusal(
                "row", "have known columns", sorted(unknown), f"Known: {', '.join(self)}."
            )
        self._seen += 1
        self.last_step = float(row.get("step", self.last_step))
        if self._pending is not None:
            row |= _merge_rows(self._pending, row)
        if self._seen % self._stride:
            self._pending = {name: float(row.get(name, "nan")) for name in INCREMENTS}
            return
        self._pending = None
        for name, values in self._columns.items():
            values.append(float(row.get(name, "nan")))
        if len(self._columns["step"]) >= self._most_rows:
            self._drop_every_second_row()

    def withhold(self, reason: str) -> None:
        """Drop what was measured of the noise scale, in all rows. Steps and times stay.

        Args:
            reason: Why, and what to do.
        """
        self.withheld = reason
        rows = len(self)
        for name in self._columns:
            if name in _MEASURED or name.startswith("group/"):
                self._columns[name] = array("d", [math.nan] * rows)
        self._pending = None

    def _drop_every_second_row(self) -> None:
        self._stride *= 2
        increments = {name: self[name] for name in INCREMENTS}
        pairs = len(self._columns["step"]) // 2
        earlier, later = (
            {name: values[start : 2 * pairs : 2] for name, values in increments.items()}
            for start in (0, 1)
        )
        if len(self._columns["step"]) % 2:
            self._pending = {name: float(values[-1]) for name, values in increments.items()}
        for values in self._columns.values():
            del values[::2]
        for name, column in merge_increments(earlier, later).items():
            self._columns[name] = array("d", column.tolist())

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        return np.array(self._columns[column], dtype=np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of rows. A history without rows is false."""
        return len(self._columns["step"])

    def __repr__(self) -> str:
        last = f" up to step {self.last_step:,.0f}" if self else ""
        return f"History({len(self):,} row{'' if len(self) == 1 else 's'}{last})"

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a DataFrame, with `step` as its index.

        `History.from_columns(frame.reset_index())` turns the frame into a history again.

        Raises:
            MissingExtraError: If pandas is not installed: `pip install "noisescale[pandas]"`.

        Examples:
            >>> history = History()
            >>> history.append(step=50, noise_scale=19.0)
            >>> history.to_pandas()[["noise_scale"]]
                  noise_scale
            step
            50.0         19.0
        """
        need("pandas", "`History.to_pandas`")
        import pandas

        return pandas.DataFrame({name: self[name] for name in self}).set_index("step")

    @property
    def thinning(self) -> dict[str, Any]:
        """How rows have been merged so far, which only this history needs when it goes on."""
        if self._stride == 1:
            return {}
        of_rows = {"stride": self._stride, "seen": self._seen, "last_step": self.last_step}
        return {**of_rows, "pending": self._pending}

    def go_on_from(self, earlier: History, thinning: Mapping[str, Any]) -> None:
        """Continue the rows of the same run. Columns that are missing in these are NaN.

        Args:
            earlier: The rows so far.
            thinning: Its `thinning`.
        """
        self.run, self.attempt = earlier.run, earlier.attempt + 1
        self.last_step = float(thinning.get("last_step", earlier.last_step))
        self.withheld, self.looks = earlier.withheld, earlier.looks
        self._stride = int(thinning.get("stride", 1))
        self._seen = int(thinning.get("seen", len(earlier)))
        self._pending = thinning.get("pending")
        unknown = np.full(len(earlier), np.nan)
        self._columns = {n: array("d", earlier.get(n, unknown).tolist()) for n in self}


def as_history(columns: Mapping[str, NDArray[np.float64]]) -> History:
    """Return columns as a `History`, if they are not one already."""
    return columns if isinstance(columns, History) else History.from_columns(dict(columns))


def _merge_rows(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    rows = ({k: np.array(row.get(k, np.nan)) for k in INCREMENTS} for row in (first, second))
    return {name: float(value) for name, value in merge_increments(*rows).items()}
