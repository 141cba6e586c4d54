# SPDX-License-Identifier: Apache-2.0
"""What every way of capturing gradient norms offers the meter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.window import Weight, WindowLayout


class Collector(Protocol):
    """Squared norms of the small batches of one optimizer step and of their average.

    All norms are captured as autograd made them: with the divisor and the loss scale that the
    losses carried. The meter takes both out.
    """

    norms: GradientNorms
    """The parameters measured, and the entries that their norms are summed up in."""
    group: dist.ProcessGroup | None
    """The ranks whose rows are summed; None where one process trains."""

    wanted: bool
    """Whether the next passes are to be measured: set to False for the steps between."""

    @property
    def coverage(self) -> float:
        """Share of |g|² of what is trained that is measured. Reads the device where it is not 1."""

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches of a rank that a step needs to be measured."""

    @property
    def device(self) -> torch.device:
        """Where the norms live."""

    @property
    def averaged_too_often(self) -> bool:
        """Whether `p.grad` mixes local and averaged gradients, so that the step is of no use."""

    @property
    def gradients_dropped(self) -> bool:
        """Whether what the backward passes so far added to has been thrown away."""

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured.

        Args:
            loss: A scalar, or any tensor of the graph that the pass goes through first.
            size: This rank's examples in it.
            capture_average: Take the step's gradient at the end of this pass, not in
                `big_sq_norms`, because it will be clipped by then.
        """

    @property
    def reached(self) -> list[bool] | None:
        """For each pass since the last reset whether it came to a measured parameter.

        None where that is not known: then all are taken to have.
        """

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Say what the captured norms are norms of.

        Args:
            sizes: This rank's examples in every backward pass since the last reset.
            loss_divisor: What each loss was divided by.
        """

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Likewise, where the step's gradient is a weighted mean over backward passes.

        Args:
            sizes: This rank's examples in every backward pass since the last reset.
            weights: What each mean loss was multiplied by, up to a factor common to all ranks.
        """

    def small_sq_norms(self) -> Tensor | None:
        """Σ|g_part|² over this rank's parts, shape (entries,); None: none to rely on."""

    def big_sq_norms(self) -> Tensor:
        """This rank's share of |g|², shape (entries,): over ranks the shares sum to all of it."""

    @property
    def average_captured(self) -> bool:
        """Whether `big_sq_norms` is that of the end of a backward pass."""

    def reset(self) -> None:
        """Begin another step."""

    def close(self) -> None:
        """Remove all hooks."""
