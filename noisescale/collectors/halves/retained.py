# SPDX-License-Identifier: Apache-2.0
"""Tensors whose gradients their user asked to keep, by `retain_grad()`.

Nothing tells which tensors of a graph these are, so the call is noted when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_noted: WeakIdKeyDictionary = WeakIdKeyDictionary()
_watchers = 0


def watch() -> None:
    """Note calls of `retain_grad()` from now on, until as many calls of `unwatch`."""
    global _watchers
    _watchers += 1
    if _watchers == 1:
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
    """Have a block with a backward pass leave the gradients of such tensors as they are."""
    before = [(tensor, tensor.grad) for tensor in _noted.keys()]  # noqa: SIM118 - a weak dict's
    for tensor, _ in before:
        tensor.grad = None  # what the pass would add to
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient
