# SPDX-License-Identifier: Apache-2.0
"""Norms of the micro-batches that one process accumulates: the small batches of one device.

A hook on each parameter sees the gradient of one micro-batch before it is added to `p.grad`. The
sum that is there at the optimizer step is the gradient of the big batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from noisescale.collectors.parameters import trained_parameters
from noisescale.collectors.squared_norms import norms_of, squared_norm, sum_of_squares
from noisescale.collectors.window import WindowLayout

# Small gradients are kept until they are worth one fused norm, at most a DDP bucket of them. A
# gradient that is kept while it becomes `p.grad` has to be cloned, so large ones never are.
_LARGE_BYTES = 2**20
_MOST_BYTES_KEPT = 25 * 2**20


class MicroBatchCollector:
    """Squared norms of each micro-batch's gradient and of the accumulated one, in one process.

    Args:
        model: The model, wrapped or not.
        parameters: Those that are trained; default: all that require a gradient.
    """

    group = None
    averaged_too_often = False

    def __init__(self, model: nn.Module, parameters: Iterable[Parameter] | None = None) -> None:
        self._parameters = trained_parameters(model.parameters(), parameters)
        self.device = self._parameters[0].device
        self._handles = [
            p.register_hook(partial(self._on_gradient, index))
            for index, p in enumerate(self._parameters)
        ]
        self._armed = False
        self._kept: list[Tensor] = []
        self._bytes_kept = 0
        self._norms: list[Tensor] = []
        self._seen: set[int] = set()
        self._seen_twice = False

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Every micro-batch is a part; its gradient was divided like the losses."""
        window = len(sizes)
        return WindowLayout(
            parts=window,
            inverse_sizes=sum(1 / n if n else float("inf") for n in sizes),
            small_scale=loss_divisor**2,
            big_scale=(loss_divisor / window) ** 2 if window else float("nan"),
        )

    def before_backward(self, loss: Tensor) -> None:
        """Arrange for the backward pass from `loss` to be captured."""
        self._armed = loss.requires_grad
        self._seen = set()
        if self._armed:
            loss.register_hook(self._on_backward_start)

    def small_sq_norm(self) -> Tensor | None:
        """Sum of |g|² over the micro-batches since the last reset; None if there were none."""
        if not self._norms or self._seen_twice:
            return None
        return sum_of_squares(self._norms, device=self.device)

    def big_sq_norm(self) -> Tensor:
        """|g|² of the accumulated gradient, now in `p.grad`."""
        gradients = [p.grad for p in self._parameters if p.requires_grad and p.grad is not None]
        with torch.no_grad():
            return squared_norm(gradients, device=self.device)

    def reset(self) -> None:
        """Begin another window."""
        self._armed = False
        self._kept, self._bytes_kept = [], 0
        self._norms = []
        self._seen_twice = False

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.reset()

    def _on_backward_start(self, _: Tensor) -> None:
        if self._armed:
            torch.autograd.Variable._execution_engine.queue_callback(self._flush)

    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        if not self._armed:
            return
        # A parameter whose gradient comes in two pieces (reentrant checkpointing of two uses)
        # has no norm of its whole gradient to be seen here.
        self._seen_twice |= index in self._seen
        self._seen.add(index)
        if gradient.is_sparse or gradient.numel() * gradient.element_size() >= _LARGE_BYTES:
            with torch.no_grad():
                self._norms.extend(norms_of([gradient]))
            return
        self._kept.append(gradient)
        self._bytes_kept += gradient.numel() * gradient.element_size()
        if self._bytes_kept >= _MOST_BYTES_KEPT:
            self._flush()

    def _flush(self) -> None:
        with torch.no_grad():
            self._norms.extend(norms_of(self._kept))
        self._kept, self._bytes_kept = [], 0
