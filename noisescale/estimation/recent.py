# SPDX-License-Identifier: Apache-2.0
"""The noise scale of now: the last steps, each relative to its own level of |g|²."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from noisescale.checks import check_confidence
from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.ratio_interval import WeightedMeans
from noisescale.state import State

Array = NDArray[np.float64]

FEWEST_STEPS = 8
"""Measured steps in the shortest window, as far as there are as many."""

MOST_STEPS = 2048
"""Measured steps that are kept."""

LARGEST_SHARE = 0.7
"""The longest window has the measured steps among this share of the run's steps."""

DRIFT = 0.6
"""Standard deviation of the logarithm of the noise scale after the steps have grown e-fold.

Chosen of 0.3 to 1 on the trainings of seeds 0 to 2 of `benchmarks/accuracy/now.py`. On those of
seeds 3 to 9 the intervals held the truth in 92 to 98 % of the looks, at each cadence and length of
run (0.5: 88 to 96 %, 0.7: 90 to 99 %).
"""

RATE_DRIFT = 0.5
"""How far the logarithm of the noise scale may be from that of steps of e times the rate.

|G|² falls with the learning rate, so the noise scale rises at the end of a falling rate.
"""

MOST_FALL = 4.0
"""The logarithm of the largest fall of the rate that counts: at the end of a cosine it is zero."""

EARLY = 8
"""The noise scale changes little in this many first steps."""


class Window(NamedTuple):
    """The last measured steps that an estimate is of."""

    steps: int
    """The number of measured steps."""
    drift: float
    """Variance of the logarithm of the noise scale now around that of these steps."""


class RecentSteps(State):
    """Estimate the noise scale of now from the last measured steps.

    |G|² falls, often a hundredfold in the first steps of a run. An average of raw moments then
    shows the noise scale of the first steps for a long time. Here the moments of each step are
    divided by the trailing |g|² of the steps before it, see `Level`. So all steps in the window
    count the same.

    The noise scale changes along a run, about as much while its steps double from 50 to 100 as from
    500 to 1,000. It is taken to be a random walk in log time, so that the last steps differ from
    now by their age. A longer window has less noise and more age. The window is the one with the
    least sum of both variances,

        cv²/n + DRIFT²·Σᵢⱼ min(ageᵢ, ageⱼ)/n²,    age = log(steps now/steps then)

    with cv the scatter of single steps (from successive differences) divided by their mean. The
    scatter is that of the longest window, which has the last 70 % of the run's steps. The interval
    itself must not choose the window: this would favour windows that are narrow by luck.

    The interval is Fieller's, widened by the variance of the age: in logarithms, in quadrature. So
    it holds the noise scale of now rather than that of the window. Without the widening, it held
    the noise scale of the last 40 steps in 39 to 91 % of the looks (`benchmarks/accuracy/now.py`).

    Where the learning rate has fallen since, |G|² has, too. The interval is also widened by

        (RATE_DRIFT·mean of log(rate then/rate now))²

    Steps are weighted by their batch size, because the noise of |G|² falls as 1/B or faster. With
    equal weights one tiny last batch of an epoch would dominate an average.

    Args:
        window: "auto", as described above; or the measured steps to average over. Then the interval
            is that of their average, whatever their age, as at weights that stay.
        confidence: Coverage of the interval.
        unit: The unit of batch sizes, for display.

    Raises:
        ValueError: If `confidence` is not between 0 and 1.

    Examples:
        >>> recent = RecentSteps()
        >>> for level in (64.0, 16.0, 4.0, 1.0, 0.5, 0.25):
        ...     recent.add(GradientMoments(grad_sq_norm=level, noise_trace=20 * level), weight=32)
        >>> round(recent.estimate().value, 6)
        20.0
    """

    def __init__(
        self,
        window: int | Literal["auto"] = "auto",
        confidence: float = 0.95,
        unit: str = "examples",
    ) -> None:
        check_confidence(confidence)
        self.window = window
        self.confidence = confidence
        self.unit = unit
        self._most_steps = MOST_STEPS if window == "auto" else window
        # Rows of step, batch size, level, log rate, and tr(Σ) and |G|² over the level. When it is
        # full, it moves to the front.
        self._rows = np.empty((2 * min(self._most_steps, FEWEST_STEPS), 6))
        self._end = 0
        self._level = Level()
        self.last_step = 0
        """The last step that was added."""

    def __len__(self) -> int:
        return min(self._end, self._most_steps)

    @property
    def _steps(self) -> Array:
        """The last measured steps, shape (steps, 6)."""
        return self._rows[self._end - len(self) : self._end]

    def add(
        self,
        moments: GradientMoments,
        weight: float,
        step: int | None = None,
        *,
        learning_rate: float = math.nan,
    ) -> None:
        """Add one measured step. The first one only sets the level.

        Args:
            moments: The step's two moments. They must be finite, and may be negative.
            weight: The global batch size of the step.
            step: Optimizer steps of the run up to this one. Default: one more than the last.
            learning_rate: The step's; NaN if it is not known.
        """
        level = self._level.divisor(moments, weight)
        relative, self._level = self._level.step(moments, weight)
        self.last_step = self.last_step + 1 if step is None else step
        if relative is not None and level is not None:
            self._append(relative, weight, level, learning_rate)

    def add_relative(
        self,
        relative: GradientMoments,
        weight: float,
        step: int | None = None,
        *,
        learning_rate: float = math.nan,
    ) -> None:
        """Add one step whose moments are relative to a level already."""
        self.last_step = self.last_step + 1 if step is None else step
        self._append(relative, weight, 1.0, learning_rate)

    def _append(
        self, relative: GradientMoments, weight: float, level: float, learning_rate: float
    ) -> None:
        if self._end == len(self._rows):
            self._keep(self._steps)
        log_rate = math.log(learning_rate) if 0 < learning_rate < math.inf else -math.inf
        moments = relative.noise_trace, relative.grad_sq_norm
        self._rows[self._end] = self.last_step, weight, level, log_rate, *moments
        self._end += 1

    def estimate(
        self,
        step: int | None = None,
        *,
        confidence: float | None = None,
        least: float = 0.0,
        learning_rate: float = math.nan,
    ) -> NoiseScale:
        """Return the noise scale after `step`.

        Its `noise_trace` is the mean of the window's steps, and `grad_sq_norm` is that over the
        value: the steps of the largest |G|² would rule a plain mean.

        Args:
            step: Optimizer steps of the run up to now. Default: the last step that was added.
            confidence: Coverage of the interval, if it is another.
            least: Measured steps to use at least, as far as there are as many.
            learning_rate: That of now; NaN if it is not known. If it has fallen since the measured
                steps, the interval is wider: the noise scale rises while the learning rate falls.
        """
        confidence = self.confidence if confidence is None else confidence
        if len(self) < 2:
            return NoiseScale.unknown(confidence, self.unit, steps=len(self))
        now = max(self.last_step, step or 0)
        chosen = self._chosen_window(now, least)
        rows = self._steps[-chosen.steps :]
        _, weight, level, log_rate, noise, signal = rows.T
        share = weight / weight.sum()
        # No matrix products: ranks have to agree, and BLAS rounds as its kernel for the CPU does.
        noise_trace, grad_sq_norm = (share[:, None] * rows[:, 4:]).sum(axis=0).tolist()
        of_level = float((share * level).sum())
        if noise_trace > 0 and (of_steps := float((share * level * noise).sum())) > 0:
            of_level = of_steps / noise_trace
        of_noise, of_signal = share * (noise - noise_trace), share * (signal - grad_sq_norm)
        products = (of_noise * of_noise, of_noise * of_signal, of_signal * of_signal)
        means = WeightedMeans(
            noise_trace,
            grad_sq_norm,
            weight=1.0,
            scatter=[float(product.sum()) for product in products],
            sq_weight=float((share**2).sum()),
            fourth_weight=float((share**4).sum()),
        )
        of_window = NoiseScale.of(means, confidence, self.unit)
        drift = chosen.drift
        if self.window == "auto" and 0 < learning_rate < math.inf:
            falls = np.minimum(log_rate - math.log(learning_rate), MOST_FALL)
            fallen = float((share * falls).sum())
            drift += (RATE_DRIFT * fallen) ** 2 if fallen > 0 else 0.0  # not known: -inf
        return replace(
            _widen(of_window, float(ndtri(0.5 + confidence / 2)) * math.sqrt(drift)),
            grad_sq_norm=of_level * grad_sq_norm,
            noise_trace=of_level * noise_trace,
            first_step=int(rows[0, 0]),
        )

    def _chosen_window(self, now: int, least: float) -> Window:
        """Return the window that was asked for, or that with the least variance."""
        rows = self._steps
        if self.window != "auto":
            return Window(len(rows), drift=0.0)
        fewest = max(FEWEST_STEPS, math.ceil(least))
        young = int((rows[:, 0] > (1 - LARGEST_SHARE) * now).sum())
        rows = rows[-max(young, fewest) :]
        fewest = min(fewest, len(rows))
        steps, weight = rows[::-1, 0], rows[::-1, 1]  # the newest first
        total = np.cumsum(weight)
        age = _log((now + EARLY) / (steps + EARLY))
        # Of two steps the younger one's age counts: Σᵢⱼ wᵢwⱼ·min(ageᵢ, ageⱼ) over the last n.
        own = np.cumsum(weight * age * (weight - 2 * total))
        drift = DRIFT**2 * (own + 2 * total * np.cumsum(weight * age)) / total**2
        noise = _squared_variation(rows) / total
        chosen = fewest - 1 + int(np.argmin((noise + drift)[fewest - 1 :]))
        if not math.isfinite(noise[0]):
            chosen = len(rows) - 1
        return Window(chosen + 1, max(float(drift[chosen]), 0.0))

    def _keep(self, steps: Array) -> None:
        """Move the kept steps to the front, with room for as many more."""
        if len(self._rows) < 2 * max(len(steps), 1):
            steps, self._rows = steps.copy(), np.empty((2 * len(steps), 6))
        self._rows[: len(steps)] = steps
        self._end = len(steps)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs, in builtin types."""
        return {
            "level": self._level.sq_norm,
            "last_step": self.last_step,
            "steps": self._steps.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. If an error is raised, nothing is changed."""
        steps = np.reshape(np.array(state["steps"], np.float64), (-1, 6))[-self._most_steps :]
        level, last_step = Level(float(state["level"])), int(state["last_step"])
        self._level, self.last_step = level, last_step
        self._keep(steps)


def _log(ratio: Array) -> Array:
    """Return the logarithm to 1 %. CPUs round numpy's differently, and a root alike."""
    root: Array = np.sqrt(np.sqrt(np.sqrt(np.sqrt(ratio))))
    return 32 * (root - 1) / (root + 1)


def _squared_variation(rows: Array) -> float:
    """Return cv² of a step of weight 1: infinite while the ratio is not known.

    cv is the standard deviation of S - R·Q divided by the mean of S, R the ratio of the means.
    """
    weight, noise, signal = rows[:, 1], rows[:, 4], rows[:, 5]
    mean_noise, mean_signal = ((weight * x).sum() / weight.sum() for x in (noise, signal))
    if len(rows) < 2 or mean_signal <= 0 or mean_noise <= 0:
        return math.inf
    of_ratio = noise - mean_noise / mean_signal * signal
    # A step of weight w has variance C/w, a difference C·(1/w₁ + 1/w₂).
    precision = weight[1:] * weight[:-1] / (weight[1:] + weight[:-1])
    return float((precision * np.diff(of_ratio) ** 2).mean()) / float(mean_noise) ** 2


def _widen(estimate: NoiseScale, drifted: float) -> NoiseScale:
    """Return the estimate with the interval of a noise scale that may have drifted since.

    Args:
        estimate: The noise scale of the window.
        drifted: How far it may have drifted, in logarithms, at the confidence of the interval.
    """
    value, low, high = estimate.value, estimate.low, estimate.high
    if value > 0 and estimate.resolved:
        high = value * math.exp(math.hypot(math.log(high / value), drifted))
        if low > 0:
            low = value / math.exp(math.hypot(math.log(value / low), drifted))
    else:  # no value to measure an end from
        low, high = low / math.exp(drifted), high * math.exp(drifted)
    return replace(estimate, low=low, high=high)
