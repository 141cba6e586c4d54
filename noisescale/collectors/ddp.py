# SPDX-License-Identifier: Apache-2.0
"""Each rank's gradient norm under DistributedDataParallel, seen just before the all-reduce.

Two captures, both of which leave DDP's buckets, its all-reduce and a user's comm hook alone:

A. One callback at the end of the backward pass. The autograd engine runs such callbacks first
   in, first out; ours is queued when the backward starts, DDP queues its own (which waits for
   the all-reduce and writes the averages to `p.grad`) when its last bucket is ready. So ours
   still reads this rank's gradients, all of them in one fused norm.
B. A hook on every parameter, called when its gradient is accumulated and before DDP takes it.
   Some ten microseconds a parameter, but right where A is not: with `gradient_as_bucket_view`
   (`p.grad` is the bucket being reduced), and under reentrant activation checkpointing, whose
   nested backward makes DDP finish before the outer one ends.

Private attributes read here, as of torch 2.13: `Variable._execution_engine.queue_callback`
(which DDP and FSDP use in the same way) and `torch._C._current_graph_task_id`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from noisescale.collectors.parameters import trained_parameters
from noisescale.collectors.squared_norms import norms_of, squared_norm, sum_of_squares
from noisescale.collectors.window import WindowLayout

# Backward passes watched by capture B before A takes over: by then a nested backward, which A
# could not see, would have shown itself (and a static graph has passed its special first one).
_PROBING_BACKWARDS = 2


class DdpCollector:
    """Squared norms of this rank's gradient and of its share of the averaged one.

    Args:
        ddp: The wrapped model.
        parameters: Those that are trained; default: all that require a gradient.
    """

    def __init__(
        self, ddp: DistributedDataParallel, parameters: Iterable[Parameter] | None = None
    ) -> None:
        named = ddp.module.named_parameters()
        averaged = [p for name, p in named if name not in ddp.parameters_to_ignore]
        self._parameters = trained_parameters(averaged, parameters)
        self._ddp = ddp
        self.group = ddp.process_group
        self._ranks = dist.get_world_size(self.group)
        self.device = self._parameters[0].device
        self._share = _share(self._parameters, dist.get_rank(self.group), self._ranks)
        self._averaged = 0
        self._hooks: dict[int, RemovableHandle] = {}
        self._capture_by_hooks = True
        self._hooks_needed = bool(ddp.gradient_as_bucket_view)
        self._probes_left = _PROBING_BACKWARDS
        self._armed = False
        self._graph_task: int | None = None
        self._local_sq_norm: Tensor | None = None
        self._norms_of: dict[int, list[Tensor]] = {}
        self._install_hooks()

    @property
    def averaged_too_often(self) -> bool:
        """Whether `p.grad` mixes local and averaged gradients: it was averaged twice in a step."""
        return self._averaged > 1

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Every rank is a part: the mean over its micro-batches of `sizes` examples."""
        window = len(sizes)
        scale = (loss_divisor / window) ** 2 if window else math.nan
        inverse_size = sum(1 / n if n else math.inf for n in sizes) * (window and window**-2)
        return WindowLayout(self._ranks, inverse_size, small_scale=scale, big_scale=scale)

    def before_backward(self, loss: Tensor) -> None:
        """Arrange for the backward pass from `loss` to be captured, if it averages over ranks.

        Those before it in the same step only add to this rank's `p.grad`.
        """
        if not self._ddp.require_backward_grad_sync:
            return
        self._averaged += 1
        self._forget()
        if self._hooks_needed and not self._capture_by_hooks:
            self._install_hooks()
        if loss.requires_grad:
            self._armed = True
            loss.register_hook(self._on_backward_start)

    def small_sq_norm(self) -> Tensor | None:
        """|g_rank|² of the captured backward pass; None if there was none to rely on."""
        if self.averaged_too_often:
            return None
        if not self._capture_by_hooks:
            return None if self._hooks_needed else self._local_sq_norm
        if self._graph_task is None:
            return None
        self._probes_left -= 1
        if self._probes_left <= 0 and not self._hooks_needed and self._norms_of:
            self._leave_one_hook()
        every_norm = [norm for norms in self._norms_of.values() for norm in norms]
        return sum_of_squares(every_norm, device=self.device)

    def big_sq_norm(self) -> Tensor:
        """This rank's share of |g|², of the averaged gradient now in `p.grad`.

        All ranks hold the same average, so each norms 1/W of its rows and the shares are summed
        with the small norms: a step reads (1 + 1/W) x the gradient instead of 2 x.
        """
        gradients = []
        for p, start, stop in self._share:
            if p.grad is None or not p.requires_grad:
                continue
            if p.grad.is_sparse:  # its rows cannot be cut: the rank with the first takes them all
                if start == 0:
                    gradients.append(p.grad)
            elif p.dim() == 0 or stop - start == p.shape[0]:
                gradients.append(p.grad)
            else:
                gradients.append(p.grad[start:stop])
        return self._sum(gradients)

    def reset(self) -> None:
        """Begin another step."""
        self._averaged = 0
        self._forget()

    def _forget(self) -> None:
        self._armed = False
        self._graph_task = None
        self._local_sq_norm = None
        self._norms_of = {}

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {}
        self.reset()

    def _sum(self, tensors: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return squared_norm(tensors, device=self.device)

    def _on_backward_start(self, _: Tensor) -> None:
        if not self._armed:
            return
        self._graph_task = torch._C._current_graph_task_id()
        if not self._capture_by_hooks:
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        elif self._ddp.find_unused_parameters:
            # What a parameter gathered from earlier micro-batches counts, also where this pass
            # leaves it out and its hook stays silent.
            for index, p in enumerate(self._parameters):
                if p.grad is not None and p.requires_grad:
                    self._norms_of[index] = norms_of([p.grad])

    def _on_backward_end(self) -> None:
        if self._armed:
            gradients = [p.grad for p in self._parameters if p.requires_grad]
            self._local_sq_norm = self._sum([g for g in gradients if g is not None])

    def _on_accumulated(self, index: int, parameter: Parameter) -> None:
        if not self._armed:
            return
        if torch._C._current_graph_task_id() != self._graph_task:
            self._hooks_needed = True
        if self._capture_by_hooks and parameter.grad is not None:
            # Reinserted, so that the last one in the dict is the last one that was ready.
            self._norms_of.pop(index, None)
            with torch.no_grad():
                self._norms_of[index] = norms_of([parameter.grad])

    def _install_hooks(self) -> None:
        self._capture_by_hooks = True
        for index, parameter in enumerate(self._parameters):
            if index not in self._hooks:
                hook = partial(self._on_accumulated, index)
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(hook)

    def _leave_one_hook(self) -> None:
        """Go over to capture A. The parameter that is ready last stays on watch.

        It is there that DDP finishes: should its backward ever be nested (checkpointing that
        starts in mid-run), the step is left out and capture B comes back.
        """
        self._capture_by_hooks = False
        last_ready = next(reversed(self._norms_of))
        for index in [i for i in self._hooks if i != last_ready]:
            self._hooks.pop(index).remove()


def _share(parameters: list[Parameter], rank: int, ranks: int) -> list[tuple[Parameter, int, int]]:
    """Cut all parameters, laid end to end, into `ranks` runs of rows; return one of them.

    A row (an index of the first dimension, so that a run of them is a view whatever the layout)
    goes to the rank whose interval holds its first element. Depends on shapes and order alone:
    every rank makes the same cut.
    """
    total = sum(p.numel() for p in parameters)

    def first_row(of_rank: int, offset: int, rows: int, row: int) -> int:
        """The first row that starts where the interval of that rank does, or later."""
        elements = Fraction(of_rank * total, ranks) - offset
        return min(max(math.ceil(elements / row), 0), rows)

    share: list[tuple[Parameter, int, int]] = []
    offset = 0
    for p in parameters:
        if p.numel():
            rows = p.shape[0] if p.dim() else 1
            start, stop = (first_row(r, offset, rows, p.numel() // rows) for r in (rank, rank + 1))
            if start < stop:
                share.append((p, start, stop))
            offset += p.numel()
    return share
