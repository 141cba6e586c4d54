# SPDX-License-Identifier: Apache-2.0
"""Gradients that nobody averages over ranks before the optimizer steps.

Each rank steps on its own, or the optimizer averages in its step, as that of nanochat. A measured
step averages them for its own sake: one more all-reduce of the gradient, in buckets of a few MB, of
which each rank norms its share. Training is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.batches.to_device import to_device
from noisescale.collectors.averaged_gradient import share_of
from noisescale.collectors.changes import Changes
from noisescale.collectors.collector import Collector
from noisescale.collectors.gradient_norms import GradientNorms, Norms, Piece
from noisescale.guard import keeps_errors

_BUCKET = 2**22
"""Most elements that are reduced at once, if a parameter is not larger."""


class UnaveragedCollector(Collector):
    """Squared norms of this rank's gradient, and of its share of the mean of all ranks' gradients.

    Args:
        norms: See `Collector`.
        group: The ranks.
    """

    cost = 0.5
    """Cost, in plain steps, of one more all-reduce of the gradient and of its norms."""
    captures_freely = False
    """A capture is a collective, in which all ranks have to take part."""

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup) -> None:
        super().__init__(norms, group)
        rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        share = share_of(norms.parameters, rank, self._ranks)
        self._rows_of = {index: slice(start, stop) for index, start, stop in share}
        self._buckets = list(self._cut())
        self._captured = False
        """Whether the last pass ended with the collectives, whatever came of them."""
        self._found: tuple[Tensor, Tensor] | None = None
        self._changes: Changes | None = None

    @property
    def changes(self) -> Changes:
        """What was done to `p.grad` until the norms were taken: an optimizer may have stepped."""
        return super().changes if self._changes is None else self._changes

    @property
    def small_norms_are_late(self) -> bool:
        """Whether `small_sq_norms` reads `p.grad` as it is now, and not at the end of a pass."""
        return not self._captured

    @property
    def average_captured(self) -> bool:
        """Whether the norms were taken at the end of a backward pass."""
        return self._captured

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the norms to be taken at the end of this pass, if they are wanted there.

        Otherwise they are taken when the step is closed.
        """
        self._begin()
        self._average.before_backward(loss, capture=False)  # for its checks
        if capture_average and loss.requires_grad:
            loss.register_hook(self._on_backward_start)

    def small_sq_norms(self) -> Tensor | None:
        """Return |g_rank|². The collectives come first, so that no rank is left waiting in them."""
        if not self._captured:
            self._look_for_late_changes()
            self._measure()
        self.raise_error_of_hook()
        return self._norms_of_step()[0]

    def big_sq_norms(self) -> Tensor:
        """Return this rank's share of |g|², as `small_sq_norms` found it."""
        return self._norms_of_step()[1]

    def reset(self) -> None:
        """Begin another step."""
        super().reset()
        self._begin()

    @keeps_errors
    def _on_backward_start(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    @keeps_errors
    def _on_backward_end(self) -> None:
        self._captured = True
        self._measure()

    def _begin(self) -> None:
        self._captured, self._found, self._changes = False, None, None

    @keeps_errors
    def _look_for_late_changes(self) -> None:
        """Compare `p.grad` with what the last pass left, in a step that is checked."""
        found = super().changes
        late = None if self.may_be_unscaled else self._average.change_since_passes()
        if found.sq_norms is not None and late is not None:
            stale, between, within = found.sq_norms
            self._changes = found._replace(sq_norms=torch.stack([stale, between + late, within]))

    def _norms_of_step(self) -> tuple[Tensor, Tensor]:
        assert self._found is not None, "small_sq_norms comes first"
        return self._found

    def _measure(self) -> None:
        """Average the gradients as they are, and norm them.

        The other ranks are in the same collectives. So an error in between is kept, and no
        collective is left out.
        """
        norms = []
        for indices in self._buckets:
            mean = self._pack(indices)
            if mean is None:
                mean = self._unknown(indices)
            dist.all_reduce(mean, group=self.group)
            norms.append(self._norms_of(mean, indices))
        self._found = self._sums(norms)

    def _cut(self) -> Iterator[list[int]]:
        """Cut the parameters into runs of one dtype: the same on all ranks, wherever layers are."""
        bucket: list[int] = []
        size = 0
        for index, p in enumerate(self.norms.parameters):
            if bucket and (
                size + p.numel() > _BUCKET or p.dtype != self.norms.parameters[bucket[0]].dtype
            ):
                yield bucket
                bucket, size = [], 0
            bucket.append(index)
            size += p.numel()
        if bucket:
            yield bucket

    @keeps_errors
    def _pack(self, indices: list[int]) -> Tensor:
        """Return this rank's gradients of a bucket in one row, divided by the number of ranks."""
        gradients = [_flat_gradient(self.norms.parameters[index]) for index in indices]
        return torch.cat([to_device(g, self.device) for g in gradients]).div_(self._ranks)

    def _unknown(self, indices: list[int]) -> Tensor:
        """Return NaN in place of unknown gradients. All ranks then leave the step out."""
        parameters = [self.norms.parameters[index] for index in indices]
        return torch.full(
            (sum(p.numel() for p in parameters),),
            math.nan,
            dtype=_wide(parameters[0]),
            device=self.device,
        )

    @keeps_errors
    def _norms_of(self, mean: Tensor, indices: list[int]) -> Norms:
        """Return the norms of this rank's share of a mean gradient."""
        parameters = [self.norms.parameters[index] for index in indices]
        gradients = mean.split([p.numel() for p in parameters])
        pieces = []
        for index, p, gradient in zip(indices, parameters, gradients, strict=True):
            if (rows := self._rows_of.get(index)) is not None:
                shaped = to_device(gradient, p.device).view_as(p)
                pieces.append(Piece(index, shaped[rows] if p.dim() else shaped, rows))
        return self.norms.compute(pieces)

    @keeps_errors
    def _sums(self, norms: list[Norms | None]) -> tuple[Tensor, Tensor] | None:
        if self.failed:
            return None
        big = [[*chain.from_iterable(entry)] for entry in zip(*filter(None, norms), strict=True)]
        pieces = [
            Piece(index, p.grad)
            for index, p in enumerate(self.norms.parameters)
            if p.grad is not None and p.requires_grad
        ]
        return self.norms.sums(self.norms.compute(pieces)), self.norms.sums(big)


def _wide(p: Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is averaged: 32 bits for a gradient of 16."""
    return torch.promote_types(p.dtype, torch.float32)


def _flat_gradient(p: Tensor) -> Tensor:
    """Return the gradient as one row; zeros if there is none."""
    if p.grad is None or not p.requires_grad:
        return torch.zeros(p.numel(), dtype=_wide(p), device=p.device)
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    return gradient.detach().reshape(-1).to(_wide(p))
