# SPDX-License-Identifier: Apache-2.0
"""The norm of the step's gradient, computed in shares by the ranks that all hold it."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.guard import HookErrors, keeps_errors


class AveragedGradient(HookErrors):
    """|g|² of the gradient in `p.grad`, or of this rank's share of it.

    All ranks of data parallelism hold the same average, so each norms 1/W of its rows and the
    shares are summed with the small norms: a step reads (1 + 1/W) x the gradient instead of 2 x.
    """

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup | None) -> None:
        self._norms = norms
        rank, self._ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self._share = share_of(norms.parameters, rank, self._ranks)
        self._captured: Tensor | None = None

    @property
    def captured(self) -> bool:
        """Whether `sq_norms` was captured earlier."""
        return self._captured is not None

    def sq_norms(self) -> Tensor:
        """This rank's share, shape (entries,): as captured, or as `p.grad` is now.

        Raises:
            Exception: The error of the capture, if it failed.
        """
        self.raise_error_of_hook()
        return self._now() if self._captured is None else self._captured

    def capture_at_backward_end(self) -> None:
        """Capture the norms at the end of a pass; call it in its first hook or a final callback.

        Callbacks run first in, first out, and DDP's, which writes the averages, is queued when
        its last bucket is ready: one that is queued by a callback queued early comes after it.
        """
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        queue_callback(lambda: queue_callback(self._capture))

    def forget(self) -> None:
        """Begin another step."""
        self._captured = self._error = None

    @keeps_errors
    def _capture(self) -> None:
        self._captured = self._now()

    def _now(self) -> Tensor:
        pieces = []
        for index, start, stop in self._share:
            p = self._norms.parameters[index]
            if p.grad is None or not p.requires_grad:
                continue
            if p.grad.is_sparse:  # its rows cannot be cut: the rank with the first takes them all
                if start == 0:
                    pieces.append(Piece(index, p.grad))
            elif p.dim() == 0 or stop - start == p.shape[0]:
                pieces.append(Piece(index, p.grad))
            else:
                rows = slice(start, stop)
                pieces.append(Piece(index, p.grad[rows], rows))
        norms = self._norms.add(self._norms.none(), pieces, dots=False)
        if self._norms.momentum is not None:
            # It is squared, so it has to be whole: each rank's share is 1/W of the square.
            norms[-1] = [dot / math.sqrt(self._ranks) for dot in self._norms.dots()]
        return self._norms.sums(norms)


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
        """The first row that starts where the interval of that rank does, or later."""
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
