# SPDX-License-Identifier: Apache-2.0
"""The norm of the step's gradient, computed in shares by the ranks that all hold it.

It is taken at the end of the last backward pass. Whatever clips, scales or unscales `p.grad` until
the optimizer steps then changes nothing. What is done to `p.grad` before is checked now and then.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.own_pass import measuring
from noisescale.guard import HookErrors, keeps_errors


@dataclass
class _Seen:
    """What was seen of `p.grad` in one backward pass, see `AveragedGradient.current_sq_norms`."""

    begun: bool = False
    announced: Tensor | None = None
    """The share when the pass was announced."""
    before: Tensor | None = None
    """The share at the beginning of the pass.

    `zero_grad` may have been called after the announcement, or passes may have run (GradCache).
    """
    after: Tensor | None = None
    """The share at the end of the pass."""
    gradients: tuple[int, ...] = ()
    """The ids of all `p.grad` at the end of the pass."""


class AveragedGradient(HookErrors):
    """|g|² of the gradient in `p.grad`, or of this rank's share of it.

    All ranks of data parallelism hold the same average, so each norms 1/W of its rows and the
    shares are summed with the small norms: a step reads (1 + 1/W) x the gradient instead of 2 x.
    """

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup | None) -> None:
        self._norms = norms
        rank, self._ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self._share = share_of(norms.parameters, rank, self._ranks)
        self._passes: list[_Seen] = []
        self.checking = False
        """Whether to look at `p.grad` at the beginning of each pass and at its end."""
        self.came: set[int] = set()
        """Parameters, by index, whose gradients came since the step began."""
        self.gone: set[int] = set()
        """Parameters, by index, whose gradients came and were gone at the end of a pass."""

    @property
    def captured(self) -> bool:
        """Whether `sq_norms` was captured at the end of the last pass."""
        return bool(self._passes) and self._passes[-1].after is not None

    def sq_norms(self) -> Tensor:
        """Return this rank's share, shape (entries,): as captured, or as `p.grad` is now.

        Raises:
            Exception: The error of the capture, if it failed.
        """
        self.raise_error_of_hook()
        captured = self._passes[-1].after if self._passes else None
        return self.current_sq_norms() if captured is None else captured

    def before_backward(self, loss: Tensor, *, capture: bool) -> None:
        """Arrange for the norms to be captured at the end of the pass from `loss`, if wanted."""
        self._passes.append(one := _Seen())
        if self.checking:
            one.announced = self.current_sq_norms()
        if (capture or self.checking) and loss.requires_grad:
            loss.register_hook(partial(self._on_backward_start, one))

    def end_pass(self, came: set[int]) -> None:
        """Note the parameters, by index, whose gradients came in a pass, and which are gone."""
        self.came |= came
        self.gone |= {index for index in came if self._norms.parameters[index].grad is None}

    def changes(
        self, reached: Sequence[bool] | None, first: tuple[int, Tensor] | None
    ) -> Tensor | None:
        """Return what was done to `p.grad` until the last pass ended, see `Changes`.

        Args:
            reached: For each pass whether it reached a parameter. Between other passes `p.grad` may
                be reset. None: all did.
            first: A pass that found no gradient, and Σ|g|² of what came in it; None: not known.

        Returns:
            Squared norms, shape (3,): what there was before the first pass, what changed between
            passes, and what was not made by the pass `first`. None if the step is not checked.
        """
        whole = self._norms.partition
        counting = [True] * len(self._passes) if reached is None else reached
        passes = [one for one, here in zip(self._passes, counting, strict=True) if here]
        sums = [
            [norms[:whole].sum() for norms in (one.announced, one.before, one.after)]
            for one in passes
            if one.announced is not None and one.before is not None and one.after is not None
        ]
        if not sums or len(sums) < len(passes):
            return None
        stale = torch.minimum(*sums[0][:2])
        between = within = torch.zeros_like(stale)
        for (_, _, then), (announced, now, _) in pairwise(sums):
            between = between + torch.minimum((announced - then).abs(), (now - then).abs())
        if first is not None and (after := self._passes[first[0]].after) is not None:
            within = (first[1][:whole].sum() - after[:whole].sum()).abs()
        return torch.stack([stale, between, within])

    def change_since_passes(self) -> Tensor | None:
        """Return what was done to this share of |g|² since the last pass ended; None: unchecked."""
        if not self._passes or self._passes[-1].after is None:
            return None
        whole = self._norms.partition
        return (self.current_sq_norms()[:whole].sum() - self._passes[-1].after[:whole].sum()).abs()

    def forget(self) -> None:
        """Begin another step."""
        self._passes = []
        self.came, self.gone = set(), set()
        self._error = None

    @keeps_errors
    def _on_backward_start(self, one: _Seen, _: Tensor) -> None:
        if one.begun or measuring():
            return
        one.begun = True
        if self.checking:
            one.before = self.current_sq_norms()
        # Callbacks run first in, first out, and DDP's, which writes the averages, is queued when
        # its last bucket is ready: one that is queued by a callback queued early comes after it.
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        queue_callback(lambda: queue_callback(partial(self._capture, one)))

    @keeps_errors
    def _capture(self, one: _Seen) -> None:
        one.after = self.current_sq_norms()
        one.gradients = self._ids_of_gradients()

    @property
    def replaced(self) -> bool:
        """Whether other tensors are in `p.grad` than when the last pass ended, where captured."""
        last = self._passes[-1] if self._passes else _Seen()
        return last.after is not None and last.gradients != self._ids_of_gradients()

    def _ids_of_gradients(self) -> tuple[int, ...]:
        return tuple(id(p.grad) for p in self._norms.parameters)

    def current_sq_norms(self) -> Tensor:
        """Return this rank's share as `p.grad` is now, shape (entries,)."""
        pieces = []
        for index, start, stop in self._share:
            p = self._norms.parameters[index]
            if p.grad is None or not p.requires_grad:
                self.gone |= {index} & self.came if p.requires_grad else set()
                continue
            if p.grad.is_sparse:  # its rows cannot be cut: the rank with the first takes them all
                if start == 0:
                    pieces.append(Piece(index, p.grad))
            elif p.dim() == 0 or stop - start == p.shape[0]:
                pieces.append(Piece(index, p.grad))
            else:
                rows = slice(start, stop)
                pieces.append(Piece(index, p.grad[rows], rows))
        return self._norms.sums(self._norms.compute_share(pieces, self._ranks))


class AveragedPieces(AveragedGradient):
    """|g|² where each rank has some pieces of the gradient, each on a known number of ranks."""

    def current_sq_norms(self) -> Tensor:
        """Return this rank's share as gradients are now, shape (entries,)."""
        return self._norms.sums(self._norms.compute(self._pieces()))

    @abstractmethod
    def _pieces(self) -> Iterator[Piece]:
        """Yield this rank's pieces of the averaged gradients."""


def share_of(parameters: list[Parameter], rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """Cut all parameters, laid end to end, into `ranks` runs of rows; return the run of one rank.

    A row (an index of the first dimension, so that a run of them is a view whatever the layout)
    goes to the rank whose interval holds its first element. The cut depends only on shapes and
    order, so every rank makes the same cut.

    Returns:
        Triples of a parameter's index, its first row and the one after the last.
    """
    total = sum(p.numel() for p in parameters)

    def first_row(of_rank: int, offset: int, rows: int, row: int) -> int:
        """Return the first row that starts where the interval of that rank does, or later."""
        elements = Fraction(of_rank * total, ranks) - offset
        return min(max(math.ceil(elements / row), 0), rows)

    share: list[tuple[int, int, int]] = []
    offset = 0
    for index, p in enumerate(parameters):
        if p.numel():
            rows = p.shape[0] if p.dim() else 1
            start, stop = (first_row(r, offset, rows, p.numel() // rows) for r in (rank, rank + 1))
            if start < stop:
                share.append((index, start, stop))
            offset += p.numel()
    return share
