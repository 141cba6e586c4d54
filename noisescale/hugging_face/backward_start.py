# SPDX-License-Identifier: Apache-2.0
"""Where a backward pass may begin: what a model's forward passes gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


class BackwardStart:
    """Several tensors of which a backward pass goes through some, and the first of them counts.

    The Trainer may take a model's own loss or compute one of the logits, of one forward pass or
    of several, and tells nobody. To collectors this looks like the one tensor that they hook.
    """

    requires_grad = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._hooks: list[Callable[[Tensor], None]] = []
        self._begun = False

    def register_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` once, when the backward pass comes to the first tensor."""
        self._hooks.append(hook)
        if len(self._hooks) == 1:
            self._watch(self._tensors)
        self._tensors = []  # they would keep the graph alive

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Watch what a further forward pass gave, too."""
        self._watch(tensors)

    def _watch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> None:
        if not self._begun:
            self._begun = True
            for hook in self._hooks:
                hook(gradient)


def differentiable(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output that a backward pass can go through."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from differentiable(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from differentiable(value)
