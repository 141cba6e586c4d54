# SPDX-License-Identifier: Apache-2.0
"""Which kind of layer a module is.

A module counts as of a kind where its forward is that of the registered class, subclass or not.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from noisescale.collectors.per_example.layers.convolution import ConvLayer
from noisescale.collectors.per_example.layers.layer import Layer
from noisescale.collectors.per_example.layers.linear import EmbeddingLayer, LinearLayer
from noisescale.collectors.per_example.layers.normalization import GroupNormLayer, NormLayer

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
    """Have `small_batch="example"` measure modules of a class of your own.

    Monitors and meters that are made afterwards know it. The first measured step compares what
    `layer` gives with the gradient of autograd: a parameter that disagrees is left out by name.

    Args:
        module: The class. Its parameters `weight` and `bias` are measured, and no others. A
            subclass counts as well, unless it has another `forward`.
        layer: A subclass of `Layer` with the formulas. They are given the first argument of
            `forward` and the gradient of what it returned, both with the batch in front.
        normalization: Whether `layers="normalization"` asks for it, too.

    Raises:
        TypeError: If these are not such classes.

    Example:
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
        ...     meter.step()
        >>> meter.measured_steps  # the first step was the comparison
        2
        >>> meter.close()
    """
    for name, value, base in (("module", module, nn.Module), ("layer", layer, Layer)):
        if not (isinstance(value, type) and issubclass(value, base)):
            raise TypeError(
                f"`{name}` must be a subclass of {base.__name__}, got {value!r}. Pass the class"
                " itself."
            )
    ALL[module] = layer
    if normalization:
        NORMALIZATION[module] = layer


def kind_of(module: nn.Module, kinds: Kinds = ALL) -> type[Layer] | None:
    """Return what has formulas for a module; None if nothing has."""
    base: Any
    for base in type(module).__mro__:
        kind = kinds.get(base)
        if kind is None:
            continue  # first: the class of a traced module raises where it is asked for `forward`
        if "forward" not in vars(module) and type(module).forward is base.forward:
            return kind if kind.supports(module) else None
    return None
