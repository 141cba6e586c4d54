# SPDX-License-Identifier: Apache-2.0
"""Find the formulas for a module.

A module belongs to a kind if its forward is the forward of the registered class; it may be of a
subclass.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from noisescale.collectors.per_example.layers.convolution import ConvLayer
from noisescale.collectors.per_example.layers.layer import Layer
from noisescale.collectors.per_example.layers.linear import EmbeddingLayer, LinearLayer
from noisescale.collectors.per_example.layers.normalization import GroupNormLayer, NormLayer
from noisescale.refusal import TypeRefusal

Kinds = dict[type[nn.Module], type[Layer]]

NORMALIZATION: Kinds = {
    nn.LayerNorm: NormLayer,
    nn.RMSNorm: NormLayer,
    nn.GroupNorm: GroupNormLayer,
}
ALL: Kinds = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Embedding: EmbeddingLayer,
    **NORMALIZATION,
}


def register_layer(
    module: type[nn.Module], layer: type[Layer], *, normalization: bool = False
) -> None:
    """Let `small_batch="example"` measure modules of your own class.

    Monitors and meters that are made afterwards use it. The first measured step compares the
    gradients by `layer` with autograd's gradients. A parameter whose gradients differ is left out,
    and a warning names it.

    Args:
        module: The class. Only its parameters `weight` and `bias` are measured. Subclasses with the
            same `forward` are measured too.
        layer: A subclass of `Layer` with the formulas. They get the first argument of `forward` and
            the gradient of its output, both with the batch as the first dimension.
        normalization: Whether `layers="normalization"` includes it.

    Raises:
        TypeError: If an argument is not such a class.

    Examples:
        A linear map whose weight has the shape (inputs, outputs), as that of GPT-2's `Conv1D`:

        >>> import torch
        >>> from noisescale.collectors.per_example import LinearLayer, Outer, register_layer
        >>> class Transposed(torch.nn.Module):
        ...     def __init__(self, inputs, outputs):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.randn(inputs, outputs))
        ...         self.bias = torch.nn.Parameter(torch.zeros(outputs))
        ...     def forward(self, x):
        ...         return x @ self.weight + self.bias
        >>> class TransposedLayer(LinearLayer):
        ...     def weight(self, x, d):
        ...         a, d, _ = super().weight(x, d)
        ...         return Outer(d, a)
        >>> register_layer(Transposed, TransposedLayer)

        >>> from noisescale import NoiseScaleMeter
        >>> model = Transposed(5, 3)
        >>> meter = NoiseScaleMeter(model, small_batch="example")
        >>> for _ in range(3):
        ...     model.zero_grad()
        ...     meter.backward(model(torch.randn(8, 5)).square().mean(), local_batch_size=8)
        ...     closed = meter.step()
        >>> meter.measured_steps  # the first step was the comparison
        2
        >>> meter.close()
    """
    for name, value, base in (("module", module, nn.Module), ("layer", layer, Layer)):
        if not (isinstance(value, type) and issubclass(value, base)):
            raise TypeRefusal(
                name, f"be a subclass of {base.__name__}", repr(value), "Pass the class itself."
            )
    ALL[module] = layer
    if normalization:
        NORMALIZATION[module] = layer


def kind_of(module: nn.Module, kinds: Kinds = ALL) -> type[Layer] | None:
    """Return the kind of layer with the formulas for a module; None if there is none."""
    base: Any
    for base in type(module).__mro__:
        kind = kinds.get(base)
        if kind is None:
            continue  # first: the class of a traced module raises where it is asked for `forward`
        if "forward" not in vars(module) and type(module).forward is base.forward:
            return kind if kind.supports(module) else None
    return None
