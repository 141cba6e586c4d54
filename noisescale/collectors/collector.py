# SPDX-License-Identifier: Apache-2.0
"""Collector: what every way of capturing gradient norms offers the meter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.window_layout import Weight, WindowLayout
from noisescale.guard import HookErrors

COST_OF_NORMS = 0.125
"""Plain steps that norming each small batch's gradient takes more, see `Collector.cost`.

Measured of 4 micro-batches, on CPU: 0.07 with 256 examples in each, 0.16 with 64.
"""


class Collector(HookErrors, ABC):
    """Squared norms of the small batches of one optimizer step, and of the step's gradient.

    All norms are captured as autograd made them: with the divisor and the loss scale that the
    losses carried. The meter takes both out. A way of training implements what is abstract here,
    and replaces a default where another is true of it.

    Args:
        norms: The parameters measured, and the entries that their norms are summed up in.
        group: The ranks whose rows are summed; None where one process trains.
    """

    nothing_to_compare = (
        "A step of one micro-batch in one process has nothing to be compared with: it is not"
        " measured. Accumulate two or more, use more devices, or compare the halves of each batch:"
        ' `small_batch="half"`.'
    )
    """The warning where a step has one small batch alone."""

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup | None) -> None:
        self.norms = norms
        self.group = group
        self._average = AveragedGradient(norms, group)
        self._watching = True

    @property
    def watching(self) -> bool:
        """Whether the next passes are to be measured: set to False for the steps between."""
        return self._watching

    @watching.setter
    def watching(self, watching: bool) -> None:
        self._watching = watching
        self._look()

    def _look(self) -> None:
        """Look at forward passes while watching, where that is what norms are made of."""

    @property
    def device(self) -> torch.device:
        """Where the norms live."""
        return self.norms.device

    @property
    def coverage(self) -> float:
        """Share of |g|² of what is trained that is measured. Reads the device where it is not 1."""
        return 1.0

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches of a rank that a step needs to be measured."""
        return 1

    @property
    def cost(self) -> float:
        """Plain steps that the next measured step is likely to take more: a constant, not timed.

        So all ranks measure the same steps, and a run that is resumed too.
        """
        return COST_OF_NORMS

    @property
    def averaged_too_often(self) -> bool:
        """Whether `p.grad` mixes local and averaged gradients, so that the step is of no use."""
        return False

    @property
    def gradients_dropped(self) -> bool:
        """Whether `zero_grad` was called since the last pass: the step starts anew."""
        return not self.norms.any_gradient()

    @property
    def reached(self) -> list[bool] | None:
        """For each pass since the last reset whether it came to a measured parameter.

        None where that is not known: then all are taken to have.
        """
        return None

    @property
    def average_captured(self) -> bool:
        """Whether `big_sq_norms` is that of the end of a backward pass."""
        return self._average.captured

    def unhook(self) -> None:
        """Take out the hooks that measured steps alone need: the next step is none.

        `before_backward` puts them back.
        """

    def expect(self, *, rows: int | None, last: bool | None) -> None:
        """Take what is known of the next backward pass, where that matters.

        Args:
            rows: Of its batch, where the size that is counted is another.
            last: Whether the step is taken after it.
        """

    @abstractmethod
    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured.

        Args:
            loss: A scalar, or any tensor of the graph that the pass goes through first.
            size: This rank's examples in it.
            capture_average: Take the step's gradient at the end of this pass, not in
                `big_sq_norms`, because it will be clipped by then.
        """

    @abstractmethod
    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Say what the captured norms are norms of.

        Args:
            sizes: This rank's examples in every backward pass since the last reset.
            loss_divisor: What each loss was divided by.
        """

    @abstractmethod
    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Say so where the step's gradient is a weighted mean over backward passes.

        Args:
            sizes: This rank's examples in every backward pass since the last reset.
            weights: What each mean loss was multiplied by, up to a factor common to all ranks.
        """

    @abstractmethod
    def small_sq_norms(self) -> Tensor | None:
        """Σ|g_part|² over this rank's parts, shape (entries,); None: none to rely on."""

    def big_sq_norms(self) -> Tensor:
        """This rank's share of |g|², shape (entries,): over ranks the shares sum to all of it."""
        return self._average.sq_norms()

    def reset(self) -> None:
        """Begin another step."""
        self._error = None
        self._average.forget()

    @abstractmethod
    def close(self) -> None:
        """Remove all hooks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the first steps found out about the model, in builtins."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, so that it need not be found out again."""
