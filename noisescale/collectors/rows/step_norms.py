# SPDX-License-Identifier: Apache-2.0
"""StepNorms: the result of one measured step, for every way of training."""

from __future__ import annotations

import math
from typing import NamedTuple

from noisescale.estimation.moments import GradientMoments, gradient_moments

ROWS_WITHOUT_LOSS = -math.inf
"""A mark in place of the norm of halves if many rows have no loss: no norm is negative."""


class StepNorms(NamedTuple):
    """Squared gradient norms of one optimizer step, over all ranks."""

    small_sq_norm: float
    """Weighted mean of |g_part|² over the parts."""
    big_sq_norm: float
    """|g|² of the average over the parts, before clipping."""
    small_batch: float
    """Effective examples behind a part, 1/Σ(w/n), see `effective_batch_sizes`."""
    big_batch: float
    """Effective examples behind the average, 1/Σ(w²/n). Those of the step, if its loss is one mean
    over what the weights count, see `WindowLayout.over_step`."""
    examples: float
    """Examples behind the step, over all ranks: its global batch size."""
    weighted: bool = False
    """Whether parts weigh differently; then `small_sq_norm` may well be the smaller of the two."""
    bad_weights: bool = False
    """Whether the weights are all zero, not finite, or given on some ranks alone."""

    @property
    def alone(self) -> bool:
        """Whether the step had only one part, so that there is nothing to compare.

        Both sizes are then equal but for rounding: weights on the device have 32 bits.
        """
        return 0 < self.big_batch <= self.small_batch * (1 + 1e-6)

    @property
    def lacks_losses(self) -> bool:
        """Whether so many rows have no loss that the halves of the batch mislead."""
        return self.small_sq_norm == ROWS_WITHOUT_LOSS

    @property
    def comparable(self) -> bool:
        """Whether there are parts to compare, all of them finite and with examples."""
        sums = self.small_sq_norm + self.big_sq_norm + self.small_batch + self.big_batch
        return math.isfinite(sums) and self.small_batch > 0 and not self.alone

    @property
    def identical_parts(self) -> bool:
        """Whether all parts had the same gradient, to float32 precision.

        Different examples never have the same gradient. It happens with equal data on all ranks, or
        if a capture came too late and saw the average on every rank.
        """
        if self.weighted:
            return False
        return self.big_sq_norm > 0 and self.small_sq_norm <= self.big_sq_norm * (1 + 3e-6)

    @property
    def pair_share(self) -> float:
        """1 - Σw²: the share of the products of two different parts in the weights of |g|²."""
        return 1 - self.small_batch / self.big_batch

    def moments(self, pair_share: float | None = None) -> GradientMoments:
        """Return the step's estimates of |G|² and tr(Σ).

        Args:
            pair_share: What the products of different parts are divided by for |G|². Where weights
                vary this is the mean over steps, see `PairShares`. Default: the step's own.
        """
        own = gradient_moments(
            self.small_sq_norm,
            self.big_sq_norm,
            small_batch=self.small_batch,
            big_batch=self.big_batch,
        )
        if pair_share is None:
            return own
        signal = own.grad_sq_norm * (self.pair_share / pair_share)
        return GradientMoments(signal, self.big_batch * (self.big_sq_norm - signal))
