# SPDX-License-Identifier: Apache-2.0
"""The level of a step: the trailing average of |g|² over the steps before it."""

from __future__ import annotations

from typing import NamedTuple

from noisescale.estimation.moments import GradientMoments

STEPS = 8
"""Steps in the trailing average."""

LARGEST_STEP = 8.0
"""The |g|² of a step counts at most as this multiple of the level.

Without a limit, one step could dominate the window of a run in which |g|² varies manyfold. The
limit depends on the step's own |g|², so it biases the ratio of averages wherever noise alone
reaches the limit. Noise in few directions is skewed and does reach it. The table has the coverage
of the 95 % interval of `RecentSteps`, and the median estimate as a multiple of the true value
(200 steps; `benchmarks/accuracy/coverage.py --only recent --largest-step ...`):

    cut                           2           4           6           8       none
    2 directions, 2 B      54 % 1.61   90 % 1.11   93 % 1.03   94 % 1.01   95 % 0.99
    the same, t_3          82 % 1.30   95 % 1.02   95 % 0.97   96 % 0.96   96 % 0.96
    2 directions, 8 B      59 % 2.70   89 % 1.19   93 % 0.97   94 % 0.92   94 % 0.87
    the same, 1000 steps          -    76 % 1.51   93 % 1.12   96 % 1.04   96 % 0.99
    the same, t_3          67 % 2.33   92 % 1.22   95 % 1.00   95 % 0.93   96 % 0.86
    5 directions, 8 B      86 % 1.44   94 % 1.02   95 % 1.00   95 % 1.00   95 % 1.00
    100 directions, 8 B    95 % 1.01   95 % 1.01   95 % 1.01   95 % 1.01   95 % 1.01

(2 B means B_simple = 2 B. The median is below 1 where few runs of 200 steps are resolved: it is
taken over the runs with a positive |G|².)
"""


class Level(NamedTuple):
    """An exponential average of |g|² over the steps so far.

    |G|² falls, often a hundredfold in the first steps of a run. For a long time these steps would
    dominate an average of |G|². So the moments of each step are divided by the average |g|² of the
    steps *before* it, and all steps count the same. This average is known before the step is
    measured, so a ratio of averages remains unbiased.

    At first, the average is the first step alone. That step has an influence for about 20 steps. If
    its |g|² is a hundred times too large, the next steps count little. Intervals cover as often
    with a correction for this as without (95 to 97 % after 12, 20 and 40 steps).

    Examples:
        >>> level = Level()
        >>> for grad_sq_norm in (64.0, 16.0, 4.0):
        ...     _, level = level.step(GradientMoments(grad_sq_norm, 0.0), batch_size=4.0)
        >>> relative, _ = level.step(GradientMoments(2.0, noise_trace=40.0), batch_size=4.0)
        >>> relative
        GradientMoments(grad_sq_norm=0.047..., noise_trace=0.94...)
    """

    sq_norm: float = 0.0
    """The trailing average of |g|²; 0 before the first step."""

    def divisor(self, moments: GradientMoments, batch_size: float) -> float | None:
        """Return the level that a step's moments are divided by; None before there is one."""
        sq_norm = moments.grad_sq_norm + moments.noise_trace / batch_size
        return max(self.sq_norm, sq_norm / LARGEST_STEP) if self.sq_norm else None

    def step(
        self, moments: GradientMoments, batch_size: float
    ) -> tuple[GradientMoments | None, Level]:
        """Return a step's moments divided by the level, and the level for the next step.

        Args:
            moments: The step's two moments. They must be finite, and may be negative.
            batch_size: Global batch size B of the step: |g|² = |G|² + tr(Σ)/B.

        Returns:
            The relative moments and the next level. The first step only sets the level: its
            relative moments are None.
        """
        sq_norm = moments.grad_sq_norm + moments.noise_trace / batch_size
        level = self.divisor(moments, batch_size)
        if level is None:
            # Unequal parts may spoil a step's |g|²: such a step leaves the level alone.
            return None, Level(sq_norm) if sq_norm > 0 else self
        relative = GradientMoments(
            grad_sq_norm=moments.grad_sq_norm / level, noise_trace=moments.noise_trace / level
        )
        if not sq_norm > 0:
            return relative, self
        # One large step would be remembered for tens of steps, which would count little.
        decay = (STEPS - 1) / (STEPS + 1)
        new = min(sq_norm, LARGEST_STEP * self.sq_norm)
        return relative, Level(decay * self.sq_norm + (1 - decay) * new)
