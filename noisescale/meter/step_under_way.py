# SPDX-License-Identifier: Apache-2.0
"""What was said of the optimizer step under way, a backward pass at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from noisescale.collectors.collector import Collector
from noisescale.collectors.rows.window_layout import Weight, WindowLayout
from noisescale.guard import RefusalError


class BackwardPass(NamedTuple):
    """What was said of one backward pass, see `NoiseScaleMeter.before_backward`."""

    size: float
    weight: Weight | None
    batch: int | None


@dataclass
class StepUnderWay:
    """One optimizer step, from its first backward pass until it is taken."""

    due: bool
    """Whether it is to be measured."""
    passes: list[BackwardPass] = field(default_factory=list)
    spoiled: bool = False
    """Whether it is left out, because nobody can say what is in it."""

    @property
    def repeats_a_batch(self) -> bool:
        """Whether several passes were of one batch."""
        batches = [one.batch for one in self.passes if one.batch is not None]
        return len(set(batches)) < len(batches)

    def keep(self, reached: Sequence[bool] | None) -> None:
        """Keep the passes that reached a measured parameter; None: that is not known.

        Passes of another optimizer's loss, that left these parameters alone, do not count.
        """
        if reached is None or any(one.weight is not None for one in self.passes):
            return
        pairs = zip(self.passes, reached, strict=True)
        self.passes = [one for one, here in pairs if here]

    def layout(self, collector: Collector, loss_divisor: float | None) -> WindowLayout:
        """Say what the norms that were captured of it are norms of.

        Args:
            collector: That captured them.
            loss_divisor: See `NoiseScaleMeter.step`.

        Raises:
            RefusalError: If some passes have a weight and others have none.
        """
        sizes = [one.size for one in self.passes]
        weights = [one.weight for one in self.passes if one.weight is not None]
        if not weights:
            return collector.layout(sizes, loss_divisor or len(sizes))
        if len(weights) == len(sizes):
            return collector.weighted_layout(sizes, weights)
        raise RefusalError(
            "`weight` must be given for all backward passes of a step or for none, got"
            f" {len(weights)} for {len(sizes)} passes. Pass 1 for those that count once."
        )
