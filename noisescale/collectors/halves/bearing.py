# SPDX-License-Identifier: Apache-2.0
"""Allow a second backward pass only where it changes nothing, and restore what it runs again.

A checkpointed part runs forward again. The Python state of its function and modules is kept before
the pass and restored after it: attributes, closures, and what is in containers, objects and
generators of random numbers, two levels down. `Values` restores tensors among them. Global
variables are not restored.

Read here, and private as of torch 2.13: what checkpointing keeps in closures, and a module's hooks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisescale.collectors.halves.graph import Node
from noisescale.collectors.halves.second_pass import cells_of, second_pass
from noisescale.collectors.halves.side_effects import (
    Values,
    hooks_of_tensors,
    hooks_on_modules,
    keep_random_numbers,
    keep_retained_gradients,
    silence,
)
from noisescale.collectors.own_pass import own_pass
from noisescale.guard import NotMeasured

INSTEAD = " Accumulate two or more micro-batches, which avoids this, or use several devices."
"""The remedy of every refusal."""

_NAMED = 4
"""The most that a message names."""


class Bearing:
    """Says of each graph whether it bears a second backward pass.

    Args:
        model: The trained model.
        backward_twice: Whether the user says that what is not known bears it, too.
    """

    def __init__(self, model: nn.Module, *, backward_twice: bool) -> None:
        self._model = model
        self._backward_twice = backward_twice
        self.forget()

    def forget(self) -> None:
        """Release the graph that was checked last."""
        self._state = PythonState([])
        self.runs_python = False
        """Whether the graph that was checked last runs Functions of others, or parts again."""

    def check(self, loss: Node) -> None:
        """Check the graph of a loss, before any pass through it.

        Raises:
            NotMeasured: If a second pass may change the training, or end it.
        """
        second = second_pass(loss)
        self._state = PythonState(second.frames)
        self.runs_python = second.runs_python
        if second.impossible:
            raise NotMeasured(
                "`model` must allow a backward pass before the training's own, got"
                f" {_list_of(second.impossible)}. Checkpointing needs `use_reentrant=False` and no"
                " `context_fn`.",
                INSTEAD,
            )
        unknown = list(second.unknown)
        if not self._state.complete:
            unknown.append("a checkpointed part that cannot be looked into")
        parts = [("", module) for module in self._state.modules]
        for hook in hooks_on_modules(parts, "forward") if second.frames else ():
            if not hook.startswith(_HOOKS_OF_LIBRARIES):
                unknown.append(f"the forward hook {hook} in a checkpointed part")
        if unknown and not self._backward_twice:
            raise NotMeasured(
                "`model` must consist of what is known to bear a second backward pass, got"
                f" {_list_of(unknown)}, which may keep state. If it keeps none, pass"
                " `backward_twice=True`.",
                INSTEAD,
            )

    @contextmanager
    def leave_no_trace(self) -> Iterator[None]:
        """Restore after a block what passes through the checked graph change.

        These are what they run again, retained gradients and random numbers. They call no hooks of
        tensors but those that the block registers.
        """
        parameters = list(self._model.parameters())
        named: list[tuple[str, Tensor]] = []
        if self.runs_python:
            named = [*self._model.named_buffers(), *self._state.tensors]
        with ExitStack() as after:
            after.callback(self._state.restore)
            after.callback(Values(named).restore)
            after.enter_context(keep_retained_gradients())
            after.enter_context(silence(hooks_of_tensors(parameters)))
            after.enter_context(keep_random_numbers({p.device for p in parameters}))
            after.enter_context(own_pass())
            yield


def _list_of(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


_DEPTH = 3
"""How far below a module state is looked for: its attributes, and two levels down from each."""

_MOST = 4096
"""The most entries of a container that is looked into."""

_HOOKS_OF_LIBRARIES = ("accelerate.", "noisescale.", "torch.", "transformers.")
"""How the names of forward hooks begin that may be called again."""

_ATOMS = (bool, bytes, complex, float, int, str, type(None))

_NOT_OF_MODELS = frozenset(
    {"builtins", "concurrent", "lightning", "logging", "multiprocessing", "pytorch_lightning"}
    | {"queue", "threading", "torch", "weakref"}
)
"""Packages whose objects are no state of a forward pass, or may change in other threads."""


class PythonState:
    """The Python state of checkpointed parts, as it is now.

    Attributes:
        modules: The modules that the parts run.
        tensors: The tensors in the state that are no parameters, with names. Buffers of modules
            are left out.
        complete: Whether each part could be looked into.
    """

    def __init__(self, frames: Iterable[Any]) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.tensors: list[tuple[str, Tensor]] = []
        self.complete = True
        self._restore: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        for frame in frames:
            held = cells_of(frame.recompute_fn)
            self.complete &= "fn" in held
            for name in ("fn", "kwargs"):
                self._keep(name, held.get(name), _DEPTH)

    def restore(self) -> None:
        """Restore the state. Only what has changed is written to."""
        for restore in self._restore:
            restore()

    def _keep(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _ATOMS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._keep_module(module)
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self.tensors.append((name, value))
        elif (restore := _random_state(value)) is not None:
            self._restore.append(restore)
        elif isinstance(value, list | deque | set | dict):
            if len(value) <= _MOST:
                self._restore.append(partial(_refill, value, _entries(value)))
                self._keep_all(name, _entries(value), depth)
        elif isinstance(value, tuple):
            self._keep_all(name, [*enumerate(value)], depth)
        elif isinstance(value, partial):
            self._keep_all(name, [(0, value.func), (1, value.args), (2, value.keywords)], _DEPTH)
        elif isinstance(value, FunctionType):
            self._keep_cells(name, value)
        elif isinstance(value, MethodType):
            self._keep_all(name, [(0, value.__self__), (1, value.__func__)], _DEPTH)
        elif _has_state(value):
            self._restore.append(partial(_reset_attributes, value, dict(vars(value))))
            self._keep_all(name, [*vars(value).items()], depth)

    def _keep_module(self, module: nn.Module) -> None:
        if module in self.modules:
            return
        self.modules[module] = None
        self._seen.update(id(one) for one in (module, *module.buffers(recurse=False)))
        self._restore.append(partial(_reset_attributes, module, dict(vars(module))))
        self._keep_all(type(module).__name__, [*vars(module).items()], _DEPTH)

    def _keep_cells(self, name: str, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is not set yet
                continue
            self._restore.append(partial(_reset_cell, cell, value))
            self._keep(name, value, _DEPTH)

    def _keep_all(self, name: str, entries: list[tuple[Any, Any]], depth: int) -> None:
        for key, value in entries if depth else ():
            self._keep(f"{name}.{key}", value, depth - 1)


def _has_state(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _NOT_OF_MODELS


def _entries(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _ATOMS) and bool(a == b))


def _refill(container: Any, before: list[tuple[Any, Any]]) -> None:
    now = _entries(container)
    pairs = zip(now, before, strict=False)
    if len(now) == len(before) and all(_same(a, b) and _same(m, n) for (a, m), (b, n) in pairs):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(before)
    elif isinstance(container, set):
        container.update(one for _, one in before)
    else:
        container.extend(one for _, one in before)


def _reset_attributes(owner: Any, before: dict[str, Any]) -> None:
    # One by one: other threads may read the rest.
    attributes = vars(owner)
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, value in before.items():
        if name not in attributes or not _same(attributes[name], value):
            attributes[name] = value


def _reset_cell(cell: CellType, before: Any) -> None:
    if not _same(cell.cell_contents, before):
        cell.cell_contents = before


def _random_state(value: Any) -> Callable[[], object] | None:
    """Return what restores a generator of random numbers; None if the value is none."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    return None
