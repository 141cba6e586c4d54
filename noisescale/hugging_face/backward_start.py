# SPDX-License-Identifier: Apache-2.0
"""The beginning of a backward pass, among the outputs of a model's forward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from noisescale.collectors.halves.calls import tensors_in


class BackwardStart:
    """Several tensors. The backward pass begins at the first of them that it reaches.

    The Trainer may use the model's own loss, or compute a loss from the logits of one or several
    forward passes. A callback does not see which. For collectors this object looks like the one
    tensor that they put a hook on. Keep the object until the pass; the tensors need not be kept.
    """

    requires_grad = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.edge: GradientEdge | None = None
        """The edge that the backward pass reached first; set while hooks are called."""
        self._edges: list[GradientEdge] = []
        self._hooks: list[Callable[[Tensor], None]] = []
        self._begun = False
        self.add(tensors)

    def register_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` once, when the backward pass reaches the first tensor."""
        self._hooks.append(hook)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Watch the output of a further forward pass, too."""
        for tensor in tensors:
            # The edge, as what becomes of the tensor in place comes after the hook; and a weak
            # reference, as a graph that held itself would never be freed.
            self._edges.append(get_gradient_edge(tensor))
            tensor.register_hook(partial(_on_gradient, weakref.ref(self), len(self._edges) - 1))

    def on_gradient(self, which: int, gradient: Tensor) -> None:
        """Call the hooks, if the pass begins here."""
        if not self._begun:
            self._begun, self.edge, self._edges = True, self._edges[which], []
            for hook in self._hooks:
                hook(gradient)
            self.edge = None


def _on_gradient(start: weakref.ref[BackwardStart], which: int, gradient: Tensor) -> None:
    if (begun := start()) is not None:
        begun.on_gradient(which, gradient)


def differentiable(output: Any) -> Iterator[Tensor]:
    """Return the tensors in a model's output that a backward pass can go through."""
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad)
