# SPDX-License-Identifier: Apache-2.0
"""Norms of the accumulated micro-batches: the small batches of one device, or of each device.

A hook on each parameter sees the gradient of one micro-batch before it is added to `p.grad` (and
before DDP takes it), in measured steps. What is in `p.grad` at the optimizer step is the gradient
of the big batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.captured import Captured
from noisescale.collectors.collector import Collector
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.own_pass import measuring
from noisescale.guard import keeps_errors


@dataclass
class Pass:
    """A backward pass, and what was seen of it."""

    task: int | None = None
    """Autograd's number of the pass, once the pass has started."""
    seen: set[int] = field(default_factory=set)
    """Parameters, by index, whose gradients came."""
    reached: bool = False
    """Whether the pass ended and reached a measured parameter."""


@dataclass
class _Step:
    """The passes since the last reset, and the norms of their gradients."""

    captured: Captured
    passes: list[Pass] = field(default_factory=list)
    in_pieces: bool = False
    """Whether some gradient came in two pieces (reentrant checkpointing of two uses), or before
    the pass had begun (GradCache): there is no norm of the whole gradient to be seen."""
    nested: bool = False
    """Whether some gradient came in another pass than the announced one, within it."""
    first: tuple[int, Tensor] | None = None
    """See `Collector._first_pass`."""


class MicroBatchCollector(Collector):
    """Squared norms of each micro-batch's gradient and of the step's gradient."""

    compares = "micro-batches"

    def __init__(self, norms: GradientNorms, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(norms, group)
        self.least_micro_batches = 2 if group is None else 1
        self._step = _Step(Captured(norms))
        self._live: Pass | None = None

    @property
    def reached(self) -> list[bool]:
        """Whether each pass reached a measured parameter. Another optimizer's pass may not."""
        return [one.reached for one in self._step.passes]

    @property
    def _first_pass(self) -> tuple[int, Tensor] | None:
        """See `Collector`. None for ranks of a group: what they find in `p.grad` is an average."""
        return None if self.group is not None or self._step.in_pieces else self._step.first

    @property
    def _in_pieces(self) -> bool:
        return self._step.in_pieces

    def _ends_of_parts(self, passes: int) -> Sequence[int]:
        """Every micro-batch is a part."""
        return range(1, passes + 1)

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured."""
        one = Pass()
        self._step.passes.append(one)
        self._live = one if loss.requires_grad else None
        if loss.requires_grad:
            for index, p in enumerate(self.norms.parameters):
                if p.requires_grad and index not in self._hooks:
                    self._hooks[index] = p.register_hook(partial(self._on_gradient, index))
            loss.register_hook(self._on_backward_start)
        self._average.before_backward(loss, capture=capture_average)

    def small_sq_norms(self) -> Tensor | None:
        """Return Σ|g|² over the micro-batches since the last reset; None if there were none."""
        self.raise_error_of_hook()
        if not any(self._step.captured.found) or self._step.in_pieces:
            return None
        return self.norms.sums(self._step.captured.found)

    def reset(self) -> None:
        """Begin another step."""
        super().reset()
        self._live = None
        self._step = _Step(Captured(self.norms))

    @keeps_errors
    def _on_backward_start(self, _: Tensor) -> None:
        if self._live is not None and not measuring():
            self._live.task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    @keeps_errors
    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        if self._live is None or measuring():
            return
        step = self._step
        if index in self._live.seen or self._live.task is None:
            step.in_pieces = True
        if torch._C._current_graph_task_id() != self._live.task:
            step.nested = True
        self._live.seen.add(index)
        self._capture(index, gradient)

    def _capture(self, index: int, gradient: Tensor) -> None:
        self._step.captured.add(index, gradient)

    @keeps_errors
    def _on_backward_end(self) -> None:
        captured = self._step.captured
        captured.norm_kept()
        self.norms.end_part(captured.found)
        if self._live is not None:
            if self._average.checking and self._live.seen and not any(self.reached):
                self._step.first = len(self._step.passes) - 1, self.norms.sums(captured.found)
            self._average.end_pass(self._live.seen)  # DDP writes to the gradients after this
            self._live.reached = bool(self._live.seen)
        self._live = None  # what runs before the next pass (a gradient penalty) does not count
