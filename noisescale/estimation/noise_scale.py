# SPDX-License-Identifier: Apache-2.0
"""The noise scale with its interval, as a record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Self

from noisescale.estimation.ratio_interval import WeightedMeans


@dataclass(frozen=True)
class NoiseScale:
    """The simple gradient noise scale B_simple = tr(Σ)/|G|², with its confidence interval.

    Examples:
        >>> print(NoiseScale(19.13, 15.2, 24.81, grad_sq_norm=0.1, noise_trace=1.913, steps=200))
        19.1 examples (95 % 15.2 to 24.8, 200 steps)
        >>> print(NoiseScale(math.nan, 310.4, math.inf, -0.1, noise_trace=40.0, steps=50))
        above 310 examples (only a lower bound yet, 95 %, 50 steps)
    """

    value: float
    """B_simple in `unit`, within its interval; NaN while the averaged |G|² is not positive."""
    low: float
    """Lower end of the confidence interval, in `unit`."""
    high: float
    """Upper end of the interval; infinite while |G|² cannot be distinguished from zero."""
    grad_sq_norm: float
    """|G|²: `noise_trace` over the noise scale; may be negative while that is not resolved."""
    noise_trace: float
    """tr(Σ), averaged over steps; may be negative if it is small."""
    steps: float
    """Effective number of measured steps in the averages: 1/Σw² of their weights."""
    confidence: float = 0.95
    unit: str = "examples"
    first_step: int | None = None
    """The optimizer step of the first measurement in the averages; None if it is not known."""

    @classmethod
    def of(cls, means: WeightedMeans, confidence: float, unit: str) -> Self:
        """Return the noise scale of averaged moments. The moments may be negative."""
        return cls(
            *means.ratio_interval(confidence),
            means.grad_sq_norm,
            means.noise_trace,
            1 / means.sq_share,
            confidence,
            unit,
        )

    @classmethod
    def unknown(cls, confidence: float = 0.95, unit: str = "examples", steps: float = 0.0) -> Self:
        """Return the noise scale before two steps were measured: an interval without bounds."""
        return cls(math.nan, 0.0, math.inf, math.nan, math.nan, steps, confidence, unit)

    @property
    def resolved(self) -> bool:
        """Whether the interval has an upper end. If it has none, only `low` is known."""
        return math.isfinite(self.high)

    def efficiency(self, batch_size: float) -> float:
        """Return the progress per example at `batch_size`, relative to tiny batches.

        It is B_simple/(B_simple + B), between 0 and 1; NaN while `value` is NaN.
        """
        if self.value == batch_size == 0:
            return math.nan
        return self.value / (self.value + batch_size)

    def short(self) -> str:
        """Return a few characters for a progress bar: "19.1", ">310" or "?"."""
        if self.resolved:
            return three_digits(self.value)
        return f">{three_digits(self.low)}" if self.low > 0 else "?"

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the value in bold, then the interval."""
        value, _, how_sure = str(self).partition(" (")
        small = f" <small>({escape(how_sure)}</small>" if how_sure else ""
        return f"<b>{escape(value)}</b>{small}"

    def __str__(self) -> str:
        level = f"{self.confidence * 100:.3g} %"
        steps = f"{self.steps:.0f} step{'' if round(self.steps) == 1 else 's'}"
        if self.resolved:
            return (
                f"{three_digits(self.value)} {self.unit}"
                f" ({level} {three_digits(self.low)} to {three_digits(self.high)}, {steps})"
            )
        if self.steps == 0:
            return "not measured yet"
        if self.low <= 0:
            return f"not known at {level} after {steps}"
        bound = f"above {three_digits(self.low)} {self.unit}"
        return f"{bound} (only a lower bound yet, {level}, {steps})"


def three_digits(value: float) -> str:
    """Format a number with three digits, or as an integer from 100 on: 19.1 or 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
