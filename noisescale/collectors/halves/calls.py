# SPDX-License-Identifier: Apache-2.0
"""Outputs of modules in the forward pass, and how deep each module was called in others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.parametrize import ParametrizationList

from noisescale.collectors.halves.graph import Graph, Output
from noisescale.guard import HookErrors, keeps_errors


class ModuleCalls(HookErrors):
    """Records the calls of all modules while it is on, with one pair of hooks for all modules.

    Args:
        only: Modules whose calls are recorded, however deep they are; None: all modules.
    """

    def __init__(self, only: Collection[nn.Module] | None = None) -> None:
        self.any = False
        """Whether a module returned a tensor that requires a gradient."""
        self._mark = object()
        self._only = None if only is None else {id(module) for module in only}
        self._depth = 0
        self._remove: Callable[[], None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether calls are recorded."""
        return self._remove is not None

    def switch(self, on: bool) -> None:
        """Start or stop recording calls."""
        if on == self.is_on:
            return
        self._depth = 0
        if self._remove is not None:
            self._remove()
            self._remove = None
        if on:
            self._remove = _show_calls(weakref.ref(self))

    def forget(self) -> None:
        """Forget the recorded calls."""
        self.any = False
        self._mark = object()
        self._depth = 0

    def outputs_in(self, graph: Graph) -> dict[Output, int]:
        """Return the outputs of modules that are in a graph, and how deep each was called."""
        return {
            (node, which): depth
            for node in graph.nodes
            for which, depth in node.metadata.get(self._mark, {}).items()
        }

    @keeps_errors
    def on_call(self) -> None:
        """Record that a module is called."""
        self._depth += 1

    @keeps_errors
    def on_return(self, module: nn.Module, output: Any) -> None:
        """Record what a module returned."""
        self._depth = depth = max(self._depth - 1, 0)
        if not torch.is_grad_enabled() or isinstance(module, ParametrizationList):
            return
        if self._only is not None:
            if id(module) not in self._only:
                return
            depth = 0
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                self.any = True
                # With the node, as a list here would keep each graph that no pass is taken from.
                metadata: Any = tensor.grad_fn.metadata  # torch declares it a method
                marks = metadata.setdefault(self._mark, {})
                marks[tensor.output_nr] = min(depth, marks.get(tensor.output_nr, depth))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module: one, or a mapping or sequence of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def _show_calls(owner: weakref.ref[ModuleCalls]) -> Callable[[], None]:
    """Show the owner all modules' calls, until what is returned is called."""

    def on_call(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # first, so that compiled code has no more of this
            return
        if (calls := owner()) is None:
            remove()
        else:
            calls.on_call()

    def on_return(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if (calls := owner()) is not None:
            calls.on_return(module, output)

    def remove() -> None:
        before.remove()
        after.remove()

    before = register_module_forward_pre_hook(on_call)
    after = register_module_forward_hook(on_return, always_call=True)
    return remove
