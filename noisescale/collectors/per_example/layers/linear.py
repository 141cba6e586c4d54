# SPDX-License-Identifier: Apache-2.0
"""Linear maps, and tables whose rows are read: linear maps of one number that is 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from noisescale.collectors.per_example.layers.layer import Layer, positions_in_the_middle
from noisescale.collectors.per_example.norms import Lookup, Outer


class LinearLayer(Layer):
    """y_t = W a_t + bias. All dimensions between the batch and the features are positions."""

    def weight(self, x: Tensor, d: Tensor) -> Outer:
        """g_i = Σ_t d_t a_tᴴ."""
        return Outer(positions_in_the_middle(x).conj(), positions_in_the_middle(d))


class EmbeddingLayer(Layer):
    """y_t = row id_t of W. All dimensions but the batch's are positions."""

    module: nn.Embedding

    @classmethod
    def supports(cls, module: nn.Embedding) -> bool:
        """Not where the gradient is no plain sum: sparse, scaled by frequency, or renormalized."""
        return not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)

    def weight(self, x: Tensor, d: Tensor) -> Lookup:
        """Row r of g_i is Σ d_t over the t with id_t = r."""
        ids = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        table, padding = self.module.num_embeddings, self.module.padding_idx
        return Lookup(ids, positions_in_the_middle(d), table, padding)

    def _widen(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x
