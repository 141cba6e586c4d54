# SPDX-License-Identifier: Apache-2.0
"""The noise scale of independent batches at fixed weights, from two products of each gradient.

Let g_k be the gradient of batch k, w_k its weight (what its loss is a mean over: examples, or
tokens), and m the weighted mean of the gradients before it, with the weight W. Its error has the
variance τ/w_k. Two products are kept of each batch:

    a_k = g_k·m                               mean: |G|²
    d_k = w_k·W/(W + w_k)·|g_k - m|²          mean: τ

τ times examples over weight is tr(Σ). The d_k are as good as independent. The a_k are not: all
later ones have the error of an early gradient in their m. In v_k = w_k·W, the weights of the mean
of a_k, that error adds up to 2/n of (G·g_k - |G|²) for each gradient. So the mean of a_k has the
variance 4/n times the variance of G·g_k, and the scatter of a_k is at least that. (As a mean of
independent terms it would have a third of it.) Where noise is most of a gradient, this is too wide.

No gradient is kept, and nothing is taken for granted of loss or model: batches are independent
draws, that is all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.ratio_interval import fieller_interval

LEAST = 10
"""The fewest batches whose scatter says something."""


class BatchProducts(NamedTuple):
    """What is kept of the gradient of a batch."""

    weight: float
    """w_k."""
    examples: float
    before: float
    """W: the weights of the batches before it together, more than 0."""
    along: float
    """a_k."""
    deviation: float
    """d_k."""


class IndependentBatches:
    """The noise scale at fixed weights, from the products of batches.

    Args:
        products: Of each batch after the first one.

    Examples:
        >>> batches = IndependentBatches([
        ...     BatchProducts(8, 8, before=8, along=4.0, deviation=16.0),
        ...     BatchProducts(8, 8, before=16, along=4.0, deviation=16.0),
        ... ])
        >>> batches.noise_trace, batches.grad_sq_norm
        (16.0, 4.0)
    """

    def __init__(self, products: list[BatchProducts]) -> None:
        columns = np.array(products, dtype=np.float64).reshape(-1, len(BatchProducts._fields))
        self._weights, self._examples, before, self._along, self._deviations = columns.T
        self._shares = self._weights * before
        self._shares = self._shares / (self._shares.sum() or 1.0)
        self._per_weight = self._examples.sum() / (self._weights.sum() or 1.0)

    @property
    def batches(self) -> int:
        """The number of batches, the first one too."""
        return len(self._along) + 1

    @property
    def noise_traces(self) -> NDArray[np.float64]:
        """The estimates of tr(Σ), one for each batch after the first."""
        traces: NDArray[np.float64] = self._deviations * self._per_weight
        return traces

    @property
    def noise_trace(self) -> float:
        """tr(Σ), of one example."""
        return float(self.noise_traces.mean())

    @property
    def grad_sq_norm(self) -> float:
        """|G|²; it may be negative."""
        return float(self._shares @ self._along)

    @property
    def covariance(self) -> tuple[float, float, float]:
        """Variances and covariance of both: of tr(Σ), of both, of |G|²."""
        count = len(self._along)
        traces, along = self.noise_traces - self.noise_trace, self._along - self.grad_sq_norm
        # Σw/Σw² instead of n where weights differ.
        batches = self._weights.sum() ** 2 / (self._weights @ self._weights) * (1 + 1 / count)
        scatter = 1 / (1 - float(self._shares @ self._shares))
        noise = float(traces @ traces) / (count - 1) / count
        both = float((self._shares * traces) @ along) * scatter * 2 / float(batches)
        signal = float((self._shares * along) @ along) * scatter * 4 / float(batches)
        # Their weights differ, so that few batches may bring it beyond what variances allow.
        most = math.sqrt(noise * signal)
        return noise, min(max(both, -most), most), signal

    @property
    def largest_share(self) -> float:
        """The share that one batch has in the scatter of tr(Σ): near 1 if it is all by chance."""
        squares = (self.noise_traces - self.noise_trace) ** 2
        return float(squares.max() / (squares.sum() or 1.0))

    @property
    def hangs_on_one(self) -> bool:
        """Whether one batch makes so much of the scatter that the interval is a matter of chance.

        A few batches of Gaussian noise always have a largest one, too.
        """
        return self.largest_share > max(0.2, 6 / self.batches)

    @property
    def deviations(self) -> NDArray[np.float64]:
        """The estimates of τ, one for each batch after the first."""
        return self._deviations

    def noise_scale(self, confidence: float = 0.95, unit: str = "examples") -> NoiseScale:
        """Return the noise scale with Fieller's interval; unknown before `LEAST` batches."""
        if self.batches < LEAST:
            return NoiseScale.unknown(confidence, unit, self.batches)
        trace, signal = self.noise_trace, self.grad_sq_norm
        quantile = float(stdtrit(self.batches / 2 - 1, 0.5 + confidence / 2))
        low, high = fieller_interval(trace, signal, self.covariance, quantile)
        value = min(max(trace / signal, low), high) if signal > 0 else math.nan
        return NoiseScale(value, low, high, signal, trace, self.batches, confidence, unit)
