# SPDX-License-Identifier: Apache-2.0
"""Norms of the micro-batches that are accumulated: the small batches of one device, or of each.

A hook on each parameter sees the gradient of one micro-batch before it is added to `p.grad` (and
before DDP takes it). What is in `p.grad` at the optimizer step is the gradient of the big batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.collector import Collector
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.own_pass import measuring
from noisescale.collectors.rows.window_layout import (
    Weight,
    WindowLayout,
    each_micro_batch,
    weighted_micro_batches,
)
from noisescale.guard import keeps_errors

# On an accelerator small gradients are kept until they are worth one fused norm, at most a DDP
# bucket of them. One that is kept while it becomes `p.grad` is cloned, so large ones never are.
_LARGE_BYTES = 2**20
_MOST_BYTES_KEPT = 25 * 2**20


class MicroBatchCollector(Collector):
    """Squared norms of each micro-batch's gradient and of the step's.

    Args:
        norms: The parameters that are trained, and where their norms count.
        group: The ranks that average their gradients; None: one process.
    """

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(norms, group)
        self._handles = [
            p.register_hook(partial(self._on_gradient, index))
            for index, p in enumerate(norms.parameters)
        ]
        self._armed = False
        self._capture_average = False
        self._kept: list[Piece] = []
        self._bytes_kept = 0
        self._captured = norms.none()
        self._seen: set[int] = set()
        self._seen_twice = False
        self._reached: list[bool] = []

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches that a step needs to be measured."""
        return 2 if self.group is None else 1

    @property
    def reached(self) -> list[bool]:
        """For each pass whether it came to a measured parameter: another optimizer's may not."""
        return self._reached

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Every micro-batch is a part; its gradient was divided like the losses."""
        return each_micro_batch(sizes, loss_divisor)

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Every micro-batch is a part, of a weight of its own."""
        return weighted_micro_batches(sizes, weights)

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured."""
        self._armed = loss.requires_grad
        self._capture_average = capture_average
        self._seen = set()
        self._reached.append(False)
        if self._armed:
            loss.register_hook(self._on_backward_start)

    def small_sq_norms(self) -> Tensor | None:
        """Sum of |g|² over the micro-batches since the last reset; None if there were none."""
        self.raise_error_of_hook()
        if not any(self._captured) or self._seen_twice:
            return None
        return self.norms.sums(self._captured)

    def reset(self) -> None:
        """Begin another window."""
        super().reset()
        self._armed = False
        self._kept, self._bytes_kept = [], 0
        self._captured = self.norms.none()
        self._seen_twice = False
        self._reached = []

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.reset()

    @keeps_errors
    def _on_backward_start(self, _: Tensor) -> None:
        if self._armed and not measuring():
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
            if self._capture_average:
                self._average.capture_at_backward_end()

    @keeps_errors
    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        if not self._armed or measuring():
            return
        # A parameter whose gradient comes in two pieces (reentrant checkpointing of two uses)
        # has no norm of its whole gradient to be seen here.
        if index in self._seen:
            self._seen_twice = True
        self._seen.add(index)
        size = gradient.numel() * gradient.element_size()
        if size >= _LARGE_BYTES or gradient.is_cpu or gradient.is_sparse:
            self.norms.add_one(self._captured, index, gradient)
            return
        self._kept.append(Piece(index, gradient))
        self._bytes_kept += size
        if self._bytes_kept >= _MOST_BYTES_KEPT:
            self._flush()

    @keeps_errors
    def _on_backward_end(self) -> None:
        self._flush()
        self._reached[-1] = bool(self._seen)
        self._armed = False  # what runs before the next pass (a gradient penalty) does not count

    def _flush(self) -> None:
        self.norms.add(self._captured, self._kept)
        self._kept, self._bytes_kept = [], 0
