# SPDX-License-Identifier: Apache-2.0
"""The noise scale of many steps: running averages of the two moments, with an interval."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from noisescale.checks import check_confidence, is_whole, refuse
from noisescale.estimation.averages import Average, Scatter
from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.ratio_interval import steps_needed

AUTO_WINDOWS = tuple(2**k for k in range(3, 15))
"""The lengths, in steps, of the windows that `window="auto"` keeps side by side."""

_LEAST_MEMORY = AUTO_WINDOWS.index(64)
"""Index of the shortest window from which "auto" takes the scatter of single steps."""

LARGEST_MOMENT = 1e100
"""A step with a larger moment is left out: the sums of squares would overflow."""

AUTO_RELATIVE_WIDTH = 0.5
""""auto" aims at an interval of this relative width, (high - low)/value."""


class NoiseScaleEstimator:
    """Average per-step moments and turn them into a `NoiseScale` with its interval.

    The noise scale is a ratio of two means. The moments of a single step are noisy, and may be
    negative; their averages are unbiased. So the estimator averages first, divides last and never
    clamps. The interval is Fieller's for a ratio of two correlated means. Its sandwich covariance
    remains valid when steps with different noise share one average, as after a change of the batch
    size.

    The averages are exponential, and debiased when they are read. A window of n steps has the
    effective weight of n equal steps (1/Σw² = n). While fewer than n steps were measured, all of
    them count.

    Args:
        window: Measured steps to average over, at least 2. "auto" keeps averages over 2³ to 2¹⁴
            steps and answers from the shortest window that is expected to give an interval of
            relative width 0.5. The expectation comes from the scatter of single steps, over 64
            steps or more and always over more steps than the window has. The interval itself
            must not choose the window: this would favour windows that are narrow by luck, and
            the interval would cover the true value too rarely.
        confidence: Coverage of the interval, between 0 and 1.
        unit: The unit of batch sizes, for display: "examples", "sequences" or "tokens".

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> estimator = NoiseScaleEstimator(window=100)
        >>> for noise, signal in [(5.0, 0.3), (7.0, 0.2), (6.0, 0.25), (6.5, 0.27)]:
        ...     _ = estimator.update(GradientMoments(grad_sq_norm=signal, noise_trace=noise))
        >>> print(estimator.estimate())
        24.1 examples (95 % 15.2 to 38.8, 4 steps)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A. Fieller 1954, "Some problems in
        interval estimation". White 1980, for the sandwich covariance.
    """

    def __init__(
        self,
        window: int | Literal["auto"] = "auto",
        confidence: float = 0.95,
        unit: str = "examples",
    ) -> None:
        check_window(window)
        check_confidence(confidence)
        check_unit(unit)
        self.window = window
        self.confidence = confidence
        self.unit = unit
        lengths = AUTO_WINDOWS if window == "auto" else (int(window),)
        self._lengths = [float(steps) for steps in lengths]
        # With the decay (n-1)/(n+1) the weights of an exponential average have 1/Σw² = n.
        self._decays = [(n - 1) / (n + 1) for n in self._lengths]
        self._averages = [Average()] * len(lengths)
        self._scatter = Scatter.empty(len(lengths))
        self._scatter_decays = Scatter.decays(np.array(self._decays))

    def update(self, moments: GradientMoments, weight: float = 1.0) -> bool:
        """Add one step's moments.

        Args:
            moments: The step's two moments. They may be negative.
            weight: Relative weight of the step. It must not depend on the step's gradients, or
                the averages become biased. The global batch size is a good weight: a larger batch
                measures |G|² more precisely.

        Returns:
            True if the step was added. False if a moment is not finite (after an overflow, for
            example) or its size is above `LARGEST_MOMENT`; then nothing changes.

        Raises:
            ValueError: If `weight` is not positive and finite.
        """
        if not 0 < weight < math.inf:
            raise ValueError(
                f"`weight` must be positive and finite, got {weight!r}. Pass the batch size, or 1."
            )
        if not all(abs(moment) <= LARGEST_MOMENT for moment in moments):
            return False
        moments, weight = GradientMoments(*map(float, moments)), float(weight)  # not of numpy
        self._averages = [
            average.after(moments, weight, decay)
            for average, decay in zip(self._averages, self._decays, strict=True)
        ]
        self._scatter = self._scatter.after(moments, weight, self._scatter_decays)
        return True

    def estimate(self) -> NoiseScale:
        """Return the noise scale after the last step. Without data it is unknown; no error."""
        if self._averages[-1].weight == 0:
            return NoiseScale.unknown(self.confidence, self.unit)
        average = self._averages[self._chosen_window()]
        return NoiseScale.of(average.means, self.confidence, self.unit)

    def _chosen_window(self) -> int:
        """Return the index of the shortest window that is expected to suffice, or of the longest.

        The scatter for a window of n steps is taken over 2n steps, or 64 if that is more. So no
        window is chosen by its own steps alone.
        """
        last, needed = len(self._lengths) - 1, math.inf
        for k in range(last):
            if k == 0 or k >= _LEAST_MEMORY:
                memory = min(max(k + 1, _LEAST_MEMORY), last)
                squared_variation = self._scatter.squared_variation(memory)
                needed = steps_needed(squared_variation, AUTO_RELATIVE_WIDTH)
            if self._scatter.effective_weight(k) >= needed:
                return k
        return last

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs, in lists and floats."""
        return {
            "lengths": list(self._lengths),
            "unit": self.unit,
            "averages": {
                name: np.array([getattr(average, name) for average in self._averages]).tolist()
                for name in Average._fields
            },
            "scatter": {
                "level": self._scatter.level.sq_norm,
                "last": list(self._scatter.last),
                "sums": self._scatter.sums.tolist(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. If an error is raised, nothing is changed.

        Raises:
            ValueError: If the state was saved with another `window` or `unit`, or is damaged.
            KeyError: If an entry is missing in the state.
        """
        if state["lengths"] != self._lengths:
            raise ValueError(
                f"`window` must be the one that the state was saved with, got {self.window!r}; the"
                f" saved averages are over {[int(n) for n in state['lengths']]} steps."
                " Restore the earlier `window`, or start new averages."
            )
        if state["unit"] != self.unit:
            raise ValueError(
                f"`unit` must be the one that the state was saved with, got {self.unit!r}; the"
                f" saved averages are in {state['unit']}. Restore the earlier `unit` and"
                " `batch_size_fn`, or start new averages."
            )
        windows = len(self._lengths)
        columns = [
            np.array(state["averages"][name], np.float64).reshape(windows, *np.shape(none)).tolist()
            for name, none in Average()._asdict().items()
        ]
        averages = [Average(*values) for values in zip(*columns, strict=True)]
        scatter = Scatter.empty(windows)
        if "sums" in (saved := state["scatter"]):  # 0.1 sized the window from raw moments
            sums = np.reshape(np.array(saved["sums"], dtype=np.float64), scatter.sums.shape)
            weight, noise, signal = saved["last"]
            scatter = Scatter(Level(saved["level"]), (weight, noise, signal), sums)
        self._averages, self._scatter = averages, scatter


def check_window(window: int | Literal["auto"]) -> None:
    """Raise a ValueError unless an estimator can average over `window`."""
    if window != "auto" and (not is_whole(window) or window < 2):
        remedy = 'With "auto" the estimator chooses the window from the noise.'
        refuse("window", 'be "auto" or at least 2 steps', repr(window), remedy)


def check_unit(unit: object) -> None:
    """Raise a ValueError unless `unit` is a word."""
    if not (isinstance(unit, str) and unit):
        remedy = 'Name the unit of batch sizes, for example "examples".'
        refuse("unit", "be a word", repr(unit), remedy)
