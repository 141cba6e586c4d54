# SPDX-License-Identifier: Apache-2.0
"""A meter with a clock and a history: what the callbacks of all trainers log and keep."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from noisescale.collectors.choosing import SmallBatch, check_small_batch
from noisescale.collectors.gradient_norms import Groups
from noisescale.collectors.per_example import Layers
from noisescale.estimator import NoiseScale, NoiseScaleEstimator
from noisescale.guard import Guard
from noisescale.history import History
from noisescale.logged_tags import ROOT
from noisescale.meter import NoiseScaleMeter, checked_every_n_steps
from noisescale.step_timer import StepTimer


def checked_options(
    *,
    window: int | Literal["auto"],
    every_n_steps: int,
    unit: str,
    groups: Groups | None,
    confidence: float,
    small_batch: SmallBatch,
    layers: Layers,
    preconditioned: bool,
) -> dict[str, Any]:
    """Return the options of a `NoiseScaleMeter` that is made later, checked now.

    Raises:
        ValueError: If one is out of its range, or they contradict each other.
    """
    NoiseScaleEstimator(window, confidence, unit)
    check_small_batch(small_batch, layers, preconditioned)
    return {
        "window": window,
        "every_n_steps": checked_every_n_steps(every_n_steps),
        "unit": unit,
        "confidence": confidence,
        "small_batch": small_batch,
        "layers": layers,
        "groups": groups,
    }


class Reading(NamedTuple):
    """The metrics of one log step."""

    all: dict[str, float]
    """Every metric; NaN and infinite where it is not known."""
    known: dict[str, float]
    """Those for loggers: finite, and of what is resolved only."""
    estimate: NoiseScale


class Measurement:
    """What is measured of one optimizer's gradients.

    Args:
        meter: Of its parameters.
        prefix: What the names of its metrics begin with.
    """

    def __init__(self, meter: NoiseScaleMeter, prefix: str = ROOT) -> None:
        self.meter = meter
        self.history = self._new_history()
        self.guard = Guard()
        self._prefix = prefix
        self._timer = StepTimer()
        self._measured_by_last_row = 0
        self._in_force = False
        self._warned = False
        self._names: list[str] = []

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
        with self.guard("The last steps are not in the averages"):
            self.meter.close(interrupted=interrupted)

    def read(self) -> Reading:
        """Return the metrics, and add a row to the history if a step was to be measured.

        Where all such steps since the last row were left out (not finite, nothing to compare), the
        noise scale is not known: NaN, here and in the row, which counts steps and examples. Where
        none has been due since, with `every_n_steps` above 1, the last values are in force.

        Where reading fails, which is told once, all metrics are NaN.
        """
        with self.guard("The noise scale was not logged"):
            reading = self._read()
            self._names = list(reading.all)
            return reading
        unknown = NoiseScale(math.nan, 0.0, math.inf, math.nan, math.nan, steps=0)
        return Reading(dict.fromkeys(self._names, math.nan), {}, unknown)

    def _read(self) -> Reading:
        meter = self.meter
        self._look_for_measured_steps()
        estimate = self._current(meter.noise_scale)
        seconds_per_step = self._timer.mean_since_last_read()
        metrics = {
            **_interval("simple", estimate),
            "lower_bound": estimate.low,
            "grad_sq_norm": estimate.grad_sq_norm,
            "noise_trace": estimate.noise_trace,
            "batch_size": meter.batch_size,
            "efficiency": estimate.efficiency(meter.batch_size),
            "step": float(meter.last_measured_step),
            "examples": meter.examples,
            "devices": float(meter.devices),
            "accumulation": float(meter.accumulation),
            "seconds_per_step": seconds_per_step,
            "skipped_steps": float(meter.skipped_steps),
        }
        # TensorBoard draws a band only where value, low and high have been logged together.
        unknown = set() if estimate.resolved else {*_interval("simple", estimate), "efficiency"}
        if (of_adam := meter.preconditioned_noise_scale) is not None:
            preconditioned = self._current(of_adam)
            metrics |= (interval := _interval("preconditioned", preconditioned))
            unknown |= set() if preconditioned.resolved else interval.keys()
        groups = {name: self._current(x) for name, x in meter.group_noise_scales.items()}
        metrics |= {f"group/{name}": of_group.value for name, of_group in groups.items()}
        unknown |= {f"group/{name}" for name, of_group in groups.items() if not of_group.resolved}
        if self.advanced:
            metrics |= meter.take_increments()
            self.history.append(
                noise_scale=estimate.value,
                low=estimate.low,
                high=estimate.high,
                **meter.sums._asdict(),
                **{
                    column: metrics[column]
                    for column in self.history
                    if column in metrics and column not in unknown
                },
            )
        return Reading(
            all={self._prefix + key: value for key, value in metrics.items()},
            known={
                self._prefix + key: value
                for key, value in metrics.items()
                if math.isfinite(value) and key not in unknown
            },
            estimate=estimate,
        )

    def _look_for_measured_steps(self) -> None:
        """Find out whether the averages have taken in a step since the last row."""
        if not self.advanced:
            return
        measured, since = self.meter.measured_steps, self.meter.lone_since
        advanced = measured > self._measured_by_last_row
        self._measured_by_last_row = measured
        # One such step may be the short last window of an epoch, which changes nothing.
        several = since is not None and (
            self.meter.last_measured_step - since >= self.meter.every_n_steps
        )
        if advanced or since is None or several:
            self._in_force = advanced
        if several and not advanced and measured and not self._warned:
            self._warned = True
            warnings.warn(
                f"From step {since} on each step has one micro-batch, in one process, which has"
                " nothing to be compared with: no noise scale is logged from there on. Accumulate"
                " two or more, use more devices, or compare single examples:"
                ' `small_batch="example"`.',
                stacklevel=2,
            )

    def _current(self, estimate: NoiseScale) -> NoiseScale:
        """The estimate while it is in force, else one of which nothing is known."""
        if self._in_force:
            return estimate
        unknown = math.nan
        return replace(
            estimate,
            value=unknown,
            low=unknown,
            high=unknown,
            grad_sq_norm=unknown,
            noise_trace=unknown,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `resume` needs, in builtins; see `NoiseScaleMeter.state_dict`.

        Empty where that fails, which is told once.
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


def _interval(name: str, estimate: NoiseScale) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
