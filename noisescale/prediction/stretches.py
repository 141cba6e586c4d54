# SPDX-License-Identifier: Apache-2.0
"""A run's history as what happened in each stretch of it, with the noise scale of its own time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from noisescale.band import Band
from noisescale.fieller import fieller_interval

Array = NDArray[np.float64]

MOST_BLOCKS = (32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Into so many blocks of consecutive rows a run is cut, the largest number that is good enough."""

FEWEST_ROWS = 8
"""Of a block, as its interval comes from their scatter."""

ENOUGH_RESOLVED = 0.75
"""Share of the blocks that have to be resolved."""


@dataclass(frozen=True)
class Stretches:
    """What happened between one row of a history and the next, as columns of equal length.

    Example:
        >>> history = {"step": np.array([40.0, 100.0]), "examples": np.array([1200.0, 3000.0]),
        ...            "noise_scale": np.array([10.0, 30.0]), "low": np.array([8.0, 20.0]),
        ...            "high": np.array([15.0, np.inf])}
        >>> run = Stretches.of(history)
        >>> run.steps, run.batch_size, run.noise_scale
        (array([40., 60.]), array([30., 30.]), array([10., 20.]))
        >>> run.high
        array([15., inf])
    """

    steps: Array
    """Optimizer steps in each stretch."""
    batch_size: Array
    """Mean global batch size, in examples."""
    noise_scale: Array
    """B_simple; where not resolved the next resolved one, within the bounds; NaN without any."""
    low: Array
    """Lower end of its interval; 0 where nothing was measured."""
    high: Array
    """Upper end of its interval, infinite where it is not resolved."""
    resolved: Array
    """1 where the stretch's own estimate is resolved, else 0."""
    block: NDArray[np.intp]
    """Which of the independent estimates a stretch has its noise scale from."""
    as_logged: bool = False
    """Whether the estimates are those that were logged, which lag, for want of better ones."""

    @classmethod
    def of(cls, history: Mapping[str, Array]) -> Stretches:
        """Cut a history into stretches, each with the noise scale of its own time.

        The estimates that are logged average over what has been: while |G|² falls, often a
        hundredfold in the first steps, they lag and read low. Here the sums of the moments are
        differenced, and blocks of consecutive rows averaged anew, each with Fieller's interval
        from the scatter of its rows: as many blocks as still leave three quarters of them
        resolved. A history without sums, or of fewer than eight rows, is taken as it is, and its
        errors as going together.

        Raises:
            ValueError: If the history has no rows, or its steps do not rise.
        """
        step = history["step"]
        steps = np.diff(step, prepend=0)
        if not step.size or (steps <= 0).any():
            wrong = step[steps <= 0]
            where = f" with {float(wrong[0]):g} out of order" if wrong.size else ""
            raise ValueError(
                f"`history` must have rows of rising `step`, got {step.size} rows{where}."
                " Measure a run with NoiseScaleMonitor first."
            )
        rows = _Rows.of(history)
        block = np.zeros(step.size, dtype=np.intp)
        value, low, high = (history[name] for name in ("noise_scale", "low", "high"))
        as_logged = True
        if rows is not None and step.size >= FEWEST_ROWS:
            own, bands = _blocks(rows, getattr(history, "confidence", 0.95))
            if np.isfinite(bands[2]).any():  # else what was logged may still be resolved
                block, (value, low, high) = own, (x[own] for x in bands)
                as_logged = False
        resolved = np.isfinite(high) & np.isfinite(value)
        low = np.nan_to_num(low, nan=0.0)
        high = np.nan_to_num(high, nan=math.inf, posinf=math.inf)
        return cls(
            steps=steps,
            batch_size=np.diff(history["examples"], prepend=0) / steps,
            noise_scale=np.clip(_next_resolved(value, resolved), low, high),
            low=low,
            high=high,
            resolved=resolved.astype(np.float64),
            block=block,
            as_logged=as_logged,
        )


def noise_scale_at(history: Mapping[str, Array], step: float) -> Band:
    """Return B_simple with its interval at a step of the run.

    Raises:
        ValueError: If the step is not one of the run's.
    """
    run = Stretches.of(history)
    if not 0 <= step <= history["step"][-1]:
        raise ValueError(
            f"`step` must be one of the run's, got {step!r}. It has {history['step'][-1]:,.0f}."
        )
    where = int(np.searchsorted(history["step"], step))
    return Band(*(float(x[where]) for x in (run.noise_scale, run.low, run.high)))


class _Rows(NamedTuple):
    """Sums of what was measured between rows: weights w, and moments times weights."""

    weight: Array
    noise_trace: Array
    grad_sq_norm: Array

    @classmethod
    def of(cls, history: Mapping[str, Array]) -> _Rows | None:
        names = ("sum_weight", "sum_noise_trace", "sum_grad_sq_norm")
        if not all(name in history and np.isfinite(history[name]).all() for name in names):
            return None
        rows = cls(*(np.diff(history[name], prepend=0) for name in names))
        return rows if (rows.weight >= 0).all() else None


def _blocks(rows: _Rows, confidence: float) -> tuple[NDArray[np.intp], tuple[Array, Array, Array]]:
    """The block of each row, and value, low and high of each block."""
    count = len(rows.weight)
    for number in MOST_BLOCKS:
        block = np.arange(count) * number // count
        if count < number * FEWEST_ROWS and number > 1:
            continue
        bands = _bands(rows, block, confidence)
        if np.isfinite(bands[2]).mean() >= ENOUGH_RESOLVED:
            break
    return block, bands


def _bands(rows: _Rows, block: NDArray[np.intp], confidence: float) -> tuple[Array, Array, Array]:
    """The ratio of means in each block, with Fieller's interval from the scatter of its rows.

    The estimator's interval, with rows for steps: see `NoiseScaleEstimator.estimate`.
    """

    def total(values: Array) -> Array:
        return np.bincount(block, weights=values).astype(np.float64)

    weight = np.maximum(total(rows.weight), 1e-300)
    share = rows.weight / weight[block]
    s, q = total(rows.noise_trace) / weight, total(rows.grad_sq_norm) / weight
    # Residuals times shares; rows without weight (nothing comparable in them) have none.
    rs = rows.noise_trace / weight[block] - share * s[block]
    rq = rows.grad_sq_norm / weight[block] - share * q[block]
    squares, fourths = total(share**2), total(share**4)
    value, low, high = np.full_like(s, math.nan), np.zeros_like(s), np.full_like(s, math.inf)
    covariances = np.stack([total(rs * rs), total(rs * rq), total(rq * rq)], axis=1)
    for k in range(len(s)):
        freedom = squares[k] ** 2 / fourths[k] - 1 if fourths[k] else 0.0
        if freedom < 1:
            continue
        covariance = covariances[k] / (1 - squares[k])
        quantile = float(stdtrit(freedom, 0.5 + confidence / 2))
        low[k], high[k] = fieller_interval(float(s[k]), float(q[k]), covariance, quantile)
        value[k] = s[k] / q[k] if q[k] > 0 else math.nan
    return value, low, high


def _next_resolved(value: Array, resolved: NDArray[np.bool_]) -> Array:
    """Replace what is not resolved by the next value that is, at the end by the last one."""
    those = np.flatnonzero(resolved)
    if not those.size:
        return np.full_like(value, math.nan)
    following = np.searchsorted(those, np.arange(value.size)).clip(max=those.size - 1)
    return np.asarray(value[those[following]])
