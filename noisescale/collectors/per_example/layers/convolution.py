# SPDX-License-Identifier: Apache-2.0
"""Convolutions.

Private attribute read here, as of torch 2.13: `_reversed_padding_repeated_twice`.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F

from noisescale.collectors.per_example.layers.layer import Layer
from noisescale.collectors.per_example.norms import Outer, Summed


class ConvLayer(Layer):
    """A linear map of the patch around every output pixel, for each group of channels.

    Positions are output pixels, and a_t the patch that pixel t was computed from.
    """

    module: nn.Conv1d | nn.Conv2d
    features_last = False

    def has_batch(self, d: Tensor) -> bool:
        """Return whether the output has a batch dimension: (channels, pixels) alone has none."""
        return d.dim() == self.module.weight.dim()

    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """Return the size of the patches: the input once for every number in the kernel."""
        if x is None:
            return 0
        padded = x.numel() if self._pads_first else 0
        patch = self.module.in_channels * math.prod(self.module.kernel_size)
        return padded + len(d) * math.prod(d.shape[2:]) * patch

    def weight(self, x: Tensor, d: Tensor) -> Outer:
        """g_i = Σ_t d_t a_tᴴ, for each group."""
        groups = self.module.groups
        return Outer(
            self._patches(x).conj().unflatten(1, (groups, -1)).flatten(0, 1).mT,
            d.flatten(2).unflatten(1, (groups, -1)).flatten(0, 1).mT,
            groups,
        )

    def bias(self, d: Tensor) -> Summed:
        """g_i = Σ_t d_t."""
        return Summed(d.flatten(2).mT)

    @property
    def _pads_first(self) -> bool:
        return isinstance(self.module.padding, str) or self.module.padding_mode != "zeros"

    def _patches(self, x: Tensor) -> Tensor:
        """Return the patches, shape (b, channels · kernel, output pixels)."""
        conv = self.module
        padding = conv.padding
        if isinstance(padding, str) or conv.padding_mode != "zeros":
            mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
            x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * len(conv.kernel_size)
        if all(n == 1 for n in (*conv.kernel_size, *conv.stride)) and not any(padding):
            return x.flatten(2)
        if x.dim() == 3:  # one-dimensional: a picture of height 1
            window = (1, *conv.kernel_size), (1, *conv.dilation), (0, *padding), (1, *conv.stride)
            return F.unfold(x.unsqueeze(2), *window)
        return F.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)
