# SPDX-License-Identifier: Apache-2.0
"""Collector: the base class of all ways of capturing gradient norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from noisescale.batches.row_groups import RowGroups
from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.changes import Changes
from noisescale.collectors.coordinates import Coordinates
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.group_levels import GroupedPass, WithinBatch
from noisescale.collectors.rows.step_rows import NOTHING_BESIDE, Beside, MeasuredStep, Unread
from noisescale.collectors.rows.window_layout import (
    Weight,
    WindowLayout,
    layout_of_parts,
    weighted_layout,
)
from noisescale.collectors.steps_apart import StepsApart
from noisescale.guard import HookErrors
from noisescale.state import State

COST_OF_NORMS = 0.125
"""Cost, in plain steps, of the norms of all small batches' gradients, see `Collector.cost`.

Measured of 4 micro-batches, on CPU: 0.07 with 256 examples in each, 0.16 with 64.
"""


COST_OF_A_PASS = 0.75
"""The cost of a backward pass of our own, in plain steps."""

ACCUMULATE = "Accumulate two or more micro-batches"
"""The remedy of lone micro-batches, in all warnings. A trainer has words of its own for it."""


class Collector(HookErrors, State, ABC):
    """Squared norms of the small batches of one optimizer step, and of the step's gradient.

    All norms are captured as autograd made them: with the divisor and the loss scale of the losses.
    The meter takes both out. A subclass for a way of training implements the abstract methods, and
    overrides the defaults that do not fit it. In a measured step the meter calls `expect` and
    `before_backward` at each pass, then `small_sq_norms`, `big_sq_norms`, `layout`, `reset`. Hooks
    are under `keeps_errors`, and put what came into `_average.came`. The state is what the first
    steps learned about the model. The class's name without "Collector" is `way` in the run's log.

    Args:
        norms: The parameters measured, and the entries that their norms are summed up in.
        group: The ranks whose rows are summed; None where one process trains.
    """

    nothing_to_compare = (
        "A step of one micro-batch in one process has nothing to be compared with: it is not"
        " measured."
    )
    """The warning if a step has only one small batch."""

    how_to_compare = (
        f"{ACCUMULATE}, use more devices, or compare the halves of each batch:"
        ' `small_batch="half"`.'
    )
    """The remedy then."""

    cost_in_groups = 0.0
    """What a measured step takes beside `cost` if groups of rows are given, in plain steps."""

    same_gradient = (
        "All ranks or micro-batches had the same gradient. Such steps are not measured. Give each"
        " rank (by a `DistributedSampler`) and each micro-batch its own examples. If inputs are"
        " drawn at random, give each rank its own seed."
    )
    """The warning if all small batches have one gradient."""

    divides_losses = False
    """Whether an engine divides losses by the passes of a step, after they are heard."""

    compares: str = "ranks"
    """What is compared within a step, see `StepsApart`."""

    least_micro_batches: int = 1
    """Micro-batches of a rank that a step needs to be measured."""
    sharing: int = 1
    """The ranks of the group that have one batch, as they hold one model together: those of tensor
    parallelism. Their norms are parts of one norm."""

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup | None) -> None:
        self.norms = norms
        self.group = group
        self._average = AveragedGradient(norms, group)
        self._apart: StepsApart | None = None
        if isinstance(norms.coordinates, Coordinates):
            ranks = 1 if group is None else dist.get_world_size(group)
            self._apart = StepsApart(norms, norms.coordinates, ranks, self.compares)
        self._watching = True
        self._hooks: dict[int, RemovableHandle] = {}
        """Hooks on parameters, by the index of the parameter."""
        self.may_be_unscaled = False
        """Whether a GradScaler may unscale `p.grad` before the step is closed."""

    @property
    def watching(self) -> bool:
        """Whether the next passes are to be measured. Set it to False in steps that are not."""
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
    def beside_rows(self) -> Sequence[Unread]:
        """What the host reads together with measured steps."""
        return ()

    @property
    def withheld(self) -> str:
        """Why the noise scale of the steps so far is withheld, by what the host has read; or ""."""
        return "" if self._apart is None else self._apart.withheld

    @property
    def last_warning(self) -> str:
        """The last warning that this way of measuring gave of its own; ""."""
        return ""

    @property
    def follows(self) -> bool:
        """Whether `end_step` is to be called, also in a step that is not measured."""
        return self._apart is not None and self._apart.follows

    @property
    def needs_pairs(self) -> bool:
        """Whether successive steps are to be measured, as rows may be alike."""
        return self._apart is not None and self._apart.suspects_rows

    def end_step(self, sizes: Sequence[float], *, measured: bool) -> None:
        """Learn that the optimizer is about to step, after passes of these sizes."""
        if self._apart is not None:
            self._apart.end_step(sizes, measured=measured)

    def next_word(self) -> Beside:
        """Return what the row of a measured step says of an earlier one."""
        return NOTHING_BESIDE if self._apart is None else self._apart.next_word()

    def take(self, step: MeasuredStep) -> None:
        """Receive a measured step that was read."""
        if self._apart is not None:
            self._apart.take(step)

    @property
    def cost(self) -> float:
        """The likely extra cost of the next measured step, in plain steps: a constant.

        What is timed is set against it: see `Pace`.
        """
        return COST_OF_NORMS * (1 + sum(extra.cost for extra in self.norms.extra))

    @property
    def averaged_too_often(self) -> bool:
        """Whether `p.grad` mixes local and averaged gradients, so that the step is of no use."""
        return False

    @property
    def small_norms_are_late(self) -> bool:
        """Whether `small_sq_norms` reads `p.grad` as it is now, and not at the end of a pass."""
        return False

    @property
    def gradients_dropped(self) -> bool:
        """Whether `zero_grad` was called since the last pass, so that the step starts again."""
        return not self.norms.any_gradient()

    @property
    def gradients_replaced(self) -> bool:
        """Whether other tensors are in `p.grad` than when the last pass ended."""
        return self._average.replaced

    @property
    def reached(self) -> list[bool] | None:
        """Whether each pass since the last reset reached a measured parameter.

        None if that is not known: then all passes count as having reached one.
        """
        return None

    @property
    def left_alone(self) -> bool:
        """Whether the step since the last reset was left out as it had fewer passes than others."""
        return False

    @property
    def average_captured(self) -> bool:
        """Whether `big_sq_norms` was captured at the end of a backward pass."""
        return self._average.captured

    @property
    def captures_freely(self) -> bool:
        """Whether `capture_average` costs a norm and no more, so that it may be asked for often."""
        return True

    def check_next_passes(self, checking: bool) -> None:
        """Check in this step whether `p.grad` is what the passes made, see `changes`."""
        self._average.checking = checking

    @property
    def changes(self) -> Changes:
        """What was done to `p.grad` until the end of the last pass, as far as it was checked."""
        average = self._average
        sq_norms = average.changes(self.reached, self._first_pass) if average.checking else None
        return Changes(sq_norms, len(average.gone), self._in_pieces)

    @property
    def _first_pass(self) -> tuple[int, Tensor] | None:
        """A pass that found no gradient, and Σ|g|² of what came in it; None: not known."""
        return None

    @property
    def _in_pieces(self) -> bool:
        """Whether passes within a pass brought gradients in pieces that cannot be measured."""
        return False

    @property
    def names_of_gone(self) -> list[str]:
        """Parameters whose gradients came in a pass and were gone at its end, in this step."""
        return [self.norms.names[index] for index in sorted(self._average.gone)]

    def unhook(self) -> None:
        """Remove the hooks that only measured steps need, before a step that is not measured.

        `before_backward` puts them back.
        """
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def expect(
        self,
        *,
        rows: int | None,
        last: bool | None,
        row_weights: Tensor | None = None,
        row_groups: RowGroups | None = None,
    ) -> None:
        """Receive what is known about the next backward pass.

        Args:
            rows: Rows of its batch, if the counted size differs.
            last: Whether the optimizer steps after it.
            row_weights: What each row has in the mean that the loss is, if that is known.
            row_groups: The groups of rows that are not independent of each other, if there are any.
        """

    @abstractmethod
    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured.

        Args:
            loss: A scalar, or any tensor of the graph that the pass goes through first.
            size: This rank's examples in it.
            capture_average: Take the step's gradient at the end of this pass, not in
                `big_sq_norms`, because it may be clipped by then.
        """

    def _ends_of_parts(self, passes: int) -> Sequence[int]:
        """Return the passes up to the end of each part. By default the rank itself is the part."""
        return [passes]

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Return what the captured norms are norms of.

        Args:
            sizes: This rank's examples in every backward pass since the last reset.
            loss_divisor: What each loss was divided by.
        """
        return layout_of_parts(sizes, self._ends_of_parts(len(sizes)), loss_divisor)

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Return the layout of a step whose gradient is a weighted mean over backward passes.

        Args:
            sizes: This rank's examples in every backward pass since the last reset.
            weights: What each mean loss was multiplied by. Only ratios matter, over all ranks.
        """
        return weighted_layout(sizes, self._ends_of_parts(len(sizes)), weights)

    @abstractmethod
    def small_sq_norms(self) -> Tensor | None:
        """Return Σ|g_part|² over this rank's parts, shape (entries,); None if not reliable."""

    def within_groups(self) -> WithinBatch | None:
        """Return the halves within groups of a batch of this rank since the last reset, if any."""
        return None

    def variance_of_split(self, passes: Sequence[GroupedPass]) -> Tensor | None:
        """Return the variance of a step's gradient whose micro-batches share groups of rows.

        Shape (entries,), as captured. None if it is not known. Called once a step, before
        `within_groups`.
        """
        return None

    def big_sq_norms(self) -> Tensor:
        """Return this rank's share of |g|², shape (entries,). Summed over ranks it is |g|²."""
        return self._average.sq_norms()

    def reset(self) -> None:
        """Begin another step."""
        self._error = None
        self._average.forget()
        self.norms.begin_step()

    def close(self) -> None:
        """Remove all hooks."""
        self.unhook()
        self.reset()
