# SPDX-License-Identifier: Apache-2.0
"""Find what one more backward pass would change, and restore it. Silence the hooks of others."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Parameter
from torch.nn.modules import module as of_modules
from torch.utils.weak import WeakIdKeyDictionary

from noisescale.collectors.halves.calls import tensors_in
from noisescale.collectors.halves.graph import Graph, Node
from noisescale.collectors.own_pass import asks_whether_measuring, is_ours, name_of


class Values:
    """The values of tensors before a block with passes.

    Args:
        named: The tensors and their names.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._before = [_Before.of(n, one) for n, one in named if _counts(one)]

    @contextmanager
    def hide_writes(self) -> Iterator[None]:
        """Hide from autograd what a block writes to the tensors."""
        with ExitStack() as versions:
            for before in self._before:
                versions.enter_context(_unsafe_preserve_version_counter(before.tensor))
            yield

    def restore(self) -> list[tuple[str, Tensor]]:
        """Restore the values. Return the names, and whether the block had changed each, shape (1,).

        The host does not wait: which ones differ is on the device.
        """
        restored: list[tuple[str, Tensor]] = []
        with ExitStack() as all_of_them:  # also if one fails
            for before in self._before:
                all_of_them.callback(before.restore_into, restored)
        return restored[::-1]


class _Before(NamedTuple):
    """A tensor and its value before a block with passes."""

    name: str
    tensor: Tensor
    value: Tensor
    """The value of what `_distinct` leaves of the tensor."""
    nbytes: int
    """The bytes of the memory that the tensor is in."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Before:
        value = _distinct(tensor.detach()).clone()
        return cls(name, tensor, value, tensor.untyped_storage().nbytes())

    def restore_into(self, restored: list[tuple[str, Tensor]]) -> None:
        """Restore the tensor, and note whether it differed."""
        differs = torch.ones(1, dtype=torch.bool, device="cpu")
        memory = self.tensor.untyped_storage()
        if memory.nbytes() < self.nbytes:  # it has been freed
            memory.resize_(self.nbytes)
        else:
            differs = _differ(_distinct(self.tensor), self.value)
        if not differs.is_cpu or bool(differs):
            _distinct(self.tensor.data).copy_(self.value)  # which does not count as a write
        restored.append((self.name, differs))


def values_saved_in(graph: Graph) -> Values:
    """Return the values of tensors that Functions written in Python save for their backward pass.

    torch's own functions do not change what they save. A Function that changes or frees it would
    break the training's backward pass. The names are those of the Functions.
    """
    return Values(
        (node.name().removesuffix("Backward"), tensor)
        for node in graph.nodes
        if issubclass(type(node), BackwardCFunction)
        for tensor in _saved_tensors(node)
    )


_noted: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensors whose gradients the user asked to keep; a graph does not show which these are."""

Hooks = OrderedDict[int, Callable[[Tensor], Tensor | None]]
"""The hooks of one tensor. torch reads them when a gradient arrives."""

_hooked: WeakValueDictionary[int, Hooks] = WeakValueDictionary()
"""The hooks of tensors that are no leaves. A graph keeps them and does not show them."""

_watchers = 0


def watch() -> None:
    """Note calls of `retain_grad` and `register_hook`, until as many calls of `unwatch`."""
    global _watchers
    _watchers += 1
    if _watchers == 1:
        # Nothing else shows such calls. `unwatch` puts torch's own methods back.
        Tensor.retain_grad = _retain_grad  # type: ignore[assignment,method-assign]
        Tensor.register_hook = _register_hook  # type: ignore[method-assign]


def unwatch() -> None:
    """End a `watch`."""
    global _watchers
    _watchers -= 1
    if _watchers == 0:
        del Tensor.retain_grad  # what it inherits is in force again
        if Tensor.register_hook is _register_hook:  # and not what others have put there since
            Tensor.register_hook = _register_hook_of_torch  # type: ignore[method-assign]
        _noted.clear()
        _hooked.clear()


def _retain_grad(self: Tensor) -> None:
    super(Tensor, self).retain_grad()
    if not self.is_leaf:
        _noted[self] = None


_register_hook_of_torch = Tensor.register_hook


def _register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    handle = _register_hook_of_torch(self, hook)  # type: ignore[no-untyped-call]
    with suppress(Exception):  # it is training that calls this
        _note_hooks_of(self)
    return handle


def _note_hooks_of(tensor: Tensor) -> None:
    hooks: Any = tensor._backward_hooks
    if hooks and not tensor.is_leaf:
        _hooked[id(hooks)] = hooks


def hooks_of_tensors(parameters: Iterable[Parameter]) -> list[Hooks]:
    """Return the hooks of parameters, and of the other tensors in graphs that are alive."""
    of_parameters: list[Any] = [p._backward_hooks for p in parameters if p._backward_hooks]
    return of_parameters + [hooks for hooks in _hooked.values() if hooks]


@contextmanager
def silence(all_hooks: Iterable[Hooks]) -> Iterator[None]:
    """Have a block with a backward pass call no hooks of tensors but those that it registers."""
    before = [(hooks, hooks.copy()) for hooks in all_hooks]
    for hooks, _ in before:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in before:
            hooks.update(kept)


class ChangingHooks:
    """Notes which hooks of others change a gradient, in training's own pass.

    A pass without them gives other gradients than the training's.
    """

    def __init__(self, all_hooks: Iterable[Hooks]) -> None:
        self.names: set[str] = set()
        self._wrapped: list[tuple[Hooks, int, Any, Any]] = []
        for hooks in all_hooks:
            for key, hook in hooks.items():
                if not is_ours(name := name_of(hook)):
                    noting = partial(self._call, hook, name)
                    hooks[key] = noting
                    self._wrapped.append((hooks, key, hook, noting))

    def restore(self) -> None:
        """Put the hooks back that have not been removed since."""
        for hooks, key, hook, noting in self._wrapped:
            if hooks.get(key) is noting:
                hooks[key] = hook
        self._wrapped = []

    def _call(self, hook: Any, name: str, gradient: Tensor) -> Tensor | None:
        changed: Tensor | None = hook(gradient)
        if changed is not None and changed is not gradient:
            self.names.add(name)
        return changed


@contextmanager
def keep_retained_gradients() -> Iterator[None]:
    """Restore the gradients that users retain, after a block with a backward pass."""
    before = [(tensor, tensor.grad) for tensor in _noted.keys()]  # noqa: SIM118 - a weak dict's
    for tensor, _ in before:
        tensor.grad = None  # what the pass would add to
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


@contextmanager
def keep_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the random number generators of the CPU and of devices after a block."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    modules = {d: torch.get_device_module(d) for d in devices if d.type not in ("cpu", "meta")}
    of_devices = {device: module.get_rng_state(device) for device, module in modules.items()}
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        for device, state in of_devices.items():
            modules[device].set_rng_state(state, device)


def hooks_on_modules(
    modules: Iterable[tuple[str, nn.Module]], direction: Literal["forward", "backward"]
) -> dict[str, str]:
    """Name the hooks on modules that would see one more pass, with a place of each one.

    They cannot be silenced: torch puts those of the backward pass into the graph in the forward
    pass. A hook that asks `measuring()` knows of the pass, and is not named.
    """
    kinds = f"_{direction}_hooks", f"_{direction}_pre_hooks"
    found: dict[str, str] = {}
    everywhere = vars(of_modules)[f"_global{kinds[0]}"], vars(of_modules)[f"_global{kinds[1]}"]
    each = ((name, m, (getattr(m, kinds[0]), getattr(m, kinds[1]))) for name, m in modules)
    for place, module, hooks in (("all modules", None, everywhere), *each):
        for hook in (*hooks[0].values(), *hooks[1].values()) if any(hooks) else ():
            if not asks_whether_measuring(hook):
                found.setdefault(name_of(hook), place or type(module).__name__)
    return found


def _saved_tensors(node: Node) -> list[Tensor]:
    try:
        saved = [tensor for tensor in node.saved_tensors if tensor is not None]
    except RuntimeError:  # freed by an earlier pass, or saved in a way that cannot be read twice
        saved = []
    return [*saved, *tensors_in(list(vars(node).values()))]


def _counts(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers, in memory that is there, and a count of writes to them.

    Reading a tensor whose memory was freed, as reversible layers do, ends the process.
    """
    if tensor.layout is not torch.strided or tensor.is_inference():
        return False
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() >= needed


def _distinct(tensor: Tensor) -> Tensor:
    """View each number in memory once, where `expand` shows it several times."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _differ(tensor: Tensor, value: Tensor) -> Tensor:
    """Return whether bits differ, shape (1,): NaN equals NaN."""
    # `contiguous` keeps a stride of 0 of one number, which then cannot be seen as bytes.
    flat = (x.detach().reshape(-1) for x in (tensor, value))
    ours, theirs = (x.clone(memory_format=torch.contiguous_format) for x in flat)
    ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    return (ours != theirs).any().view(1)
