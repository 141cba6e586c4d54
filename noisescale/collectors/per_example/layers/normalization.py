# SPDX-License-Identifier: Apache-2.0
"""Normalization within examples, followed by a gain and a bias.

Private attributes read here, as of torch 2.13: `_saved_result1` and `_saved_result2` of autograd's
node of LayerNorm, and (since torch 2.8) `torch._C._autograd._top_saved_tensors_default_hooks`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisescale.collectors.per_example.layers.layer import (
    Layer,
    Statistics,
    positions_in_the_middle,
)
from noisescale.collectors.per_example.norms import Normalized, Summed


class NormLayer(Layer):
    """y_t = gain ⊙ x̂_t + bias, x̂ the normalized input, computed again.

    All dimensions between the batch and the normalized ones are positions.
    """

    module: nn.LayerNorm | nn.RMSNorm
    bytes_on_cpu = 2**22  # work that is read again at once is a tenth faster from the cache

    def has_batch(self, d: Tensor) -> bool:
        """Return whether d has dimensions before those that are normalized together.

        These hold one example at the most.
        """
        return d.dim() > len(self.module.normalized_shape)

    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """Return the size of x̂ and of its products with d."""
        return 0 if x is None else 2 * d.numel()

    def weight(self, x: Tensor, d: Tensor) -> Summed:
        """g_i = Σ_t d_t ⊙ x̂_t."""
        return Summed(self.terms(self.normalize(x).mul_(d)))

    def weight_by(self, statistics: Statistics, x: Tensor, d: Tensor) -> Normalized:
        """Describe the gradients of the weight without x̂."""
        return Normalized(self.terms(x), self.terms(d), *[y.flatten(1) for y in statistics])

    def bias(self, d: Tensor) -> Summed:
        """g_i = Σ_t d_t."""
        return Summed(self.terms(d))

    def statistics(self, output: Tensor) -> Statistics | None:
        """Return the statistics that autograd saved for LayerNorm: x̂ is superfluous with them.

        None if hooks on saved tensors (checkpointing, offloading) would have to bring the
        statistics back, or if they have been rounded to 16 bits.
        """
        node = output.grad_fn
        if node is None or node.name() != "NativeLayerNormBackward0" or _saved_by_hooks():
            return None
        # Nodes have what they saved as attributes, which torch does not declare.
        statistics: Statistics = (node._saved_result1, node._saved_result2)  # type: ignore[attr-defined]
        return statistics if statistics[0].element_size() >= 4 else None

    def normalize(self, x: Tensor) -> Tensor:
        """Return x̂ as a tensor of its own."""
        shape = list(self.module.normalized_shape)
        if isinstance(self.module, nn.LayerNorm):
            return F.layer_norm(x, shape, eps=self.module.eps)
        return F.rms_norm(x, shape, eps=self.module.eps)

    def terms(self, y: Tensor) -> Tensor:
        """View y as (b, positions, numbers of a parameter)."""
        return positions_in_the_middle(y.flatten(-len(self.module.normalized_shape)))


class GroupNormLayer(NormLayer):
    """A `NormLayer` with one gain a channel. All dimensions after the channels are positions."""

    module: nn.GroupNorm  # type: ignore[assignment] # one kind for another: never both
    features_last = False

    def has_batch(self, d: Tensor) -> bool:
        """Return True: the input of GroupNorm always has a batch."""
        return True

    def normalize(self, x: Tensor) -> Tensor:
        """Return x̂ as a tensor of its own."""
        return F.group_norm(x, self.module.num_groups, eps=self.module.eps)

    def terms(self, y: Tensor) -> Tensor:
        """View y as (b, positions, channels)."""
        return y.unsqueeze(1) if y.dim() == 2 else y.flatten(2).mT


def _saved_by_hooks() -> bool:
    """Return whether hooks hold what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
