# SPDX-License-Identifier: Apache-2.0
"""Fit the law of steps against batch size to a sweep that shows both of its ends."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from noisescale.bounded import Bounded
from noisescale.refusal import Refusal
from noisescale.tradeoff.regimes import Regimes, find_regimes
from noisescale.tradeoff.tradeoff import Floats, Tradeoff

LARGE_RESIDUAL = 0.15
"""Root mean square of the logarithmic residuals above which a fit warns: about 15 % of steps."""


@dataclass(frozen=True)
class TradeoffFit(Tradeoff):
    """A `Tradeoff` fitted to a sweep, see `fit_tradeoff`."""

    batch_sizes: tuple[float, ...] = ()
    """The batch sizes of the sweep: global, in examples."""
    measured_steps: tuple[float, ...] = ()
    """Steps to the goal at each of them."""
    exponent: float | None = None
    """The α that was given; None: it was fitted."""

    @property
    def log_residuals(self) -> tuple[float, ...]:
        """log(measured) - log(fitted) at each: 0.1 is about 10 % more steps than the law has."""
        measured, fitted = self.measured_steps, self.steps(np.array(self.batch_sizes))
        return tuple(np.log(measured / fitted).tolist())

    @property
    def rms_log_residual(self) -> float:
        """Root mean square of the logarithmic residuals."""
        return float(np.sqrt(np.mean(np.square(self.log_residuals))))

    def regimes(self, confidence: float = 0.95) -> Regimes:
        """Return the law with its bounds, and where its regimes meet."""
        return find_regimes(
            self.batch_sizes, self.measured_steps, confidence=confidence, exponent=self.exponent
        )

    def critical_batch_size_band(self, confidence: float = 0.95) -> Bounded:
        """Return B_crit with its interval, which may be open."""
        return self.regimes(confidence).critical_batch_size

    @property
    def warnings(self) -> tuple[str, ...]:
        """Signs that predictions from this law may be wrong, in whole sentences."""
        found, sharpness = [], find_regimes(self.batch_sizes, self.measured_steps).sharpness
        if self.exponent is None and not sharpness.low <= 1 <= sharpness.high:
            bend = "more sharply" if sharpness.value > 1 else "more gently"
            found.append(
                f"The steps bend {bend} than the law of the gradient noise: the exponent is"
                f" {sharpness.value:.2f} ({sharpness.low:.2f} to {sharpness.high:.2f}) instead of"
                " 1. Tune the learning rate at every batch size, or do not trust predictions from"
                " the noise scale beyond the sweep."
            )
        if self.rms_log_residual > LARGE_RESIDUAL:
            found.append(
                f"The steps scatter by {100 * self.rms_log_residual:.0f} % around the law. Tune the"
                " learning rate at every batch size and average several seeds."
            )
        return tuple(found)


def fit_tradeoff(
    batch_sizes: Floats, steps: Floats, *, exponent: float | None = None
) -> TradeoffFit:
    """Fit steps = S_min·(1 + (B_crit/B)^α)^(1/α) to the steps to one goal at several batch sizes.

    Steps range over decades, and their scatter is a share of them. So the logarithms of the steps
    are fitted. With linear residuals the smallest batch sizes would dominate, which determine
    S_min poorly. McCandlish et al. derived α = 1, and a sweep has to contradict it, see
    `noisescale.tradeoff.regimes.find_regimes`, which also gives the intervals.

    Args:
        batch_sizes: Global, in examples, shape (n,); several runs of one batch size may be given.
        steps: Optimizer steps to the goal, of well-tuned runs, shape (n,).
        exponent: α, from 0.1 to 10. 1 is the published law, whose fits it repeats. Default: α is
            fitted.

    Returns:
        The trade-off with its residuals; `regimes` has the intervals.

    Raises:
        ValueError: If there are fewer than two batch sizes, a value is not positive and finite, or
            the steps show only one end of the law: the other end is then not determined.

    Warns:
        UserWarning: If α is not 1, or the residuals are large, see `warnings`.

    Examples:
        >>> fit = fit_tradeoff([16, 32, 64, 128, 256], [720, 405, 242, 168, 131])
        >>> f"{fit.min_steps:.0f} {fit.min_examples:.0f} {fit.critical_batch_size:.1f}"
        '93 10086 109.0'

    References:
        McCandlish et al. 2018, arXiv:1812.06162, equation 2.11. Zhang et al. 2024,
        arXiv:2410.21676, for fits in log space.
    """
    found = find_regimes(batch_sizes, steps, exponent=exponent)
    critical = found.critical_batch_size.value
    if critical in (0, math.inf):
        end, remedy = "steps that no longer fall", "Add smaller batch sizes."
        if critical:
            end, remedy = "perfect scaling", "Add larger batch sizes."
        raise Refusal(
            "steps",
            "show both ends of the law",
            f"{end} at all batch sizes from {min(found.batch_sizes):g} to"
            f" {max(found.batch_sizes):g}",
            remedy,
        )
    fit = TradeoffFit(
        min_steps=found.min_steps.value,
        min_examples=found.min_examples.value,
        sharpness=found.sharpness.value,
        batch_sizes=found.batch_sizes,
        measured_steps=found.measured_steps,
        exponent=exponent,
    )
    for text in fit.warnings:
        warnings.warn(text, stacklevel=2)
    return fit
