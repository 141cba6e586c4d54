# SPDX-License-Identifier: Apache-2.0
"""Where a backward pass may begin: what a model's forward passes gave."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from noisescale.collectors.halves.calls import tensors_in


class BackwardStart:
    """Several tensors of which a backward pass goes through some, and the first of them counts.

    The Trainer may take a model's own loss or compute one of the logits, of one forward pass or
    of several, and tells nobody. To collectors this looks like the one tensor that they hook.
    It has to be kept until the pass: the tensors do not.
    """

    requires_grad = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.edge: GradientEdge | None = None
        """Where the backward pass came to first, while hooks are called."""
        self._edges: list[GradientEdge] = []
        self._hooks: list[Callable[[Tensor], None]] = []
        self._begun = False
        self.add(tensors)

    def register_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` once, when the backward pass comes to the first tensor."""
        self._hooks.append(hook)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Watch what a further forward pass gave, too."""
        for tensor in tensors:
            # The edge, as what becomes of the tensor in place comes after the hook; and a weak
            # reference, as a graph that held itself would never be freed.
            self._edges.append(get_gradient_edge(tensor))
            tensor.register_hook(partial(_on_gradient, weakref.ref(self), len(self._edges) - 1))

    def on_gradient(self, which: int, gradient: Tensor) -> None:
        """Call the hooks, if this is where the pass begins."""
        if not self._begun:
            self._begun, self.edge, self._edges = True, self._edges[which], []
            for hook in self._hooks:
                hook(gradient)
            self.edge = None


def _on_gradient(start: weakref.ref[BackwardStart], which: int, gradient: Tensor) -> None:
    if (begun := start()) is not None:
        begun.on_gradient(which, gradient)


def differentiable(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output that a backward pass can go through."""
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad)
