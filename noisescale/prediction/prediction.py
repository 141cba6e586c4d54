# SPDX-License-Identifier: Apache-2.0
"""A prediction from one run, and the rows of it that are of interest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.estimation.levels import Levels
from noisescale.extras import need
from noisescale.history.history import History
from noisescale.history.looks import Look
from noisescale.history.optimizers import has_decayed, is_warming_up
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Segments
from noisescale.prediction.budget import Budget, budget_of
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.costing import Hardware, PredictedRow
from noisescale.prediction.decision import Decision, decision_of
from noisescale.prediction.document import assumptions_of, document_of, warnings_about
from noisescale.prediction.learning_rate import LearningRate, learning_rate_at
from noisescale.prediction.model_card import model_card
from noisescale.prediction.position import Position
from noisescale.prediction.ramp import Ramp
from noisescale.prediction.records import as_dict
from noisescale.prediction.run_hardware import usual_batch_sizes
from noisescale.prediction.same_batch import SharedBatch
from noisescale.prediction.second_run import SecondRun
from noisescale.prediction.two_levels import levels_of
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.report.numbers import count, with_bounds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


YOUNG, SHARE_OF_YOUNG = 200.0, 0.1
"""A run of fewer steps, or of a smaller share of the planned ones, cannot tell that a smaller batch
size is better."""

SCATTER_OF_ONE_RUN, SCATTER_OF_TWO_RUNS = 0.9, 0.83
"""Errors of critical batch sizes in real runs, over those that the bounds tell of. One run: four
of five lay within 1.16 standard deviations, where 1.28 would be expected."""


@dataclass(frozen=True)
class Prediction(Answer):
    """What `predict` found, and the ways to show it."""

    rows: tuple[PredictedRow, ...]
    """A row for each number of devices and each batch size."""
    own_batch_size: float | None
    """The run's own batch size; None if it changed along the run."""
    own_devices: int
    law: RunLaw
    """Steps and examples at any batch size, with bounds."""
    calibration: Calibration
    second_run: SecondRun | None
    run: Segments
    history: History
    hardware: Hardware
    unit: str
    under_way: bool
    """Whether the run was still being written when it was read."""
    number: int = 0
    """The number of the optimizer, if several were measured."""
    by_optimizer: Mapping[int, Decision | str] = field(default_factory=dict)
    """The decisions of all optimizers, or why there is none, if several were measured."""
    costs: tuple[float, float] | None = None
    """The cost of a prompt (a group of rows) and of a generation (a row), if they are known."""
    same_batch: tuple[SharedBatch, ...] = ()
    """The run's batch on each number of devices, if it was asked for."""
    ramp: Ramp | None = None
    """A growing batch size in the words of a launcher, if it was asked for."""

    document = document_of
    to_dict = as_dict

    def __repr__(self) -> str:
        return (
            f"<Prediction: batch size {count(self.run_batch_size)}, {self.decision.verdict};"
            f" critical batch size {with_bounds(self.critical_batch_size)}, {len(self.rows)} rows>"
        )

    def figure(self) -> Figure:
        """Return the front of time against compute, a plotly figure.

        Raises:
            MissingExtraError: If plotly is not installed: `pip install "noisescale[report]"`.
        """
        need("plotly", "`Prediction.figure`")
        from noisescale.prediction.figures import front_figure

        return front_figure(self)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Reasons not to trust the prediction, in whole sentences."""
        return (*warnings_about(self), *self.hardware.doubts)

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """What the prediction assumes, in whole sentences."""
        return tuple(assumptions_of(self))

    @property
    def model_card(self) -> str:
        """One line of Markdown for a model card: batch size, critical batch size, how measured."""
        return model_card(self)

    @property
    def confidence(self) -> float:
        """The coverage of the bounds that the run was measured with."""
        return self.history.confidence

    @property
    def run_batch_size(self) -> float:
        """The run's batch size, or the mean if it changed along the run."""
        return self.own_batch_size or self.run.mean_batch_size

    @cached_property
    def decision(self) -> Decision:
        """What to do with the batch size: a verdict, a batch size, the reason, the next step."""
        return decision_of(self)

    @property
    def decisions(self) -> Mapping[int, Decision | str]:
        """The decision of each optimizer by its number, or the reason why there is none."""
        return self.by_optimizer or {self.number: self.decision}

    @property
    def recommended_batch_size(self) -> int:
        """The batch size of the decision, in `unit`; the run's own if the verdict is unknown."""
        return self.decision.batch_size or round(self.position.batch_size)

    @property
    def critical_batch_size(self) -> Bounded:
        """B_crit = E_min/S_min over the run, McCandlish's definition, in `unit`.

        Its bounds include the error of the theory: how far B_crit was from the noise scale for
        optimizers of the run's kind. With a calibration or a second run, the bounds come from
        these.
        """
        return self.law.critical_batch_size

    @cached_property
    def critical_batch_size_by_noise_scale(self) -> Bounded:
        """B_crit if the theory held exactly, with the bounds of the measurement alone."""
        return RunLaw.of(self.run, Bounded(1.0, 1.0, 1.0)).critical_batch_size

    @cached_property
    def budget(self) -> Budget:
        """The examples of the run, and what they allow."""
        return budget_of(self)

    @cached_property
    def learning_rate(self) -> LearningRate | None:
        """What to do with the learning rate at the suggested batch size; None if there is none."""
        return learning_rate_at(self, self.decision.verdict, self.recommended_batch_size)

    @cached_property
    def levels(self) -> Levels | None:
        """The noise between and within groups of rows, as shown last; None if not measured."""
        return levels_of(self)

    @property
    def best_rows_per_group(self) -> Bounded | None:
        """The rows of a group of the least cost at equal noise; None without levels or costs."""
        if self.levels is None or self.costs is None:
            return None
        centred = self.has_centred_advantages
        return self.levels.best_rows_per_group(*self.costs, centred=centred)

    @property
    def has_centred_advantages(self) -> bool:
        """Whether rows are known to have an advantage less the mean over their group."""
        return self.history.loop == "trl"

    @property
    def best_batch_size(self) -> Bounded:
        """The largest batch size that keeps the loss of a run of as many examples, in `unit`."""
        return self.budget.best_batch_size

    @property
    def critical_or_least(self) -> float:
        """The critical batch size, or its lower bound if it is not resolved."""
        return self.critical_batch_size.value if self.resolved else self.critical_batch_size.low

    @property
    def resolved(self) -> bool:
        """Whether the critical batch size is known, not only a lower bound of it."""
        return math.isfinite(self.critical_batch_size.value)

    @property
    def noise_scale_now(self) -> Bounded:
        """The noise scale as it was shown last; `UNKNOWN` if none ever was."""
        value, low, high = map(self._last, ("noise_scale", "low", "high"))
        if math.isnan(low):
            return UNKNOWN
        return (
            Bounded(value, low, high) if math.isfinite(high) else Bounded(math.nan, low, math.inf)
        )

    @property
    def look(self) -> Look | None:
        """What `measure` found at the last checkpoint that it measured; None if at none."""
        return self.history.looks[-1] if self.history.looks else None

    @property
    def steps_of_noise_scale(self) -> str:
        """The steps that the noise scale now is of, in words; "" if they are not known."""
        first, last = self._last("first_step"), self._last("step")
        return f"steps {count(first)} to {count(last)}" if math.isfinite(first) else ""

    @property
    def measuring(self) -> tuple[float, float] | None:
        """The measured steps and their share of the run's time; None if not recorded."""
        steps, cost = self._last("measured_steps"), self._last("measuring_cost")
        if not (math.isfinite(steps) and math.isfinite(cost)):
            return None
        return steps, cost / (float(self.run.steps.sum()) + cost)

    def _last(self, column: str) -> float:
        return float(self.history[column][-1])

    @property
    def end_may_decide(self) -> bool:
        """Whether the noise scale at the end of the run may stand for that of the whole run."""
        critical = self.critical_batch_size
        known = math.isfinite(critical.value) and math.isfinite(critical.high)
        return not known and self.calibration.is_theory and not has_decayed(self.history)

    @cached_property
    def position(self) -> Position:
        """Where the batch size of the run stands against the critical one.

        If the critical batch size of the whole run has no value or no upper bound, but the noise
        scale at the end of the run has both, the position is that of the end. A noise scale that
        `measure` found at a checkpoint is preferred. Neither is taken where the learning rate fell:
        the noise scale is largest at the end.
        """
        critical, at_end = self.critical_batch_size, False
        if self.end_may_decide:
            last = self.noise_scale_now if self.look is None else self.look.bounds
            if math.isfinite(last.value) and math.isfinite(last.high):
                critical, at_end = last * self.calibration.kappa, True
        sizes, which = np.unique(self.run.batch_size, return_inverse=True)
        steps = np.bincount(which, weights=self.run.steps)
        last_size = float(np.median(usual_batch_sizes(self.history)[-3:]))
        return Position(
            self.own_batch_size or (last_size if last_size > 0 else self.run_batch_size),
            critical,
            at_end,
            () if self.own_batch_size else tuple(zip(sizes.tolist(), steps.tolist(), strict=True)),
            self.confidence,
            self._scatter,
            bool(self.why_young),
        )

    @cached_property
    def why_young(self) -> str:
        """Why the run is too young to tell that a smaller batch size is better; "" if it is not."""
        steps = float(self.run.steps.sum())
        if self.second_run is not None:  # both runs reached one result
            return ""
        if is_warming_up(self.history):
            return "in warm-up"
        if steps < SHARE_OF_YOUNG * self.history.planned_steps:
            return f"of {count(self.history.planned_steps)}"
        return "few" if steps < YOUNG else ""

    @property
    def _scatter(self) -> float:
        """The errors of critical batch sizes that were known in this way, see `Position`."""
        if self.second_run is not None:
            return SCATTER_OF_TWO_RUNS
        return SCATTER_OF_ONE_RUN if self.calibration.is_theory else 1.0

    @property
    def these_devices(self) -> str:
        """The devices of the run in words."""
        return "this device" if self.own_devices == 1 else f"these {self.own_devices} devices"

    @property
    def priced(self) -> bool:
        """Whether costs are known."""
        return self.hardware.price_per_device_hour is not None

    @cached_property
    def shows_hours(self) -> bool:
        """Whether hours are shown: prices need them, or other rows than the run's were timed."""
        own = (self.run_batch_size, self.own_devices)
        others = (row for row in self.rows if (row.batch_size, row.devices) != own)
        return self.priced or any(row.basis == "timed" for row in others)

    def hours_ratio(self, row: PredictedRow, critical: Bounded | None = None) -> Bounded:
        """Return the hours of a row divided by the run's; `critical` as in `Position.steps`."""
        steps = self.position.steps(row.batch_size, critical)
        return steps * row.seconds_per_step * (1 / self.own_row.seconds_per_step.value)

    def time_ratio(self, row: PredictedRow) -> Bounded:
        """Return the hours of a row divided by the run's, or the steps if hours are not shown."""
        return self.hours_ratio(row) if self.shows_hours else self.position.steps(row.batch_size)

    @cached_property
    def device_counts(self) -> list[int]:
        """The numbers of devices that have rows."""
        return sorted({row.devices for row in self.rows})

    def rows_for(self, devices: int) -> list[PredictedRow]:
        """Return the rows of one number of devices, by rising batch size."""
        return [row for row in self.rows if row.devices == devices]

    def best_for(self, devices: int) -> PredictedRow:
        """Return the row of one number of devices with the fewest hours, so the least cost.

        If no seconds are known, return the balanced row, the one nearest to the critical batch
        size.

        Raises:
            ValueError: If nothing was predicted for that number.
        """
        if not (rows := self.rows_for(devices)):
            raise Refusal(
                "devices",
                "be a number of devices in the prediction",
                repr(devices),
                f"Give one of {', '.join(map(str, self.device_counts))}.",
            )
        return self._fastest_row(rows)

    def row_at(self, batch_size: float, devices: int) -> PredictedRow:
        """Return the row of a batch size, even if the tables do not have it."""
        return self.hardware.row(self.law, batch_size, devices, far=False)

    def row_on(self, devices: int) -> PredictedRow:
        """Return the row of a number of devices, each with the same plan as in the run.

        A batch size that is the mean of several becomes one of equal micro-batches of whole
        examples.
        """
        each, most = self.run_batch_size / self.own_devices, self.hardware.max_device_batch_size
        if each % 1 and each > most:
            each = most * round(each / most)
        elif each % 1:
            each = max(1.0, round(each))
        return self.row_at(each * devices, devices)

    @cached_property
    def own_row(self) -> PredictedRow:
        """The row of the run itself."""
        return self.row_at(self.run_batch_size, self.own_devices)

    @property
    def timed_rows(self) -> list[PredictedRow]:
        """The rows on the run's own devices whose step time was timed, by rising batch size.

        Batch sizes that are far off the run's are left out.
        """
        rows = self.rows_for(self.own_devices)
        return [row for row in rows if row.basis == "timed" and not row.extrapolated]

    @property
    def fastest_timed(self) -> PredictedRow | None:
        """The row with the fewest hours of those that were timed; None if only one was."""
        rows = self.timed_rows
        return self._fastest_row(rows) if len(rows) > 1 else None

    @cached_property
    def recommended(self) -> PredictedRow:
        """The row of the recommended batch size, on the run's own devices."""
        if self.decision.batch_size in (None, round(self.run_batch_size)):
            return self.own_row
        return self.row_at(self.recommended_batch_size, self.own_devices)

    @cached_property
    def on_more_devices(self) -> PredictedRow | None:
        """The row with the most devices that pay, by the values alone; None if more do not pay.

        More devices pay as long as one per cent more device-hours saves at least one per cent of
        the hours, which is McCandlish's criterion for steps and examples. Without hours, it is the
        row of the balanced batch size on as many devices as it fills.
        """
        best = self._balanced_row(self.rows)
        if not any(row.hours.known for row in self.rows):
            of_size = [row for row in self.rows if row.batch_size == best.batch_size]
            most = self.hardware.max_device_batch_size
            filled = [row for row in of_size if row.devices * most <= row.batch_size]
            best = max(filled, key=lambda row: row.devices) if filled else of_size[0]
        return best if best.devices > self.own_devices else None

    def _balanced_row(self, rows: Sequence[PredictedRow]) -> PredictedRow:
        """Return the row with the least product of hours and device-hours.

        Without seconds the product is steps times examples, which is least at B_crit.
        """
        known = self.law.best_known

        def product(row: PredictedRow) -> float:
            seconds, steps = row.seconds_per_step.value, known.steps(row.batch_size)
            if math.isnan(seconds):
                return steps * steps * row.batch_size
            return (steps * seconds) ** 2 * row.devices

        return min(rows, key=product)

    def _fastest_row(self, rows: Sequence[PredictedRow]) -> PredictedRow:
        """Return the row with the fewest hours; without seconds, with the least steps·examples."""
        known = self.law.best_known

        def hours(row: PredictedRow) -> float:
            seconds = row.seconds_per_step.value
            steps = known.steps(row.batch_size)
            return steps * (steps * row.batch_size if math.isnan(seconds) else seconds)

        return min(rows, key=hours)
