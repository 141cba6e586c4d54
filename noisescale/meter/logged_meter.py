# SPDX-License-Identifier: Apache-2.0
"""A meter with a clock and a history: what the callbacks of all trainers log and keep."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from noisescale._moved import former_names
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.guard import Guard, WarnOnce
from noisescale.history.history import History
from noisescale.history.metric_names import ROOT
from noisescale.meter.meter import NoiseScaleMeter
from noisescale.meter.metrics import OF_EVERY_RUN, Metrics, metrics_of
from noisescale.meter.step_timer import StepTimer


class Reading(NamedTuple):
    """The metrics of one log step."""

    all: dict[str, float]
    """Every metric; NaN and infinite where it is not known."""
    known: dict[str, float]
    """Those for loggers: finite, and of what is resolved only."""
    estimate: NoiseScale


class LoggedMeter:
    """A meter of one optimizer's gradients, with a clock and a history.

    Args:
        meter: Of its parameters.
        prefix: What the names of its metrics begin with.
    """

    def __init__(self, meter: NoiseScaleMeter, prefix: str = ROOT) -> None:
        self.meter = meter
        self.measuring = True
        """Whether it has not been closed."""
        self.history = self._new_history()
        self.guard = Guard()
        self._warn = WarnOnce()
        self._prefix = prefix
        self._timer = StepTimer()
        self._measured_by_last_row = 0
        self._in_force = False
        self._names = (*OF_EVERY_RUN,)
        self._last_read_step = -1

    @property
    def has_news(self) -> bool:
        """Whether a step was measured since the metrics were last asked for."""
        return self.meter.last_measured_step != self._last_read_step

    @property
    def advanced(self) -> bool:
        """Whether a step was measured since the last row of the history."""
        return self.meter.last_measured_step > self.history.last_step

    def start(self) -> None:
        """Start the clock."""
        self._timer = StepTimer()

    def interrupt(self) -> None:
        """Leave the step under way out of the times: something else happens in it."""
        self._timer.interrupt()

    def step(self, *, loss_divisor: float | None = None) -> None:
        """Close the step, see `NoiseScaleMeter.step`."""
        self.meter.step(loss_divisor=loss_divisor)
        self._timer.step()

    def close(self, *, interrupted: bool = False) -> None:
        """Take everything out of the model, see `NoiseScaleMeter.close`."""
        self.measuring = False
        with self.guard("The last steps are not in the averages"):
            self.meter.close(interrupted=interrupted)

    def read(self) -> Reading:
        """Return the metrics, and add a row to the history if a step was to be measured.

        Where all such steps since the last row were left out (not finite, nothing to compare), the
        noise scale is not known: NaN, here and in the row, which counts steps and examples. Where
        none has been due since, with `every_n_steps` above 1, the last values are in force.

        Where reading fails, all metrics are NaN, and one warning says so.
        """
        with self.guard("The noise scale was not logged"):
            return self._read()
        unknown = NoiseScale(math.nan, 0.0, math.inf, math.nan, math.nan, steps=0)
        return Reading(self._unknown(), {}, unknown)

    def _read(self) -> Reading:
        self._warn_of_lone_steps()
        self._in_force = self._is_in_force()
        now = self._metrics()
        self._timer.restart()
        if self.advanced:
            now.all.update(self.meter.take_increments())
            self._append_row(now)
        return Reading(self._named(now.all), self._named(now.known), now.estimate)

    def _append_row(self, now: Metrics) -> None:
        self.history.append(
            noise_scale=now.estimate.value,
            low=now.estimate.low,
            high=now.estimate.high,
            **self.meter.sums._asdict(),
            **{
                column: now.all[column]
                for column in self.history
                if column in now.all and column not in now.unresolved
            },
        )
        self._measured_by_last_row = self.meter.measured_steps

    def look(self) -> dict[str, float]:
        """Return every metric as it is now, but for increments. The next row is what it will be.

        For whoever looks between two rows of the history. Reads the device, as `read` does.
        """
        with self.guard("The noise scale was not logged"):
            return self._named(self._metrics().all)
        return self._unknown()

    def _unknown(self) -> dict[str, float]:
        return self._named(dict.fromkeys(self._names, math.nan))

    def _named(self, metrics: dict[str, float]) -> dict[str, float]:
        return {self._prefix + name: value for name, value in metrics.items()}

    def _metrics(self) -> Metrics:
        self._last_read_step = self.meter.last_measured_step
        now = metrics_of(self.meter, self._timer.mean, in_force=self._is_in_force())
        self._names = (*now.all,)
        return now

    def _is_in_force(self) -> bool:
        """Whether the averages are of now: they have taken in a step since the last row."""
        if not self.advanced:
            return self._in_force
        if self.meter.measured_steps > self._measured_by_last_row:
            return True
        # One such step may be the short last accumulation of an epoch, which changes nothing.
        return self._in_force and self.meter.lone_since is not None and not self._several_alone

    @property
    def _several_alone(self) -> bool:
        """Whether two measured steps or more had nothing to be compared with, up to now."""
        meter = self.meter
        return meter.lone_since is not None and (
            meter.last_measured_step - meter.lone_since >= meter.every_n_steps
        )

    def _warn_of_lone_steps(self) -> None:
        measured = self.meter.measured_steps
        if (
            self.advanced
            and self._several_alone
            and measured == self._measured_by_last_row
            and measured
        ):
            self._warn(
                f"From step {self.meter.lone_since} on each step has one micro-batch, in one"
                " process, which has nothing to be compared with: no noise scale is logged from"
                " there on. Accumulate two or more, use more devices, or compare the halves of each"
                ' batch: `small_batch="half"`.',
                about="lone steps",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what `resume` needs, in builtins; see `NoiseScaleMeter.state_dict`.

        Empty where that fails, and one warning says so.
        """
        with self.guard("The averages are not in the checkpoint"):
            return self._state_dict()
        return {}

    def _state_dict(self) -> dict[str, Any]:
        return {
            "meter": self.meter.state_dict(),
            "history": self.history.state_dict(),
            "measured_by_last_row": self._measured_by_last_row,
            "in_force": self._in_force,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. What cannot be restored begins anew, after a warning."""
        with self.guard("The averages of before were not restored, they begin anew"):
            self.meter.load_state_dict(state["meter"])
            self._measured_by_last_row = state.get("measured_by_last_row", 0)
            self._in_force = state.get("in_force", False)
        with self.guard("The history of before was not restored, it begins anew"):
            unit = state["meter"]["estimates"]["whole"]["unit"]
            if unit != self.history.unit:
                raise ValueError(f"it is in {unit}, and now {self.history.unit} are counted")
            history = self._new_history()
            history.load_state_dict(state["history"])
            self.history = history

    def _new_history(self) -> History:
        estimate = self.meter.noise_scale
        return History(
            extra_columns=[f"group/{g}" for g in self.meter.group_noise_scales],
            unit=estimate.unit,
            confidence=estimate.confidence,
        )


def nothing_measured(prefix: str = ROOT) -> dict[str, float]:
    """Return the metrics of a run in which nothing can be measured: NaN."""
    return {prefix + name: math.nan for name in OF_EVERY_RUN}


__getattr__ = former_names(__name__, {"Measurement": "noisescale.meter.logged_meter.LoggedMeter"})
