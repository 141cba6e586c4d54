# SPDX-License-Identifier: Apache-2.0
"""The noise scale of many steps: the ratio of two means of moments, with an interval."""

from __future__ import annotations

import math
from typing import Any, Literal

from noisescale.checks import is_whole, refuse
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.recent import RecentSteps
from noisescale.refusal import Refusal

LARGEST_MOMENT = 1e100
"""A step with a larger moment is left out: the sums of squares would overflow."""


class NoiseScaleEstimator(RecentSteps):
    """Average per-step moments and turn them into the `NoiseScale` of now with its interval.

    The noise scale is a ratio of two means. The moments of a single step are noisy, and may be
    negative; their averages are unbiased. So the estimator averages first, divides last and never
    clamps. It averages over the last measured steps: `RecentSteps` says how, and has `estimate`.

    Args:
        window: Measured steps to average over, at least 2. "auto" takes the steps that say most
            about now: few where the noise scale changes faster than it is measured, many where
            single steps are noisy, and at most those of the last 70 % of the run, or 8. The
            interval then holds the noise scale of now. That of a number of steps holds the mean
            over these.
        confidence: Coverage of the interval, between 0 and 1.
        unit: The unit of batch sizes, for display: "examples", "sequences" or "tokens".

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> estimator = NoiseScaleEstimator(window=100)
        >>> for noise, signal in [(5.0, 0.3), (7.0, 0.2), (6.0, 0.25), (6.5, 0.27)]:
        ...     _ = estimator.update(GradientMoments(grad_sq_norm=signal, noise_trace=noise))
        >>> print(estimator.estimate())
        27.3 examples (95 % 15.4 to 46.8, 3 steps)

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
        check_unit(unit)
        super().__init__(window if window == "auto" else int(window), confidence, unit)

    def update(
        self,
        moments: GradientMoments,
        weight: float = 1.0,
        step: int | None = None,
        *,
        learning_rate: float = math.nan,
    ) -> bool:
        """Add one step's moments. The first step only sets the level of |g|².

        Args:
            moments: The step's two moments. They may be negative.
            weight: The global batch size of the step, in `unit`.
            step: Optimizer steps of the run up to this one, if some are not measured. Default: one
                more than at the last update.
            learning_rate: The step's, if it is known: see `estimate`.

        Returns:
            True if the step was added. False if a moment is not finite (after an overflow, for
            example) or its size is above `LARGEST_MOMENT`; then nothing changes.

        Raises:
            ValueError: If `weight` is not positive and finite.
        """
        if not 0 < weight < math.inf:
            raise Refusal(
                "weight", "be positive and finite", repr(weight), "Pass the batch size, or 1."
            )
        if not all(abs(moment) <= LARGEST_MOMENT for moment in moments):
            return False
        floats = GradientMoments(*map(float, moments))
        self.add(floats, float(weight), step, learning_rate=learning_rate)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs, in lists and floats."""
        return {"window": self.window, "unit": self.unit, "recent": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. If an error is raised, nothing is changed.

        Raises:
            ValueError: If the state was saved with another `window` or `unit`, or is damaged.
            KeyError: If an entry is missing in the state.
        """
        if state["window"] != self.window:
            raise Refusal(
                "window",
                "be the one that the state was saved with",
                f"{self.window!r}; the saved averages are over {state['window']!r} steps",
                "Restore the earlier `window`, or start new averages.",
            )
        if state["unit"] != self.unit:
            raise Refusal(
                "unit",
                "be the one that the state was saved with",
                f"{self.unit!r}; the saved averages are in {state['unit']}",
                "Restore the earlier `unit` and `batch_size_fn`, or start new averages.",
            )
        super().load_state_dict(state["recent"])


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
