# SPDX-License-Identifier: Apache-2.0
"""The noise scale of now: the last steps, each on its own level of |G|²."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from noisescale.checks import check_confidence
from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.ratio_interval import WeightedMeans, steps_needed

_FEWEST_STEPS = 8
"""Steps of the shortest window."""


class RecentSteps:
    """Answer what the noise scale is now, from as few of the last steps as suffice.

    |G|² falls, often a hundredfold in a run's first steps, and a trailing ratio of averages tells
    what the noise scale was. Here the moments of each step are divided by the trailing |g|² of the
    steps before it, see `Level`. So the ratio is a mean over the window in which all steps count
    alike.

    The window has n = (4·cv/width)² steps, rounded up to a power of two, where cv is the scatter
    of single steps (from successive differences) over their mean; see `NoiseScaleEstimator`.
    Decisions need less precision than a log does, and all the less lag.

    Args:
        most_steps: How many are kept.
        relative_width: Of the interval, (high - low)/value, that the window is sized for.
        confidence: Coverage of the interval.
        unit: What a batch size counts, for display.

    Raises:
        ValueError: If `confidence` is not between 0 and 1.

    Example:
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
        """Add one step. The first one only sets the level.

        Args:
            moments: The step's two moments, finite, of any sign.
            weight: Its global batch size.
        """
        relative, self._level = self._level.step(moments, weight)
        if relative is not None:
            if self._end == len(self._rows):
                self._keep(self._steps)
            self._rows[self._end] = weight, relative.noise_trace, relative.grad_sq_norm
            self._end += 1

    def estimate(self) -> NoiseScale:
        """Return the noise scale of the last steps. Its two moments are relative to |g|²."""
        if len(self) < 2:
            return NoiseScale.unknown(self._confidence, self._unit, steps=len(self))
        rows = self._steps[-self._window(self._steps) :]
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
        """How many of the last steps to answer from."""
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
        """Return everything `load_state_dict` needs, in builtins."""
        return {"level": self._level.sq_norm, "steps": self._steps.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._level = Level(state["level"])
        self._keep(np.reshape(state["steps"], (-1, 3))[-self._most_steps :])
