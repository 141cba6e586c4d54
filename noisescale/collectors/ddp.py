# SPDX-License-Identifier: Apache-2.0
"""Each rank's gradient norm under DistributedDataParallel, seen just before the all-reduce.

Two captures, both of which leave DDP's buckets, its all-reduce and a user's comm hook alone:

A. One callback at the end of the backward pass. The autograd engine runs such callbacks first
   in, first out; ours is queued when the backward starts, DDP queues its own (which waits for
   the all-reduce and writes the averages to `p.grad`) when its last bucket is ready. So ours
   still reads this rank's gradients, all of them in one fused norm.
B. A hook on every parameter, called when its gradient is accumulated and before DDP takes it.
   Some ten microseconds a parameter, but right where A is not: with `gradient_as_bucket_view`
   (`p.grad` is the bucket being reduced), under reentrant activation checkpointing, whose
   nested backward makes DDP finish before the outer one ends, and for sparse gradients, each of
   which is a bucket of its own: DDP divides and reduces it in place. Parameters with sparse
   gradients therefore keep their hooks when A takes over the others.

Private attributes read here, as of torch 2.13: `Variable._execution_engine.queue_callback`
(which DDP and FSDP use in the same way), `torch._C._current_graph_task_id` and, of DDP,
`_join_config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from noisescale.collectors.collector import Collector
from noisescale.collectors.gradient_norms import GradientNorms, Norms, Piece
from noisescale.collectors.rows.window_layout import Weight, WindowLayout, weighted_rank, whole_rank
from noisescale.guard import RefusalError, keeps_errors

# Backward passes watched by capture B before A takes over: by then a nested backward, which A
# could not see, would have shown itself (and a static graph has passed its special first one).
_PROBING_BACKWARDS = 2


class DdpCollector(Collector):
    """Squared norms of this rank's gradient and of its share of the averaged one.

    Args:
        ddp: The wrapped model.
        norms: Its parameters that are trained, and where their norms count.
    """

    def __init__(self, ddp: DistributedDataParallel, norms: GradientNorms) -> None:
        super().__init__(norms, ddp.process_group)
        self._ddp = ddp
        self._averaged = 0
        self._hooks: dict[int, RemovableHandle] = {}
        self._capture_by_hooks = True
        self._hooks_needed = bool(ddp.gradient_as_bucket_view)
        self._sparse = sparse_gradients(ddp.module, norms.parameters)
        self._probes_left = _PROBING_BACKWARDS
        self._armed = False
        self._capture_average = False
        self._graph_task: int | None = None
        self._local_sq_norms: Tensor | None = None
        self._norms_of: dict[int, Norms] = {}
        self._install_hooks()

    @property
    def averaged_too_often(self) -> bool:
        """Whether `p.grad` mixes local and averaged gradients: it was averaged twice in a step."""
        return self._averaged > 1

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Every rank is a part: the mean over its micro-batches of `sizes` examples."""
        return whole_rank(sizes, loss_divisor)

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Every rank is a part, as heavy as its micro-batches together."""
        return weighted_rank(sizes, weights)

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
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
            self._capture_average = capture_average
            loss.register_hook(self._on_backward_start)

    def small_sq_norms(self) -> Tensor | None:
        """|g_rank|² of the captured backward pass; None if there was none to rely on."""
        self.raise_error_of_hook()
        if self.averaged_too_often:
            return None
        if not self._capture_by_hooks:
            return None if self._hooks_needed else self._local_sq_norms
        if self._graph_task is None:
            return None
        self._probes_left -= 1
        if self._probes_left <= 0 and not self._hooks_needed and self._norms_of:
            self._leave_one_hook()
        return self.norms.sums(self._with_hooked(self.norms.none()))

    def reset(self) -> None:
        """Begin another step."""
        self._averaged = 0
        self._forget()

    def _forget(self) -> None:
        super().reset()
        self._armed = False
        self._capture_average = False
        self._graph_task = None
        self._local_sq_norms = None
        self._norms_of = {}

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks = {}
        self.reset()

    @keeps_errors
    def _on_backward_start(self, _: Tensor) -> None:
        if not self._armed:
            return
        self._graph_task = torch._C._current_graph_task_id()
        if self._capture_average:
            self._average.capture_at_backward_end()
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        if self._ddp.find_unused_parameters:
            # What a parameter gathered from earlier micro-batches counts, also where this pass
            # leaves it out and its hook stays silent.
            for index, p in enumerate(self.norms.parameters):
                if self._normed_by_hook(index) and p.grad is not None and p.requires_grad:
                    self._norms_of[index] = self.norms.of([Piece(index, p.grad)])

    @keeps_errors
    def _on_backward_end(self) -> None:
        if self._armed and not self._capture_by_hooks:
            pieces = [
                Piece(index, p.grad)
                for index, p in enumerate(self.norms.parameters)
                if index not in self._sparse and p.grad is not None and p.requires_grad
            ]
            self._local_sq_norms = self.norms.sums(self._with_hooked(self.norms.of(pieces)))
        self._armed = False

    @keeps_errors
    def _on_accumulated(self, index: int, parameter: Parameter) -> None:
        if not self._armed:
            return
        if torch._C._current_graph_task_id() != self._graph_task:
            self._hooks_needed = True
        if self._normed_by_hook(index) and parameter.grad is not None:
            # Reinserted, so that the last one in the dict is the last one that was ready.
            self._norms_of.pop(index, None)
            self._norms_of[index] = self.norms.of([Piece(index, parameter.grad)])

    def _normed_by_hook(self, index: int) -> bool:
        return self._capture_by_hooks or index in self._sparse

    def _with_hooked(self, every_norm: Norms) -> Norms:
        """Add what the hooks normed to `every_norm`, and return it."""
        # In the order of capture A, so that a resumed run rounds its first sums alike.
        for _, norms in sorted(self._norms_of.items()):
            for entry, pieces in enumerate(norms):
                every_norm[entry].extend(pieces)
        return every_norm

    def _install_hooks(self) -> None:
        self._capture_by_hooks = True
        for index, parameter in enumerate(self.norms.parameters):
            if index not in self._hooks:
                hook = partial(self._on_accumulated, index)
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(hook)

    def _leave_one_hook(self) -> None:
        """Go over to capture A, but for sparse gradients. The last parameter ready stays on watch.

        It is there that DDP finishes: should its backward ever be nested (checkpointing that
        starts in mid-run), the step is left out and capture B comes back.
        """
        self._capture_by_hooks = False
        last_ready = next(reversed(self._norms_of))
        for index in self._hooks.keys() - self._sparse - {last_ready}:
            self._hooks.pop(index).remove()


def refuse_join(ddp: DistributedDataParallel) -> None:
    """Raise a RefusalError within `ddp.join()`: a collective more would end the process.

    Every rank that still has batches raises alike, before any collective of ours. torch leaves the
    model so configured when `join()` ends, and goes on with its own; another, with `enable=False`,
    ends that.
    """
    if ddp._join_config.enable:
        raise RefusalError(
            "`model` must not train within its `join()`, got one that does: ranks that have run"
            " out of batches stand in for DistributedDataParallel's collectives alone, not for the"
            " meter's. Give all ranks equally many batches, as"
            " `DistributedSampler(..., drop_last=True)` does, or leave the meter out."
        )


def sparse_gradients(module: nn.Module, parameters: Sequence[Parameter]) -> frozenset[int]:
    """Return the indices of the parameters for which DDP expects sparse gradients.

    DDP asks the same modules, once, when it is made. It fails on any other sparse gradient, and
    on a dense one where it expects a sparse one, so these parameters stay the same all along.
    """
    sparse = {
        id(embedding.weight)
        for embedding in module.modules()
        if isinstance(embedding, (nn.Embedding, nn.EmbeddingBag)) and embedding.sparse
    }
    return frozenset(index for index, p in enumerate(parameters) if id(p) in sparse)
