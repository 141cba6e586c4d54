# SPDX-License-Identifier: Apache-2.0
"""The one record that every way of training is reduced to, a step at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

from noisescale.moments import GradientMoments, effective_batch_sizes, gradient_moments


class StepNorms(NamedTuple):
    """Squared gradient norms of one optimizer step, over all ranks."""

    small_sq_norm: float
    """Mean over the parts of |g_part|²."""
    big_sq_norm: float
    """|g|² of the average over the parts, before clipping."""
    parts: int
    """Parts that were averaged: the ranks of data parallelism, or one process's micro-batches."""
    sum_inverse_sizes: float
    """Σ 1/n over the parts, in 1/examples."""
    examples: float
    """Examples behind the step, over all ranks: its global batch size."""

    @property
    def comparable(self) -> bool:
        """Whether there are parts to compare, all of them finite and with examples."""
        sums = self.small_sq_norm + self.big_sq_norm + self.sum_inverse_sizes
        return self.parts > 1 and math.isfinite(sums)

    @property
    def identical_parts(self) -> bool:
        """Whether all parts had one and the same gradient, to float32 precision.

        Different examples never do that. Equal data on all ranks does, and so does a capture
        that came too late and saw the average on every rank.
        """
        return self.big_sq_norm > 0 and self.small_sq_norm <= self.big_sq_norm * (1 + 3e-6)

    def moments(self) -> GradientMoments:
        """The step's estimates of |G|² and tr(Σ)."""
        small_batch, big_batch = effective_batch_sizes(self.sum_inverse_sizes, self.parts)
        return gradient_moments(
            self.small_sq_norm, self.big_sq_norm, small_batch=small_batch, big_batch=big_batch
        )
