# SPDX-License-Identifier: Apache-2.0
"""What each kind of layer reads and gives: from its input and its output's gradient to formulas.

Every kind says how its forward uses a parameter, with the batch in front: the input is (b, ...)
with any number of positions between the batch and the features. A module counts as of a kind
where its forward is that of the torch class, subclass or not.

Private attributes read here, as of torch 2.13: `_reversed_padding_repeated_twice` of convolutions,
`_saved_result1` and `_saved_result2` of autograd's node of LayerNorm, and (since torch 2.8)
`torch._C._autograd._top_saved_tensors_default_hooks`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisescale.collectors.per_example.norms import (
    TEMPORARY_BYTES,
    ExampleGradient,
    Lookup,
    Normalized,
    Outer,
    Summed,
)

Gradients = dict[str, ExampleGradient]
"""From a parameter's name in its module to its gradients."""

Statistics = tuple[Tensor, ...]
"""Mean and inverse standard deviation of what was normalized together, shape (b, ..., 1)."""


class Layer(ABC):
    """A module, and which of its parameters are measured.

    Args:
        module: The module.
        indices: From the names of its measured parameters to what the collector calls them.
    """

    bytes_on_cpu: int | None = None
    """What a chunk may take there; None: as much as elsewhere."""

    def __init__(self, module: nn.Module, indices: dict[str, int]) -> None:
        self.module = module
        self.indices = indices

    def in_chunks(
        self,
        x: Tensor | None,
        d: Tensor,
        names: list[str],
        statistics: Statistics | None = None,
    ) -> Iterator[Gradients]:
        """Yield the gradients of some examples at a time, in at least 32 bits.

        Args:
            x: The module's input, shape (b, ...); None will do where no weight is asked for.
            d: The gradient of its output.
            names: Which parameters.
            statistics: What `statistics` gave of the output.
        """
        # Squares overflow 16 bits. Wider than its output an input is under autocast only.
        dtype = torch.promote_types(d.dtype, torch.float32)
        wanted = x if x is not None and "weight" in names else None
        copied = [y for y in (wanted, d) if y is not None and y.dtype != dtype]
        numbers = sum(y.numel() for y in copied) + self.temporaries(wanted, d)
        b = len(d)
        at_once = (d.is_cpu and self.bytes_on_cpu) or TEMPORARY_BYTES
        per_chunk = max(at_once * b // max(numbers * dtype.itemsize, 1), 1)
        for start in range(0, max(b, 1), per_chunk):
            some = slice(start, start + per_chunk)
            x_some = None if wanted is None else self._widened(wanted[some], dtype)
            stats = statistics and tuple(y[some].to(dtype) for y in statistics)
            yield self.gradients(x_some, d[some].to(dtype), names, stats)

    def statistics(self, output: Tensor) -> Statistics | None:
        """What the forward pass has computed that spares computing it again; None: nothing."""
        return None

    def _widened(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    @abstractmethod
    def has_batch(self, d: Tensor) -> bool:
        """Whether the first dimension of the output is not one of features."""

    @abstractmethod
    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """How many numbers `gradients` would allocate for the whole batch."""

    @abstractmethod
    def gradients(
        self,
        x: Tensor | None,
        d: Tensor,
        names: list[str],
        statistics: Statistics | None = None,
    ) -> Gradients:
        """Describe the gradients of all examples; see `in_chunks`."""


class LinearLayer(Layer):
    """y_t = W a_t + bias."""

    def has_batch(self, d: Tensor) -> bool:
        """A vector alone has none."""
        return d.dim() > 1

    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """None but those of the formulas, which take care of their own."""
        return 0

    def gradients(
        self,
        x: Tensor | None,
        d: Tensor,
        names: list[str],
        statistics: Statistics | None = None,
    ) -> Gradients:
        """All dimensions between the batch and the features are positions."""
        found: Gradients = {}
        d = _positions_in_the_middle(d)
        if x is not None and "weight" in names:
            found["weight"] = Outer(_positions_in_the_middle(x).conj(), d)
        if "bias" in names:
            found["bias"] = Summed(d)
        return found


class ConvLayer(Layer):
    """A linear map of the patch around every output pixel, for each group of channels."""

    module: nn.Conv1d | nn.Conv2d

    def has_batch(self, d: Tensor) -> bool:
        """(channels, pixels) alone has none."""
        return d.dim() == self.module.weight.dim()

    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """The patches: the input once for every number in the kernel."""
        if x is None:
            return 0
        padded = x.numel() if self._pads_first else 0
        return padded + len(d) * math.prod(d.shape[2:]) * self._patch

    def gradients(
        self,
        x: Tensor | None,
        d: Tensor,
        names: list[str],
        statistics: Statistics | None = None,
    ) -> Gradients:
        """Positions are output pixels, and a_t the patch that pixel t was computed from."""
        found: Gradients = {}
        d = d.flatten(2)
        if x is not None and "weight" in names:
            groups = self.module.groups
            a = self._patches(x)
            found["weight"] = Outer(
                a.conj().unflatten(1, (groups, -1)).flatten(0, 1).mT,
                d.unflatten(1, (groups, -1)).flatten(0, 1).mT,
                groups,
            )
        if "bias" in names:
            found["bias"] = Summed(d.mT)
        return found

    @property
    def _patch(self) -> int:
        return self.module.in_channels * math.prod(self.module.kernel_size)

    @property
    def _pads_first(self) -> bool:
        return isinstance(self.module.padding, str) or self.module.padding_mode != "zeros"

    def _patches(self, x: Tensor) -> Tensor:
        """Shape (b, channels · kernel, output pixels)."""
        conv = self.module
        padding = conv.padding
        if isinstance(padding, str) or conv.padding_mode != "zeros":
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * len(conv.kernel_size)
        if all(n == 1 for n in (*conv.kernel_size, *conv.stride)) and not any(padding):
            return x.flatten(2)
        if x.dim() == 3:  # one-dimensional: a picture of height 1
            (kernel,), (dilation,), (pad,), (stride,) = (
                conv.kernel_size,
                conv.dilation,
                padding,
                conv.stride,
            )
            return F.unfold(x.unsqueeze(2), (1, kernel), (1, dilation), (0, pad), (1, stride))
        return F.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)


class EmbeddingLayer(Layer):
    """y_t = row id_t of W."""

    module: nn.Embedding

    def has_batch(self, d: Tensor) -> bool:
        """One id alone has none."""
        return d.dim() > 1

    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """None but those of the formulas, which take care of their own."""
        return 0

    def gradients(
        self,
        x: Tensor | None,
        d: Tensor,
        names: list[str],
        statistics: Statistics | None = None,
    ) -> Gradients:
        """All dimensions but the batch's are positions."""
        if x is None:
            return {}
        ids = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        table, padding = self.module.num_embeddings, self.module.padding_idx
        return {"weight": Lookup(ids, _positions_in_the_middle(d), table, padding)}

    def _widened(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x


class NormLayer(Layer):
    """y_t = gain ⊙ x̂_t + bias, x̂ the normalized input, computed again."""

    module: nn.LayerNorm | nn.RMSNorm
    bytes_on_cpu = 2**22  # work that is read again at once is a tenth faster from the cache

    def has_batch(self, d: Tensor) -> bool:
        """What is normalized together is one example at the most."""
        return d.dim() > len(self.module.normalized_shape)

    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """x̂ and its products with d."""
        return 0 if x is None else 2 * d.numel()

    def gradients(
        self,
        x: Tensor | None,
        d: Tensor,
        names: list[str],
        statistics: Statistics | None = None,
    ) -> Gradients:
        """All dimensions between the batch and the normalized ones are positions."""
        found: Gradients = {}
        if x is not None and "weight" in names:
            if statistics is None:
                found["weight"] = Summed(self.terms(self.normalized(x).mul_(d)))
            else:
                of_positions = [y.flatten(1) for y in statistics]
                found["weight"] = Normalized(self.terms(x), self.terms(d), *of_positions)
        if "bias" in names:
            found["bias"] = Summed(self.terms(d))
        return found

    def statistics(self, output: Tensor) -> Statistics | None:
        """Those that autograd saved for LayerNorm, which makes x̂ superfluous.

        Not where hooks on saved tensors (checkpointing, offloading) would have to bring them
        back, nor where they have been rounded to 16 bits.
        """
        node = output.grad_fn
        if node is None or node.name() != "NativeLayerNormBackward0" or _saved_by_hooks():
            return None
        # Nodes have what they saved as attributes, which torch does not declare.
        statistics: Statistics = (node._saved_result1, node._saved_result2)  # type: ignore[attr-defined]
        return statistics if statistics[0].element_size() >= 4 else None

    def normalized(self, x: Tensor) -> Tensor:
        """x̂, a tensor of its own."""
        shape = list(self.module.normalized_shape)
        if isinstance(self.module, nn.LayerNorm):
            return F.layer_norm(x, shape, eps=self.module.eps)
        return F.rms_norm(x, shape, eps=self.module.eps)

    def terms(self, y: Tensor) -> Tensor:
        """Shape (b, positions, numbers of a parameter)."""
        return _positions_in_the_middle(y.flatten(-len(self.module.normalized_shape)))


class GroupNormLayer(NormLayer):
    """The same with one gain a channel."""

    module: nn.GroupNorm  # type: ignore[assignment] # one kind for another: never both

    def has_batch(self, d: Tensor) -> bool:
        """It always has."""
        return True

    def normalized(self, x: Tensor) -> Tensor:
        """x̂, a tensor of its own."""
        return F.group_norm(x, self.module.num_groups, eps=self.module.eps)

    def terms(self, y: Tensor) -> Tensor:
        """All dimensions after the channels are positions."""
        return y.unsqueeze(1) if y.dim() == 2 else y.flatten(2).mT


def _positions_in_the_middle(x: Tensor) -> Tensor:
    """Shape (b, t, features) of (b, ..., features)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


NORMALIZATION: dict[type[nn.Module], type[Layer]] = {
    nn.LayerNorm: NormLayer,
    nn.RMSNorm: NormLayer,
    nn.GroupNorm: GroupNormLayer,
}
ALL: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    nn.Embedding: EmbeddingLayer,
    **NORMALIZATION,
}


def kind_of(
    module: nn.Module, kinds: dict[type[nn.Module], type[Layer]] = ALL
) -> type[Layer] | None:
    """Return what has formulas for a module; None if nothing has.

    An embedding whose gradient is not the plain sum (sparse, scaled by frequency, renormalized
    in the forward) has none.
    """
    if isinstance(module, nn.Embedding) and (
        module.sparse or module.scale_grad_by_freq or module.max_norm is not None
    ):
        return None
    for base, kind in kinds.items():
        if not isinstance(module, base):
            continue  # first: the class of a traced module raises where it is asked for `forward`
        if "forward" not in vars(module) and type(module).forward is base.forward:
            return kind
    return None


def _saved_by_hooks() -> bool:
    """Whether hooks hold what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
