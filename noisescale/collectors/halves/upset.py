# SPDX-License-Identifier: Apache-2.0
"""Find what one more backward pass would change, and restore it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from noisescale.collectors.halves.calls import tensors_in
from noisescale.collectors.halves.graph import Graph, Node

_OURS = __name__.partition(".")[0]


class Buffers:
    """The buffers that a backward pass writes to, as checkpointing runs forward again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: set[str] = set()

    @contextmanager
    def kept(self, *, first: bool) -> Iterator[None]:
        """Restore the buffers after a block. `first`: find out which ones the block writes to."""
        buffers = dict(self._model.named_buffers())
        names = set(buffers if first else self._written).intersection(buffers)
        before = {n: (b, b.detach().clone()) for n in names if _counts(b := buffers[n])}
        try:
            yield
        finally:
            if first:  # by value: BatchNorm does not count its writes
                self._written |= {n for n, (b, value) in before.items() if not _same(b, value)}
            for name in self._written.intersection(before):
                buffer, value = before[name]
                with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)


class SavedTensors:
    """The tensors that Functions written in Python save for their backward pass.

    torch's own functions do not change what they save. A Function that changes or frees it would
    break the training's backward pass.
    """

    def __init__(self, graph: Graph) -> None:
        self._kept = [
            (node, tensor, tensor.detach().clone())
            for node in graph.nodes
            if issubclass(type(node), BackwardCFunction)
            for tensor in _saved_by(node)
            if _counts(tensor)
        ]

    @contextmanager
    def restored(self) -> Iterator[list[str]]:
        """Restore what a block changes. After the block, the list has the Functions that did."""
        changed: list[str] = []
        with ExitStack() as versions:
            for _, tensor, _ in self._kept:
                versions.enter_context(_unsafe_preserve_version_counter(tensor))
            try:
                yield changed
            finally:
                for node, tensor, value in self._kept:
                    if not _same(tensor, value):
                        changed.append(node.name().removesuffix("Backward"))
                        if tensor.untyped_storage().nbytes() < value.untyped_storage().nbytes():
                            tensor.untyped_storage().resize_(value.untyped_storage().nbytes())
                        tensor.data.copy_(value)


_noted: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensors whose gradients the user asked to keep; a graph does not show which these are."""

_watchers = 0


def watch() -> None:
    """Note calls of `retain_grad()` from now on, until as many calls of `unwatch`."""
    global _watchers
    _watchers += 1
    if _watchers == 1:
        # Nothing else shows such calls. `unwatch` puts torch's own method back.
        Tensor.retain_grad = _retain_grad  # type: ignore[assignment,method-assign]


def unwatch() -> None:
    """End a `watch`."""
    global _watchers
    _watchers -= 1
    if _watchers == 0:
        del Tensor.retain_grad  # what it inherits is in force again
        _noted.clear()


def _retain_grad(self: Tensor) -> None:
    super(Tensor, self).retain_grad()
    if not self.is_leaf:
        _noted[self] = None


@contextmanager
def retained_gradients_kept() -> Iterator[None]:
    """Restore the gradients that users retain, after a block with a backward pass."""
    before = [(tensor, tensor.grad) for tensor in _noted.keys()]  # noqa: SIM118 - a weak dict's
    for tensor, _ in before:
        tensor.grad = None  # what the pass would add to
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def others_hooks(model: nn.Module, named_parameters: Iterable[tuple[str, Parameter]]) -> list[str]:
    """Name the hooks of others that see each backward pass, and a place where each one is."""
    found: dict[str, str] = {}
    for name, parameter in named_parameters:
        for hook in (parameter._backward_hooks or {}).values():
            found.setdefault(_name(hook), name)
    for name, module in model.named_modules():
        for hooks in (module._backward_hooks, module._backward_pre_hooks):
            for hook in hooks.values():
                found.setdefault(_name(hook), name or type(module).__name__)
    return [
        f"{hook} (on {place})" for hook, place in found.items() if hook.partition(".")[0] != _OURS
    ]


def _name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{function.__module__}.{function.__qualname__}"


def _saved_by(node: Node) -> list[Tensor]:
    try:
        saved = [tensor for tensor in node.saved_tensors if tensor is not None]
    except RuntimeError:  # freed by an earlier pass, or saved in a way that cannot be read twice
        saved = []
    return [*saved, *tensors_in(list(vars(node).values()))]


def _counts(tensor: Tensor) -> bool:
    """Whether it has numbers, and a count of the writes to them."""
    return tensor.layout is torch.strided and not tensor.is_inference()


def _same(tensor: Tensor, value: Tensor) -> bool:
    """Whether the bits are the same: NaN is NaN."""
    if tensor.untyped_storage().nbytes() < value.untyped_storage().nbytes():
        return False
    ours, theirs = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (tensor, value))
    return bool(torch.equal(ours, theirs))
