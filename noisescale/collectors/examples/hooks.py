# SPDX-License-Identifier: Apache-2.0
"""From a layer's forward pass to its backward pass: what it read, and the gradient of its output.

Nothing is kept but through the autograd graph: where a forward pass has no backward pass, what
was kept goes with its graph.

Private attribute read here, as of torch 2.13: `torch._C._are_functorch_transforms_active`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from noisescale.collectors.examples.layers import Layer, Statistics
from noisescale.guard import HookErrors, keeps_errors


class Use:
    """One call of a layer that has a backward pass to come.

    Attributes:
        layer: The layer.
        names: Which of its parameters were trained at the time.
        constant: What `LayerHooks.is_constant` said of its input.
        over: Whether the input has been taken.
        statistics: See `Layer.statistics`.
    """

    def __init__(self, layer: Layer, names: list[str], kept: Tensor | None, constant: bool) -> None:
        self.layer = layer
        self.names = names
        self.constant = constant
        self.over = False
        self.statistics: Statistics | None = None
        self._kept = kept

    @property
    def needs_input(self) -> bool:
        """Whether the gradients depend on what the layer read: those of biases do not."""
        return "weight" in self.names

    def take(self) -> Tensor | None:
        """Return the input, once, and free it; None if it has been changed in place since."""
        kept, self._kept, self.over = self._kept, None, True
        if kept is None:
            return None
        try:
            # torch types a node of the graph without what its function saved.
            (x,) = kept.grad_fn.saved_tensors  # type: ignore[union-attr]
        except RuntimeError:  # legal where autograd itself saved a 16-bit copy, under autocast
            return None
        return x  # type: ignore[no-any-return] # likewise


class LayerHooks(HookErrors):
    """A forward hook on every layer, and from there one on its output.

    Args:
        on_output_gradient: Called in the backward pass with the use and its output's gradient.
        is_constant: Called in the forward pass with the layer's input.
    """

    def __init__(
        self,
        on_output_gradient: Callable[[Use, Tensor], None],
        is_constant: Callable[[Tensor], bool],
    ) -> None:
        self.wanted = True
        """Turn it off and forward passes are not looked at."""
        self._on_output_gradient = on_output_gradient
        self._is_constant = is_constant
        self._anchor = torch.zeros((), requires_grad=True)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def install(self, layers: Sequence[Layer]) -> None:
        """Watch these layers and no others."""
        hooks = [(layer.module, _ForwardHook(self, layer)) for layer in layers]
        for handle in self._handles:
            handle.remove()
        self._handles = [
            module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks
        ]

    @keeps_errors
    def on_forward(self, layer: Layer, x: Tensor, output: Tensor) -> None:
        """Keep what a layer read until the gradient of what it gave arrives.

        In evaluation mode too: a backbone that is trained with its dropout off.
        """
        if (
            not self.wanted
            or not torch.is_grad_enabled()
            or not output.requires_grad
            or torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
        ):
            return
        parameters = layer.module._parameters
        names = [n for n in layer.indices if (p := parameters[n]) is not None and p.requires_grad]
        if names:
            kept = None
            if "weight" in names:
                # torch does not annotate `Function.apply`.
                kept = _Keep.apply(self._anchor, x.detach())  # type: ignore[no-untyped-call]
            use = Use(layer, names, kept, self._is_constant(x))
            use.statistics = layer.statistics(output)
            output.register_hook(partial(self._on_output_gradient, use))


class _Keep(torch.autograd.Function):
    """A node beside the loss's graph, that never runs: it saves a tensor as autograd saves its own.

    So checkpointing, which drops what is saved and computes it again, and offloading work on
    it too.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.new_empty(0)


class _ForwardHook:
    """Call the hooks' owner; in a copy of the model (an average of weights, say) do nothing."""

    def __init__(self, hooks: LayerHooks | None = None, layer: Layer | None = None) -> None:
        self._hooks = hooks
        self._layer = layer

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._hooks is None or self._layer is None:
            return
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(x, Tensor) and isinstance(output, Tensor):
            self._hooks.on_forward(self._layer, x, output)

    def __reduce__(self) -> tuple[type[_ForwardHook], tuple[()]]:
        return _ForwardHook, ()
