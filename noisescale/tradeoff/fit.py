# SPDX-License-Identifier: Apache-2.0
"""Fit the law of steps against batch size to a sweep, with errors and a check of the law."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.special import fdtrc, stdtrit

from noisescale.bounded import Bounded
from noisescale.checks import check_confidence
from noisescale.refusal import Refusal
from noisescale.tradeoff.profile import STEPS_SCATTER, profiled_critical_batch_size
from noisescale.tradeoff.run_sums import Array
from noisescale.tradeoff.tradeoff import Floats, Tradeoff

DOUBTFUL = 0.05
"""Below this probability that the law alone explains the sweep a fit warns."""

LARGE_RESIDUAL = 0.15
"""Root mean square of the logarithmic residuals above which a fit warns: about 15 % of steps."""

_FARTHEST = 14.0
"""S_min and E_min are sought up to e^14, a million times, below what the sweep saw."""


class RelativeErrors(NamedTuple):
    """Standard errors of the logarithms: 0.05 is 5 % of the value. NaN for a `few` batch sizes."""

    min_steps: float
    min_examples: float
    critical_batch_size: float


_NO_ERRORS = RelativeErrors(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class TradeoffFit(Tradeoff):
    """A `Tradeoff` fitted to a sweep, see `fit_tradeoff`."""

    batch_sizes: tuple[float, ...] = ()
    """Of the sweep, global, in examples."""
    measured_steps: tuple[float, ...] = ()
    """Steps to the goal at each of them."""
    log_residuals: tuple[float, ...] = ()
    """log(measured) - log(fitted) at each: 0.1 is about 10 % more steps than the law predicts."""
    relative_errors: RelativeErrors = _NO_ERRORS
    sharpness: float = math.nan
    """The α of S_min·(1 + (B_crit/B)^α)^(1/α) that fits best; the law has α = 1."""
    p_value: float = math.nan
    """The probability that α improves the fit this much if the law holds (F-test)."""

    @property
    def rms_log_residual(self) -> float:
        """Root mean square of the logarithmic residuals."""
        return float(np.sqrt(np.mean(np.square(self.log_residuals))))

    @property
    def few(self) -> bool:
        """Whether there are fewer than four batch sizes, however often each was run."""
        return len(set(self.batch_sizes)) < 4

    def critical_batch_size_band(self, confidence: float = 0.95) -> Bounded:
        """Return B_crit with its interval, see `bands`."""
        return self.bands(confidence)["critical_batch_size"]

    def bands(self, confidence: float = 0.95) -> dict[str, Bounded]:
        """Return S_min, E_min and B_crit with Student's intervals of their logarithms.

        Two or three batch sizes are too few to estimate errors. Their steps are assumed to scatter
        by `STEPS_SCATTER`, and B_crit has its profile interval, which may be open. Repeated runs do
        not narrow it: they share a learning rate, and may be the same training.
        """
        check_confidence(confidence)
        if self.few:
            return self._profiled(confidence)
        quantile = float(stdtrit(len(self.batch_sizes) - 2, 0.5 + confidence / 2))

        def band(name: str) -> Bounded:
            value, error = getattr(self, name), getattr(self.relative_errors, name)
            return Bounded(
                value, value * math.exp(-quantile * error), value * math.exp(quantile * error)
            )

        return {name: band(name) for name in RelativeErrors._fields}

    def _profiled(self, confidence: float) -> dict[str, Bounded]:
        sizes, steps = (np.array(x) for x in (self.batch_sizes, self.measured_steps))
        repeats = len(sizes) / len(np.unique(sizes))
        scatter = max(STEPS_SCATTER, self.rms_log_residual) * math.sqrt(repeats)
        critical = profiled_critical_batch_size(sizes, steps, scatter, confidence=confidence)
        error = float(stdtrit(1e9, 0.5 + confidence / 2)) * scatter / math.sqrt(len(sizes))

        def ends(at_critical: Callable[[float], float]) -> tuple[float, float]:
            both = sorted(map(at_critical, (critical.low, critical.high)))
            return both[0] * math.exp(-error), both[1] * math.exp(error)

        def least_steps(beta: float) -> float:
            if math.isinf(beta):
                return 0.0
            return math.exp(float(np.log(steps / (1 + beta / sizes)).mean()))

        def least_examples(beta: float) -> float:
            if math.isinf(beta):
                return math.exp(float(np.log(steps * sizes).mean()))
            return beta * least_steps(beta)

        return {
            "min_steps": Bounded(self.min_steps, *ends(least_steps)),
            "min_examples": Bounded(self.min_examples, *ends(least_examples)),
            "critical_batch_size": Bounded(self.critical_batch_size, critical.low, critical.high),
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Signs in the residuals that the law does not hold, in whole sentences."""
        found = []
        if self.p_value < DOUBTFUL:
            bend = "more sharply" if self.sharpness > 1 else "more gently"
            found.append(
                f"The steps bend {bend} than the law: an exponent of {self.sharpness:.2f} instead"
                f" of 1 fits better (p = {self.p_value:.2g}). Tune the learning rate at every batch"
                " size, or do not trust the fit beyond the sweep."
            )
        if self.rms_log_residual > LARGE_RESIDUAL:
            found.append(
                f"The steps scatter by {100 * self.rms_log_residual:.0f} % around the law. Tune the"
                " learning rate at every batch size and average several seeds."
            )
        return tuple(found)


def fit_tradeoff(batch_sizes: Floats, steps: Floats) -> TradeoffFit:
    """Fit steps = S_min·(1 + B_crit/B) to the steps that reach one goal at several batch sizes.

    Steps range over decades, and their scatter is a share of them. So the fit minimises
    the squares of

        log(steps) - log(S_min + E_min/B)

    With linear residuals the smallest batch sizes would dominate, which determine S_min poorly.

    Args:
        batch_sizes: Global, in examples, shape (n,); several runs of one batch size may be given.
        steps: Optimizer steps to the goal, of well-tuned runs, shape (n,).

    Returns:
        The trade-off with standard errors, residuals, and a test of the law against a bend of
        other sharpness, S_min·(1 + (B_crit/B)^α)^(1/α).

    Raises:
        ValueError: If there are fewer than two batch sizes, a value is not positive and finite, or
            the steps show only one end of the law: the other end is then not determined.

    Warns:
        UserWarning: If the residuals show that the law does not hold, see `warnings`.

    Examples:
        >>> fit = fit_tradeoff([16, 32, 64, 128, 256], [720, 405, 242, 168, 131])
        >>> f"{fit.min_steps:.0f} {fit.min_examples:.0f} {fit.critical_batch_size:.1f}"
        '91 9983 110.1'

    References:
        McCandlish et al. 2018, arXiv:1812.06162, equation 2.11. Zhang et al. 2024,
        arXiv:2410.21676, for fits in log space.
    """
    batch, count = checked_sweep(batch_sizes, steps)
    logs = np.log(batch), np.log(count)
    start = np.array([logs[1].min() - 0.5, (logs[0] + logs[1]).min() - 0.5])
    least = start - _FARTHEST
    law = least_squares(
        _residuals, start, bounds=(least, np.inf), args=logs, xtol=1e-14, ftol=1e-14, gtol=1e-14
    )
    for value, lowest, end, remedy in (
        (law.x[0], least[0], "perfect scaling", "Add larger batch sizes."),
        (law.x[1], least[1], "steps that no longer fall", "Add smaller batch sizes."),
    ):
        if value - lowest < 2:
            raise Refusal(
                "steps",
                "show both ends of the law",
                f"{end} at all batch sizes from {batch.min():g} to {batch.max():g}",
                remedy,
            )
    sharpness, p_value = _test_of_the_law(law.x, law.fun, logs)
    fit = TradeoffFit(
        min_steps=math.exp(law.x[0]),
        min_examples=math.exp(law.x[1]),
        batch_sizes=tuple(batch.tolist()),
        measured_steps=tuple(count.tolist()),
        log_residuals=tuple(law.fun.tolist()),
        relative_errors=(
            _relative_errors(law.jac, law.fun) if len(np.unique(batch)) > 3 else _NO_ERRORS
        ),
        sharpness=sharpness,
        p_value=p_value,
    )
    for text in fit.warnings:
        warnings.warn(text, stacklevel=2)
    return fit


def _residuals(parameters: Array, log_batch: Array, log_steps: Array) -> Array:
    """log(steps) minus the law's; parameters log S_min, log E_min and, maybe, log α."""
    alpha = np.exp(parameters[2]) if len(parameters) > 2 else 1.0
    excess = parameters[1] - parameters[0] - log_batch  # log of B_crit/B
    return np.asarray(log_steps - parameters[0] - np.logaddexp(0, alpha * excess) / alpha)


def _relative_errors(jacobian: Array, residuals: Array) -> RelativeErrors:
    variance = float(residuals @ residuals) / (len(residuals) - 2)
    covariance = np.linalg.inv(jacobian.T @ jacobian) * variance
    contrast = np.array([-1.0, 1.0])  # log B_crit = log E_min - log S_min
    variances = (covariance[0, 0], covariance[1, 1], contrast @ covariance @ contrast)
    return RelativeErrors(*(math.sqrt(x) for x in variances))


def _test_of_the_law(
    law: Array, residuals: Array, logs: tuple[Array, Array]
) -> tuple[float, float]:
    """Sharpness of the bend that fits best, and the p-value of the law against it."""
    degrees_of_freedom = len(residuals) - 3
    unexplained = float(residuals @ residuals)
    exact = unexplained < 1e-20 * len(residuals)
    if degrees_of_freedom < 1 or len(np.unique(logs[0])) < 4 or exact:
        return math.nan, math.nan
    # An α of e^±3 is a corner, or a straight line: beyond it nothing changes.
    bounds = ([-np.inf, -np.inf, -3.0], [np.inf, np.inf, 3.0])
    bent = least_squares(_residuals, [*law, 0.0], bounds=bounds, args=logs)
    left = max(float(bent.fun @ bent.fun), 1e-300)
    ratio = max(unexplained - left, 0.0) / (left / degrees_of_freedom)
    return float(np.exp(bent.x[2])), float(fdtrc(1, degrees_of_freedom, ratio))


def checked_sweep(batch_sizes: Floats, steps: Floats) -> tuple[Array, Array]:
    """Return both as arrays, or raise a ValueError if they cannot be a sweep."""
    batch, count = (np.asarray(x, dtype=np.float64) for x in (batch_sizes, steps))
    if batch.shape != count.shape or batch.ndim != 1:
        raise Refusal(
            ("batch_sizes", "steps"),
            "be one-dimensional and equally long",
            f"shapes {batch.shape} and {count.shape}",
            "Give the steps to the goal for each batch size.",
        )
    for name, values in (("batch_sizes", batch), ("steps", count)):
        wrong = ~((values > 0) & (values < math.inf))
        if wrong.any():
            where = int(np.argmax(wrong))
            raise Refusal(
                name,
                "be positive and finite",
                f"{values[where]} at position {where}",
                "Leave out runs that did not reach the goal.",
            )
    if len(sizes := np.unique(batch)) < 2:
        raise Refusal(
            "batch_sizes",
            "have two values at least",
            len(sizes),
            "Two determine the law, four and more can also contradict it.",
        )
    return batch, count
