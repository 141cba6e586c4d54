# SPDX-License-Identifier: Apache-2.0
"""Keep the inputs of layers until the gradients of their outputs arrive.

Inputs are kept only through the autograd graph. So if a forward pass has no backward pass, they are
freed with its graph.

Private attributes read here, as of torch 2.13: `torch._C._are_functorch_transforms_active`, and of
`torch.nn.modules.module` `_global_forward_hooks` and `_global_forward_hooks_with_kwargs`, where a
handle leaves its mark.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from noisescale.collectors.per_example.layers import Layer, Statistics
from noisescale.guard import HookErrors, keeps_errors

_FORWARD_HOOKS: dict[int, Callable[..., Any]] = torch.nn.modules.module._global_forward_hooks
_GIVEN_KEYWORDS: dict[int, bool] = torch.nn.modules.module._global_forward_hooks_with_kwargs


@dataclass(eq=False)
class Use:
    """One call of a layer, whose backward pass is still to come."""

    layer: Layer
    names: list[str]
    """Which of its parameters were trained at the time."""
    constant: bool | Tensor
    """What `LayerHooks.is_constant` said of its input."""
    statistics: Statistics | None
    """See `Layer.statistics`."""
    kept: Tensor | None
    """What saved the input."""
    over: bool = False
    """Whether the input has been taken."""

    @property
    def needs_input(self) -> bool:
        """Whether the gradients depend on the input of the layer; gradients of biases do not."""
        return "weight" in self.names

    def take(self) -> Tensor | None:
        """Return the input once, and free it; None if it has been changed in place since."""
        kept, self.kept, self.over = self.kept, None, True
        if kept is None:
            return None
        try:
            # torch types a node of the graph without what its function saved.
            (x,) = kept.grad_fn.saved_tensors  # type: ignore[union-attr]
        except RuntimeError:  # legal where autograd itself saved a 16-bit copy, under autocast
            return None
        return x  # type: ignore[no-any-return] # likewise


class LayerHooks(HookErrors):
    """One hook on the forward passes of all modules, which watches some layers.

    A hook in a layer itself would be in the way of others: TorchScript cannot compile it, copies
    and pickles of the model would hold it, and torch's inference fast path, whose results differ in
    the last bit, is not taken where there is one. This hook runs before all others, so it sees the
    layer's output before another hook changes it.

    Args:
        on_output_gradient: Called in the backward pass with the use and its output's gradient.
        is_constant: Called in the forward pass with the layer's input.
    """

    def __init__(
        self,
        on_output_gradient: Callable[[Use, Tensor], None],
        is_constant: Callable[[Tensor], bool | Tensor],
    ) -> None:
        self._watching = True
        self._on_output_gradient = on_output_gradient
        self._is_constant = is_constant
        self._anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._layer_of: dict[int, Layer] = {}
        self._show: Callable[[bool], None] | None = None

    def look(self, watching: bool) -> None:
        """Start or stop watching forward passes. While stopped, no module has a hook."""
        if watching != self._watching:
            self._watching = watching
            self._watch()

    def install(self, layers: Sequence[Layer]) -> None:
        """Watch these layers and no others."""
        self._layer_of = {id(layer.module): layer for layer in layers}
        self._watch()

    def _watch(self) -> None:
        watching = self._watching and bool(self._layer_of)
        if self._show is not None:
            self._show(watching)
        elif watching:
            self._show = _show_forward_passes(weakref.ref(self))

    @keeps_errors
    def on_module(
        self, module: nn.Module, args: tuple[Any, ...], output: Any, kwargs: dict[str, Any]
    ) -> None:
        """Record a call of a module, if it is one of the layers."""
        layer = self._layer_of.get(id(module))
        if layer is None or not (args or kwargs):
            return
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # untyped
            return
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(x, Tensor) and isinstance(output, Tensor):
            self.on_forward(layer, x, output)

    def on_forward(self, layer: Layer, x: Tensor, output: Tensor) -> None:
        """Keep the input of a layer until the gradient of its output arrives.

        This includes evaluation mode: a backbone may be trained with its dropout off.
        """
        if (
            not torch.is_grad_enabled()
            or not output.requires_grad
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
            use = Use(layer, names, self._is_constant(x), layer.statistics(output), kept)
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


def _show_forward_passes(owner: weakref.ref[LayerHooks]) -> Callable[[bool], None]:
    """Show the owner all modules' forward passes, and return what turns that off and on again.

    It is always under one key: before torch 2.9 Dynamo compiles again for each key, and after eight
    no more.
    """

    def on_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # first, so that compiled code has no more of this
            return
        if (hooks := owner()) is None:
            show(False)
        else:
            hooks.on_module(module, args, output, kwargs)

    def show(watching: bool) -> None:
        if watching:
            _FORWARD_HOOKS[handle.id] = on_forward
            _GIVEN_KEYWORDS[handle.id] = True
        else:
            handle.remove()
            _GIVEN_KEYWORDS.pop(handle.id, None)

    handle = register_module_forward_hook(on_forward, with_kwargs=True)
    return show
