# SPDX-License-Identifier: Apache-2.0
"""The level of |g|² that a step is measured on: a trailing average of the steps before it."""

from __future__ import annotations

from typing import NamedTuple

from noisescale.estimation.moments import GradientMoments

STEPS = 8
"""Steps in the trailing average."""

LARGEST_STEP = 8.0
"""A step's |g|² counts for at most this many times the level.

Without a limit one step would rule the window where |g|² swings manyfold. The cut uses the step's
own |g|², so it biases the ratio of averages wherever noise alone reaches it. Noise in few
directions is skewed and does. The 95 % interval of `RecentSteps` then covers, and its median reads
of the truth (200 steps; `benchmarks/coverage.py --only recent --largest-step ...`):

    cut                           2           4           6           8       none
    2 directions, 2 B      54 % 1.61   90 % 1.11   93 % 1.03   94 % 1.01   95 % 0.99
    the same, t_3          82 % 1.30   95 % 1.02   95 % 0.97   96 % 0.96   96 % 0.96
    2 directions, 8 B      59 % 2.70   89 % 1.19   93 % 0.97   94 % 0.92   94 % 0.87
    the same, 1000 steps          -    76 % 1.51   93 % 1.12   96 % 1.04   96 % 0.99
    the same, t_3          67 % 2.33   92 % 1.22   95 % 1.00   95 % 0.93   96 % 0.86
    5 directions, 8 B      86 % 1.44   94 % 1.02   95 % 1.00   95 % 1.00   95 % 1.00
    100 directions, 8 B    95 % 1.01   95 % 1.01   95 % 1.01   95 % 1.01   95 % 1.01

(2 B is B_simple = 2 B. Where few runs of 200 steps are resolved the median is below 1: it is of
those with a positive |G|².)
"""


class Level(NamedTuple):
    """An exponential average of |g|² over the steps so far.

    |G|² falls, often a hundredfold in a run's first steps. An average of it would remember little
    else for long. So the moments of each step are divided by the average |g|² of the steps
    *before* it: then all steps count alike. That average is known before the step is seen, so a
    ratio of averages stays unbiased.

    The first step is the whole average at first and is remembered for about 20 steps, too long
    where it was a hundred times too large: the steps after it then count little. Intervals cover as
    often either way (95 to 97 % after 12, 20 and 40 steps, with or without a correction for it).

    Example:
        >>> level = Level()
        >>> for grad_sq_norm in (64.0, 16.0, 4.0):
        ...     _, level = level.step(GradientMoments(grad_sq_norm, 0.0), batch_size=4.0)
        >>> relative, _ = level.step(GradientMoments(2.0, noise_trace=40.0), batch_size=4.0)
        >>> relative
        GradientMoments(grad_sq_norm=0.047..., noise_trace=0.94...)
    """

    sq_norm: float = 0.0
    """The trailing average of |g|²; 0 before the first step."""

    def step(
        self, moments: GradientMoments, batch_size: float
    ) -> tuple[GradientMoments | None, Level]:
        """Return a step's moments over the level, and the level of the next step.

        Args:
            moments: The step's two moments, finite, of any sign.
            batch_size: Its global batch size B: its |g|² is |G|² + tr(Σ)/B.

        Returns:
            None for the moments of the first step, which only sets the level.
        """
        sq_norm = moments.grad_sq_norm + moments.noise_trace / batch_size
        if not self.sq_norm:
            # Unequal parts may spoil a step's |g|²: such a step leaves the level alone.
            return None, Level(sq_norm) if sq_norm > 0 else self
        level = max(self.sq_norm, sq_norm / LARGEST_STEP)
        relative = GradientMoments(
            grad_sq_norm=moments.grad_sq_norm / level, noise_trace=moments.noise_trace / level
        )
        if not sq_norm > 0:
            return relative, self
        # One large step would be remembered for tens of steps, which would count little.
        decay = (STEPS - 1) / (STEPS + 1)
        new = min(sq_norm, LARGEST_STEP * self.sq_norm)
        return relative, Level(decay * self.sq_norm + (1 - decay) * new)
