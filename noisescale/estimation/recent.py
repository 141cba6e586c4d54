# SPDX-License-Identifier: Apache-2.0
"""The present noise scale: the last steps, each relative to its own level of |g|²."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisescale.checks import check_confidence
from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.ratio_interval import WeightedMeans, steps_needed

_FEWEST_STEPS = 8
"""The number of steps in the shortest window."""


class RecentSteps:
    """Estimate the present noise scale from as few of the last steps as suffice.

    |G|² falls, often a hundredfold in the first steps of a run. A trailing ratio of averages then
    shows an earlier noise scale. Here the moments of each step are divided by the trailing |g|² of
    the steps before it, see `Level`. So all steps in the window count the same.

    The window has n = (4·cv/width)² steps, rounded up to a power of two. cv is the scatter of
    single steps (from successive differences) divided by their mean; see `NoiseScaleEstimator`.
    A decision needs less precision than a log, and less lag.

    Args:
        most_steps: The number of steps that are kept.
        relative_width: The width, (high - low)/value, of the interval that the window aims at.
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
        most_steps: int = 1024,
        relative_width: float = 1.0,
        confidence: float = 0.95,
        unit: str = "examples",
    ) -> None:
        check_confidence(confidence)
        self._relative_width = relative_width
        self._confidence = confidence
        self._unit = unit
        # Rows of batch size, tr(Σ) and |G|², both over |g|². Full, it is moved to the front.
        self._rows = np.empty((2 * most_steps, 3))
        self._end = 0
        self._most_steps = most_steps
        self._level = Level()

    def __len__(self) -> int:
        return min(self._end, self._most_steps)

    @property
    def _steps(self) -> NDArray[np.float64]:
        """The last steps, shape (steps, 3)."""
        return self._rows[self._end - len(self) : self._end]

    def add(self, moments: GradientMoments, weight: float) -> None:
        """Add one step. The first step only sets the level.

        Args:
            moments: The step's two moments. They must be finite, and may be negative.
            weight: The global batch size of the step.
        """
        relative, self._level = self._level.step(moments, weight)
        if relative is not None:
            self.add_relative(relative, weight)

    def add_relative(self, relative: GradientMoments, weight: float) -> None:
        """Add one step whose moments are relative to a level already."""
        if self._end == len(self._rows):
            self._keep(self._steps)
        self._rows[self._end] = weight, relative.noise_trace, relative.grad_sq_norm
        self._end += 1

    def estimate(self, *, least: float = 0.0) -> NoiseScale:
        """Return the noise scale of the last steps. Both moments are relative to |g|².

        Args:
            least: Steps to use at least, as far as there are as many.
        """
        if len(self) < 2:
            return NoiseScale.unknown(self._confidence, self._unit, steps=len(self))
        rows = self._steps[-max(self._window(self._steps), math.ceil(least)) :]
        weight, noise, signal = rows.T
        share = weight / weight.sum()
        # No matrix products: ranks have to agree, and BLAS rounds as its kernel for the CPU does.
        _, noise_trace, grad_sq_norm = (share[:, None] * rows).sum(axis=0).tolist()
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
        return NoiseScale.of(means, self._confidence, self._unit)

    def _window(self, rows: NDArray[np.float64]) -> int:
        """Return the number of last steps to use."""
        weight, noise, signal = rows.T
        mean_noise, mean_signal = ((weight * x).sum() / weight.sum() for x in (noise, signal))
        if mean_signal <= 0 or mean_noise <= 0:
            return len(rows)
        of_ratio = noise - mean_noise / mean_signal * signal
        # A step of weight w has variance C/w, a difference C·(1/w₁ + 1/w₂).
        precision = weight[1:] * weight[:-1] / (weight[1:] + weight[:-1])
        variance = float((precision * np.diff(of_ratio) ** 2).mean() / weight.mean())
        needed = steps_needed(variance / mean_noise**2, self._relative_width)
        window = _FEWEST_STEPS
        while window < needed:
            window *= 2
        return min(window, len(rows))

    def _keep(self, steps: NDArray[np.float64]) -> None:
        self._rows[: len(steps)] = steps
        self._end = len(steps)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs, in builtin types."""
        return {"level": self._level.sq_norm, "steps": self._steps.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._level = Level(state["level"])
        self._keep(np.reshape(state["steps"], (-1, 3))[-self._most_steps :])
