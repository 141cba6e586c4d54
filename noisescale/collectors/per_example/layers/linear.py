# SPDX-License-Identifier: Apache-2.0
"""Linear maps."""

from __future__ import annotations

from torch import Tensor

from noisescale.collectors.per_example.layers.layer import Layer, positions_in_the_middle
from noisescale.collectors.per_example.norms import Outer


class LinearLayer(Layer):
    """y_t = W a_t + bias. All dimensions between the batch and the features are positions."""

    def weight(self, x: Tensor, d: Tensor) -> Outer:
        """g_i = Σ_t d_t a_tᴴ."""
        return Outer(positions_in_the_middle(x).conj(), positions_in_the_middle(d))
