# SPDX-License-Identifier: Apache-2.0
"""What the callbacks of all trainers log of a meter, under names without their prefix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from noisescale.estimation.noise_scale import NoiseScale
from noisescale.meter.meter import NoiseScaleMeter


class _Now(NamedTuple):
    """What metrics are made of."""

    estimate: NoiseScale
    meter: NoiseScaleMeter
    seconds_per_step: float


OF_EVERY_RUN: dict[str, Callable[[_Now], float]] = {
    "simple": lambda now: now.estimate.value,
    "simple_low": lambda now: now.estimate.low,
    "simple_high": lambda now: now.estimate.high,
    "lower_bound": lambda now: now.estimate.low,
    "grad_sq_norm": lambda now: now.estimate.grad_sq_norm,
    "noise_trace": lambda now: now.estimate.noise_trace,
    "batch_size": lambda now: now.meter.batch_size,
    "efficiency": lambda now: now.estimate.efficiency(now.meter.batch_size),
    "step": lambda now: float(now.meter.last_measured_step),
    "examples": lambda now: now.meter.examples,
    "devices": lambda now: float(now.meter.devices),
    "accumulation": lambda now: float(now.meter.accumulation),
    "seconds_per_step": lambda now: now.seconds_per_step,
    "skipped_steps": lambda now: float(now.meter.skipped_steps),
}
"""Metrics that every run has at every step."""

_NEED_UPPER_END = {"simple", "simple_low", "simple_high", "efficiency"}
"""Of the whole gradient. TensorBoard draws a band only of values that were logged together."""


class Metrics(NamedTuple):
    """The metrics of a meter at one step."""

    all: dict[str, float]
    """NaN or infinite where it is not known."""
    unresolved: set[str]
    """Names of those that go by a noise scale whose interval has no upper end."""
    estimate: NoiseScale
    """Of the whole gradient."""

    @property
    def known(self) -> dict[str, float]:
        """Those for loggers: finite, and of what is resolved only."""
        return {
            name: value
            for name, value in self.all.items()
            if math.isfinite(value) and name not in self.unresolved
        }


def metrics_of(meter: NoiseScaleMeter, seconds_per_step: float, *, in_force: bool) -> Metrics:
    """Return the metrics as they are now. Reads the device.

    Args:
        meter: Whose they are.
        seconds_per_step: As the clock has it.
        in_force: Whether the averages are of now; else noise scales are not known.
    """
    estimate = _current(meter.noise_scale, in_force)
    now = _Now(estimate, meter, seconds_per_step)
    metrics = {name: value_of(now) for name, value_of in OF_EVERY_RUN.items()}
    unresolved = set() if estimate.resolved else {*_NEED_UPPER_END}
    if (coverage := meter.coverage) < 1:
        metrics["coverage"] = coverage
    if (of_adam := meter.preconditioned_noise_scale) is not None:
        of_adam = _current(of_adam, in_force)
        interval = {
            "preconditioned": of_adam.value,
            "preconditioned_low": of_adam.low,
            "preconditioned_high": of_adam.high,
        }
        metrics |= interval
        unresolved |= set() if of_adam.resolved else interval.keys()
    for name, of_group in meter.group_noise_scales.items():
        of_group = _current(of_group, in_force)
        metrics[f"group/{name}"] = of_group.value
        unresolved |= set() if of_group.resolved else {f"group/{name}"}
    return Metrics(metrics, unresolved, estimate)


def _current(estimate: NoiseScale, in_force: bool) -> NoiseScale:
    """The estimate while it is in force, else one of which nothing is known."""
    if in_force:
        return estimate
    nan = math.nan
    return replace(estimate, value=nan, low=nan, high=nan, grad_sq_norm=nan, noise_trace=nan)
