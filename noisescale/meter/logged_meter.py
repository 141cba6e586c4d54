# SPDX-License-Identifier: Apache-2.0
"""A meter with a clock and a history: what the callbacks of all trainers log and keep."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

from noisescale.estimation.estimator import NoiseScale
from noisescale.guard import Guard
from noisescale.history.history import History
from noisescale.history.metric_names import ROOT
from noisescale.meter.meter import NoiseScaleMeter
from noisescale.meter.step_timer import StepTimer


class Reading(NamedTuple):
    """The metrics of one log step."""

    all: dict[str, float]
    """Every metric; NaN and infinite where it is not known."""
    known: dict[str, float]
    """Those for loggers: finite, and of what is resolved only."""
    estimate: NoiseScale


OF_EVERY_RUN = (
    "simple",
    "simple_low",
    "simple_high",
    "lower_bound",
    "grad_sq_norm",
    "noise_trace",
    "batch_size",
    "efficiency",
    "step",
    "examples",
    "devices",
    "accumulation",
    "seconds_per_step",
    "skipped_steps",
)
"""Metrics without their prefix that every run has at every step."""


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
        self._names: tuple[str, ...] = OF_EVERY_RUN
        self._last_told = -1

    @property
    def has_news(self) -> bool:
        """Whether a step was measured since the metrics were last asked for."""
        return self.meter.last_measured_step != self._last_told

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
            return self._read()
        unknown = NoiseScale(math.nan, 0.0, math.inf, math.nan, math.nan, steps=0)
        return Reading(self._unknown(), {}, unknown)

    def _read(self) -> Reading:
        self._warn_of_lone_steps()
        self._in_force = self._is_in_force()
        metrics, unknown, estimate = self._metrics()
        self._timer.restart()
        if self.advanced:
            metrics |= self.meter.take_increments()
            self.history.append(
                noise_scale=estimate.value,
                low=estimate.low,
                high=estimate.high,
                **self.meter.sums._asdict(),
                **{
                    column: metrics[column]
                    for column in self.history
                    if column in metrics and column not in unknown
                },
            )
            self._measured_by_last_row = self.meter.measured_steps
        return Reading(
            all=self._named(metrics),
            known=self._named(
                {k: v for k, v in metrics.items() if math.isfinite(v) and k not in unknown}
            ),
            estimate=estimate,
        )

    def look(self) -> dict[str, float]:
        """Return every metric as it is now, but for increments. The next row is what it will be.

        For whoever looks between two rows of the history. Reads the device, as `read` does.
        """
        with self.guard("The noise scale was not logged"):
            return self._named(self._metrics()[0])
        return self._unknown()

    def _unknown(self) -> dict[str, float]:
        return self._named(dict.fromkeys(self._names, math.nan))

    def _named(self, metrics: dict[str, float]) -> dict[str, float]:
        return {self._prefix + name: value for name, value in metrics.items()}

    def _metrics(self) -> tuple[dict[str, float], set[str], NoiseScale]:
        """The metrics, names of those that are not resolved, and the noise scale."""
        meter = self.meter
        self._last_told = meter.last_measured_step
        in_force = self._is_in_force()
        estimate = _current(meter.noise_scale, in_force)
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
            "seconds_per_step": self._timer.mean,
            "skipped_steps": float(meter.skipped_steps),
        }
        if (coverage := meter.coverage) < 1:
            metrics["coverage"] = coverage
        # TensorBoard draws a band only where value, low and high have been logged together.
        unknown = set() if estimate.resolved else {*_interval("simple", estimate), "efficiency"}
        if (of_adam := meter.preconditioned_noise_scale) is not None:
            preconditioned = _current(of_adam, in_force)
            metrics |= (interval := _interval("preconditioned", preconditioned))
            unknown |= set() if preconditioned.resolved else interval.keys()
        groups = {name: _current(x, in_force) for name, x in meter.group_noise_scales.items()}
        metrics |= {f"group/{name}": of_group.value for name, of_group in groups.items()}
        unknown |= {f"group/{name}" for name, of_group in groups.items() if not of_group.resolved}
        self._names = tuple(metrics)
        return metrics, unknown, estimate

    def _is_in_force(self) -> bool:
        """Whether the averages are of now: they have taken in a step since the last row."""
        if not self.advanced:
            return self._in_force
        if self.meter.measured_steps > self._measured_by_last_row:
            return True
        # One such step may be the short last window of an epoch, which changes nothing.
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
            and not self._warned
        ):
            self._warned = True
            warnings.warn(
                f"From step {self.meter.lone_since} on each step has one micro-batch, in one"
                " process, which has nothing to be compared with: no noise scale is logged from"
                " there on. Accumulate two or more, use more devices, or compare the halves of each"
                ' batch: `small_batch="half"`.',
                stacklevel=2,
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


def nothing_measured(prefix: str = ROOT) -> dict[str, float]:
    """Return the metrics of a run in which nothing can be measured: NaN."""
    return {prefix + name: math.nan for name in OF_EVERY_RUN}


def _current(estimate: NoiseScale, in_force: bool) -> NoiseScale:
    """The estimate while it is in force, else one of which nothing is known."""
    if in_force:
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


def _interval(name: str, estimate: NoiseScale) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
