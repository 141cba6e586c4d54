# SPDX-License-Identifier: Apache-2.0
"""The trade-off of steps and examples to reach the result of one run, with bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import brentq

from noisescale.bounded import Bounded
from noisescale.history.history import History
from noisescale.history.segments import Array, Segments
from noisescale.tradeoff.run_sums import Parts, Sums

_COURSE = (0.01, 0.99)
"""The range of a step's progress. Beyond it the noise scale is only measurement error."""

_FARTHEST = 60.0
"""The logarithm of the largest factor between a run's noise scale and a critical batch size."""


@dataclass(frozen=True)
class RunLaw:
    """S(B) = S_min + E_min/B of one run, with bounds from the intervals of its noise scale.

    The progress of a step at noise scale b and batch size B is p = 1/(1 + b/B). Then

        S_min = Σ steps·p        E_min = Σ steps·B·(1 - p)

    A step counts by its learning rate where that fell, see `Segments.weight`. Both sums are linear
    in p, and the blocks of the run have independent estimates of p. Let t = Σ t_k be a sum over
    blocks, and let each t_k lie between l_k and u_k. The bounds of the sum are

        t - √(Σ (t_k - l_k)²)   and   t + √(Σ (u_k - t_k)²)

    The intervals of measured blocks are symmetric, with the same quantile. So the bounds are those
    of a sum of independent normal estimates, and the bounds of B_crit = E_min/S_min are Fieller's.
    The intervals of a calibration and of logged estimates may be asymmetric, and the bounds then
    are, too (Zou & Donner's recovery of variance estimates). The error of kappa is common to all
    blocks: the sums with kappa at its ends add one term to each root. If the noise scale is not
    resolved, the bounds are the sums with all noise scales at their lower and at their upper ends.

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D. Zou & Donner 2008, "Construction of
        confidence limits about effect measures", Statistics in Medicine 27.
    """

    _middle: Parts
    _low: Parts
    _high: Parts
    _noise_scale_ends: tuple[Parts, Parts]
    """The sums with the noise scale at its ends, and kappa at its value."""
    _kappa_ends: tuple[Parts, Parts]
    """The sums with kappa at its ends, and the noise scale at its value."""
    _extremes: tuple[Parts, Parts]
    """The sums without noise, and without progress; for each batch size, not for blocks."""
    gamma: float
    """See `Tradeoff.gamma`; NaN if the noise scale is not resolved, or is zero."""

    @classmethod
    def of(cls, run: Segments, kappa: Bounded) -> RunLaw:
        """Return the law of a run. Its noise scale is multiplied by kappa."""

        def of_blocks(progress: Array) -> Parts:
            return Parts.at_progress(progress, run.batch_size, run.counted_steps).of_blocks(
                run.block
            )

        def parts(progress: Array, factor: float) -> Parts:
            return of_blocks(_calibrate(progress, factor) + shift)

        # At all ends together progress is a share.
        low, high = (end.clip(0.0, 1.0) for end in (run.progress_high, run.progress_low))
        shift = _curvature(run, kappa.value)
        middle = _calibrate(run.progress, kappa.value) + shift
        of_b = parts(run.progress_high, kappa.value), parts(run.progress_low, kappa.value)
        value = of_blocks(middle)
        below = value.min_steps - of_b[1].min_steps
        if value.sums.min_examples <= 0:
            middle = np.ones_like(middle)  # no noise, but for the error of measuring it
        elif not run.as_logged and value.sums.min_steps <= math.sqrt(float(below @ below)):
            # S_min reaches 0 at the lower end of the progress.
            middle, high = np.full_like(middle, math.nan), np.zeros_like(high)
        value = of_blocks(middle)
        of_kappa = value, value
        if kappa.low != kappa.high:
            of_kappa = parts(run.progress, kappa.low), parts(run.progress, kappa.high)
        return cls(
            value,
            of_blocks(_calibrate(low, kappa.low)),
            of_blocks(_calibrate(high, kappa.high)),
            of_b,
            of_kappa,
            _extremes(run),
            Parts.at_progress(middle.clip(0.0, 1.0), run.batch_size, run.counted_steps).gamma,
        )

    @classmethod
    def with_critical_batch_size(cls, run: Segments, critical_batch_size: Bounded) -> RunLaw:
        """Return the law of a run whose critical batch size is known from another source.

        The measured noise scale only decides how the noise changes along the run, and adds no
        error. If it is not resolved, it is assumed to be constant. The value of
        `critical_batch_size` may be infinite or NaN, and its upper end may be infinite.
        """
        progress = np.nan_to_num(run.progress, nan=0.5).clip(*_COURSE)
        course = run.batch_size * (1 - progress) / progress

        def parts(critical: float) -> Parts:
            def at_factor(log_factor: float) -> Parts:
                noise_scale = math.exp(log_factor) * course
                return Parts.at_noise_scale(noise_scale, run.batch_size, run.steps)

            def excess(log_factor: float) -> float:
                return math.log(at_factor(log_factor).sums.critical_batch_size / critical)

            if critical == 0 or math.isinf(critical):
                all_or_none = np.full_like(course, float(critical == 0))
                return Parts.at_progress(all_or_none, run.batch_size, run.steps)
            return at_factor(brentq(excess, -_FARTHEST, _FARTHEST, xtol=1e-12))

        known = critical_batch_size
        low, high = parts(known.low), parts(known.high)
        if not math.isfinite(known.value):
            nothing = np.full_like(course, math.nan)
            middle = Parts(nothing, nothing)
        else:
            middle = parts(known.value)
        one = np.zeros(run.steps.size, dtype=np.intp)
        value, lowest, highest = (x.of_blocks(one) for x in (middle, low, high))
        gamma = middle.gamma if known.value else math.nan
        ends = (value, value), (lowest, highest)
        return cls(value, lowest, highest, *ends, _extremes(run), gamma)

    def __add__(self, other: RunLaw) -> RunLaw:
        """Return the law of two parts of a run together. Their errors are independent.

        The errors of their kappas are assumed to be fully correlated, which gives wider bounds.
        """

        def join(one: Parts, more: Parts) -> Parts:
            return Parts(*(np.concatenate(pair) for pair in zip(one, more, strict=True)))

        def ends(mine: tuple[Parts, Parts], theirs: tuple[Parts, Parts]) -> tuple[Parts, Parts]:
            return join(mine[0], theirs[0]), join(mine[1], theirs[1])

        middle = join(self._middle, other._middle)
        return RunLaw(
            middle,
            join(self._low, other._low),
            join(self._high, other._high),
            ends(self._noise_scale_ends, other._noise_scale_ends),
            ends(self._kappa_ends, other._kappa_ends),
            ends(self._extremes, other._extremes),
            middle.gamma if (middle.min_steps > 0).all() else math.nan,
        )

    @property
    def middle(self) -> Sums:
        """S_min and E_min at the value of the noise scale; NaN if it is not resolved."""
        return self._middle.sums

    @property
    def low(self) -> Sums:
        """S_min and E_min with kappa and all noise scales at the lower ends of their bounds."""
        return self._low.sums

    @property
    def high(self) -> Sums:
        """S_min and E_min with kappa and all noise scales at the upper ends of their bounds."""
        return self._high.sums

    @property
    def best_known(self) -> Sums:
        """S_min and E_min at the value of the noise scale, or at its lower end if not resolved."""
        return self.middle if math.isfinite(self.middle.critical_batch_size) else self.low

    @cached_property
    def critical_batch_size(self) -> Bounded:
        """B_crit = E_min/S_min, in examples. It has no upper end if nothing is resolved.

        B_crit is the β at which E_min - β·S_min is zero. The bounds of B_crit are the values of β
        at which the bounds of this difference are zero.
        """
        value = self.middle.critical_batch_size
        if math.isnan(value):
            return Bounded(value, self.low.critical_batch_size, self.high.critical_batch_size)

        def excess(batch_size: float) -> Bounded:
            return self._band(lambda part: part.min_examples - batch_size * part.min_steps)

        return Bounded(
            value,
            _zero(lambda b: excess(b).low, value, 0.5),
            _zero(lambda b: excess(b).high, value, 2.0),
        )

    def steps(self, batch_size: float) -> Bounded:
        """Return the optimizer steps at a global batch of `batch_size` examples."""
        return self._band(lambda part: part.steps(batch_size))

    def _band(self, of: Callable[[Parts], Array]) -> Bounded:
        middle = of(self._middle)
        value = float(middle.sum())
        if math.isnan(value):
            ends = of(self._low), of(self._high)
            low, high = float(np.minimum(*ends).sum()), float(np.maximum(*ends).sum())
            # All noise scales agree about the batch size that the run itself was trained at.
            return Bounded(low if math.isclose(low, high, rel_tol=1e-9) else value, low, high)
        of_each = [of(part) - middle for part in self._noise_scale_ends]
        of_all = [float(of(part).sum()) - value for part in self._kappa_ends]
        down = np.append(np.minimum(*of_each), min(of_all)).clip(max=0)
        up = np.append(np.maximum(*of_each), max(of_all)).clip(min=0)
        # Progress is a share: at each batch size it is between none and all.
        all_or_none = [of(part) for part in self._extremes]
        least, most = (float(end(*all_or_none).sum()) for end in (np.minimum, np.maximum))
        value = min(max(value, least), most)
        low = max(value - math.sqrt(down @ down), least)
        return Bounded(value, low, min(value + math.sqrt(up @ up), most))


def critical_batch_size_over(history: History, start: float, end: float) -> Bounded:
    """Return B_crit of a part of a run, from the noise scale between two steps.

    Raises:
        ValueError: If the run has no such steps.
    """
    span = Segments.of(history.between(start, end))
    return RunLaw.of(span, Bounded(1.0, 1.0, 1.0)).critical_batch_size


def _extremes(run: Segments) -> tuple[Parts, Parts]:
    """Return the sums of a run without noise and without progress, for each of its batch sizes."""
    sizes, which = np.unique(run.batch_size, return_inverse=True)
    steps = np.bincount(which, weights=run.steps).astype(np.float64)
    none = np.zeros_like(steps)
    return Parts(steps, none), Parts(none, steps * sizes)


def _calibrate(progress: Array, kappa: float) -> Array:
    """Return the progress if the noise scale is kappa times as large: 1/(1 + kappa·b/B).

    Estimates outside 0 to 1 follow the tangents, so that errors still cancel in sums.
    """
    if kappa == 1:
        return progress
    share = progress.clip(0.0, 1.0)
    noise = 1 - share
    if kappa == 0:
        return np.where(np.isnan(progress), progress, 1.0)
    if math.isinf(kappa):
        return np.where(noise > 0, 0.0, progress)
    below, above = np.minimum(progress, 0.0), np.maximum(progress - 1, 0.0)
    return np.asarray(share / (share + kappa * noise) + below / kappa + above * kappa)


def _curvature(run: Segments, kappa: float) -> Array:
    """Return the correction -g''(p)·error²/2 of the mean calibrated progress; 0 at kappa = 1.

    Errors of p bias the mean of g(p) = p/(p + kappa·(1 - p)). g bends most at p = 0; the second
    derivative is taken at p = error or above.
    """
    if kappa in (0.0, 1.0) or math.isinf(kappa):
        return np.zeros_like(run.progress)
    at = np.clip(run.progress, run.progress_error, 1.0)
    bend = 2 * kappa * (1 - kappa) / (at + kappa * (1 - at)) ** 3
    return np.asarray(bend * run.progress_error**2 / 2)


def _zero(falling: Callable[[float], float], start: float, factor: float) -> float:
    """Return where a falling function is zero, searching from `start`.

    It is 0 if the function is negative down to a millionth of `start`. It is infinite if the
    function is positive up to a million times `start`.
    """
    sign = 1 if factor > 1 else -1
    if sign * falling(start) <= 0:  # no wider than rounding
        return start
    end = start or 1e-6  # without noise, a millionth of an example
    for _ in range(20 if start else 60):
        end *= factor
        if sign * falling(end) <= 0:
            return float(brentq(falling, *sorted((start, end)), rtol=1e-12))
    return 0.0 if factor < 1 else math.inf
