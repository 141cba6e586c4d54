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
`_join_config`, `_comm_hooks` and `_static_graph_delay_allreduce_enqueued`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from noisescale.batches.row_groups import RowGroups
from noisescale.collectors.collector import COST_OF_A_PASS, Collector
from noisescale.collectors.gradient_norms import GradientNorms, Norms, Piece
from noisescale.collectors.halves.within_groups import WithinGroups
from noisescale.collectors.rows.group_levels import WithinBatch
from noisescale.guard import NotMeasured, keeps_errors

# Backward passes watched by capture B before A takes over: by then a nested backward, which A
# could not see, would have shown itself (and a static graph has passed its special first one).
_PROBING_BACKWARDS = 2

_SPOILING = {
    "powerSGD": "PowerSGD replaces the mean gradient by a low-rank approximation of it",
    "post_localSGD": "post-local SGD stops averaging gradients over all ranks",
}

_REMEDY = "Use a hook that keeps the mean, such as `fp16_compress_hook`, or none."


class Phase(Enum):
    """Which capture measures the gradients."""

    PROBING = "hooks, until A is known to be right"
    AT_BACKWARD_END = "A"
    BY_HOOKS = "B, for good"


@dataclass
class _Pass:
    """A backward pass that averages over ranks, and what was seen of it."""

    by_hooks: bool
    """Whether capture B norms all gradients; else it norms the sparse ones."""
    graph_task: int | None = None
    """Autograd's number of the pass, once the pass has started."""
    nested: bool = False
    """Whether gradients came in another backward pass within this one."""
    averaged_in: dict[int, int] = field(default_factory=dict)
    """Autograd's number of the first pass that averaged a gradient, by the parameter's index."""
    averaged_again: set[int] = field(default_factory=set)
    """Parameters whose gradients were averaged in another pass, too."""
    norms_of: dict[int, Norms] = field(default_factory=dict)
    """What hooks normed, by the index of the parameter: the last one in it was ready last."""
    sq_norms: Tensor | None = None
    """What capture A found."""


class DdpCollector(Collector):
    """Squared norms of this rank's gradient, and of its share of the averaged gradient.

    Args:
        ddp: The model.
        norms: See `Collector`.
        within: Makes what measures halves within groups of rows, if groups are ever given.
    """

    _saved = ("_draws",)

    cost_in_groups = COST_OF_A_PASS

    def __init__(
        self,
        ddp: DistributedDataParallel,
        norms: GradientNorms,
        within: Callable[[], WithinGroups] | None = None,
    ) -> None:
        super().__init__(norms, ddp.process_group)
        self._make_within = within
        self._within: WithinGroups | None = None
        self._groups: RowGroups | None = None
        """The groups of rows of the next batch; None if they are not known."""
        self._passes = self._draws = 0
        self._ddp = ddp
        self._sparse = sparse_gradients(ddp.module, norms.parameters)
        self.phase = Phase.BY_HOOKS if ddp.gradient_as_bucket_view else Phase.PROBING
        self._probes_left = _PROBING_BACKWARDS
        self._averaged = 0
        self._pass: _Pass | None = None
        self._live: _Pass | None = None
        """The last pass while it is under way: hooks on parameters ask for it."""
        self._hooked: Iterable[int] = range(len(norms.parameters))
        """The parameters that have a hook in a measured step, by their index."""
        self._lost: set[int] = set()
        """Parameters that had lost their gradient by the time that DDP took it, by their index."""

    @property
    def averaged_too_often(self) -> bool:
        """Whether `p.grad` mixes local and averaged gradients: it was averaged twice in a step.

        Twice in one announced pass if that has passes within it, as with GradCache. (Reentrant
        checkpointing may bring some gradients twice: those of modules that are used twice.)
        """
        again = set() if self._pass is None else self._pass.averaged_again
        return self._averaged > 1 or (bool(again) and len(again) == len(self._average.came))

    def expect(
        self,
        *,
        rows: int | None,
        last: bool | None,
        row_weights: Tensor | None = None,
        row_groups: RowGroups | None = None,
    ) -> None:
        """Receive the groups of rows of the next batch. Others than these are not needed."""
        self._groups = row_groups
        if row_groups is not None and self._within is None and self._make_within is not None:
            self._within = self._make_within()
            self._look()  # from the next step on

    def within_groups(self) -> WithinBatch | None:
        """Return the halves within groups of the step's first batch on this rank."""
        return None if self._within is None else self._within.result()

    def _look(self) -> None:
        if self._within is not None:
            self._within.watch(self.watching)

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured, if it averages over ranks.

        Earlier passes of the same step only add to this rank's `p.grad`.
        """
        groups, self._groups = self._groups, None
        if self._within is not None:
            self._within.end_pass()
            # In a static graph the first pass has DDP's all-reduce queued: it must not be ours.
            begins = self._ddp.static_graph and not self._ddp._static_graph_delay_allreduce_enqueued
            if groups is not None and not (self._passes or begins):
                self._draws += 1
                self._within.measure(loss, groups, self._draws)
        self._passes += 1
        self._average.before_backward(loss, capture=capture_average)
        if not self._ddp.require_backward_grad_sync:
            return
        self._averaged += 1
        self._pass = self._live = None
        self._install_hooks()
        if loss.requires_grad:
            self._pass = self._live = _Pass(self.phase is not Phase.AT_BACKWARD_END)
            loss.register_hook(self._on_backward_start)

    def small_sq_norms(self) -> Tensor | None:
        """Return |g_rank|² of the captured backward pass; None if no reliable one was captured."""
        self.raise_error_of_hook()
        one = self._pass
        if self.averaged_too_often or one is None or one.graph_task is None:
            return None
        if not one.by_hooks:
            return None if one.nested else one.sq_norms
        self._probes_left -= 1
        if self.phase is Phase.PROBING and self._probes_left <= 0 and one.norms_of:
            self._leave_one_hook(last_ready=next(reversed(one.norms_of)))
        return self._sums_with_hooks(one, self.norms.empty())

    def reset(self) -> None:
        """Begin another step."""
        super().reset()
        if self._within is not None:
            self._within.reset()
        self._averaged = self._passes = 0
        self._pass = self._live = None

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`, or from one of another way."""
        super().load_state_dict({"draws": 0} | state)

    def close(self) -> None:
        """Remove all hooks."""
        super().close()
        if self._within is not None:
            self._within.close()

    def _piece(self, index: int, gradient: Tensor) -> Piece:
        return Piece(index, gradient)

    @keeps_errors
    def _on_backward_start(self, _: Tensor) -> None:
        one = self._live
        if one is None:
            return
        one.graph_task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        if self._ddp.find_unused_parameters:
            # What a parameter gathered from earlier micro-batches counts, also where this pass
            # leaves it out and its hook stays silent.
            for index, p in enumerate(self.norms.parameters):
                if (one.by_hooks or index in self._sparse) and p.requires_grad:
                    self._norm_by_hook(one, index, p)

    @keeps_errors
    def _on_backward_end(self) -> None:
        one, self._live = self._live, None
        lost = {index for index in self._lost if self.norms.parameters[index].grad is None}
        self._average.gone |= lost
        if one is not None and not one.by_hooks:
            pieces = [
                self._piece(index, p.grad)
                for index, p in enumerate(self.norms.parameters)
                if index not in self._sparse and p.grad is not None and p.requires_grad
            ]
            self._average.came.update(piece.which for piece in pieces)
            one.sq_norms = self._sums_with_hooks(one, self.norms.compute(pieces))

    @keeps_errors
    def _on_accumulation(self, index: int, parameter: Parameter) -> None:
        one = self._live
        if one is None:
            return
        task = torch._C._current_graph_task_id()
        if self._ddp.require_backward_grad_sync and one.averaged_in.setdefault(index, task) != task:
            one.averaged_again.add(index)
        if task != one.graph_task:
            one.nested = True
            self.phase = Phase.BY_HOOKS
            self._hooked = range(len(self.norms.parameters))
        self._average.came.add(index)
        if parameter.grad is None:
            self._lost.add(index)
        if one.by_hooks or index in self._sparse:
            self._norm_by_hook(one, index, parameter)

    def _norm_by_hook(self, one: _Pass, index: int, parameter: Parameter) -> None:
        if parameter.grad is not None:
            one.norms_of.pop(index, None)  # reinserted: see `_Pass`
            one.norms_of[index] = self.norms.compute([self._piece(index, parameter.grad)])

    def _sums_with_hooks(self, one: _Pass, every_norm: Norms) -> Tensor:
        """Return the sums of what the hooks normed and of `every_norm`."""
        # In the order of capture A, so that a resumed run rounds its first sums alike.
        for _, norms in sorted(one.norms_of.items()):
            for entry, pieces in enumerate(norms):
                every_norm[entry].extend(pieces)
        return self.norms.sums(every_norm)

    def _install_hooks(self) -> None:
        for index in self._hooked:
            if index not in self._hooks:
                hook = partial(self._on_accumulation, index)
                parameter = self.norms.parameters[index]
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(hook)

    def _leave_one_hook(self, *, last_ready: int) -> None:
        """Switch to capture A, except for sparse gradients. The last parameter keeps its hook.

        It is there that DDP finishes: should its backward ever be nested (checkpointing that
        starts in mid-run), that step is left out and capture B comes back.
        """
        self.phase = Phase.AT_BACKWARD_END
        self._hooked = self._sparse | {last_ready}
        self.unhook()


def refuse_join(ddp: DistributedDataParallel) -> None:
    """Raise a NotMeasured within `ddp.join()`: one more collective would end the process.

    Every rank that still has batches raises the error, before any collective of the meter. torch
    keeps the model in this state after `join()` ends. A further `join(enable=False)` ends the
    state.
    """
    if ddp._join_config.enable:
        raise NotMeasured(
            "`model` must not train within its `join()`, got one that does: ranks that have run out"
            " of batches take part only in DistributedDataParallel's collectives, not in the"
            " meter's. Give all ranks equally many batches, as `DistributedSampler(...,"
            " drop_last=True)` does."
        )


def spoiling_comm_hook(ddp: DistributedDataParallel) -> tuple[str, str, str] | None:
    """Return the name of a comm hook that changes the mean, the reason and the remedy."""
    for name in [name for hook, _ in ddp._comm_hooks for name in _names(hook, set())]:
        for part, reason in _SPOILING.items():
            if part in name:
                return name, reason, _REMEDY
    return None


def _names(hook: Any, seen: set[int]) -> Iterator[str]:
    """Yield the names of a comm hook and of the hooks it wraps, as `fp16_compress_wrapper` does."""
    if id(hook) in seen:  # a closure that refers to itself
        return
    seen.add(id(hook))
    yield str(getattr(hook, "__qualname__", hook))
    for value in (
        inspect.getclosurevars(hook).nonlocals.values() if inspect.isfunction(hook) else ()
    ):
        if callable(value):
            yield from _names(value, seen)


def sparse_gradients(module: nn.Module, parameters: Sequence[Parameter]) -> frozenset[int]:
    """Return the indices of the parameters for which DDP expects sparse gradients.

    DDP asks the same modules, once, when it is made. It fails if any other gradient is sparse, or
    if one of these is dense, so these parameters stay the same.
    """
    sparse = {
        id(embedding.weight)
        for embedding in module.modules()
        if isinstance(embedding, (nn.Embedding, nn.EmbeddingBag)) and embedding.sparse
    }
    return frozenset(index for index, p in enumerate(parameters) if id(p) in sparse)
