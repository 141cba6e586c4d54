# SPDX-License-Identifier: Apache-2.0
"""The formulas of each kind of layer, from its input and the gradient of its output."""

from noisescale.collectors.per_example.layers.convolution import ConvLayer as ConvLayer
from noisescale.collectors.per_example.layers.kinds import ALL as ALL
from noisescale.collectors.per_example.layers.kinds import NORMALIZATION as NORMALIZATION
from noisescale.collectors.per_example.layers.kinds import kind_of as kind_of
from noisescale.collectors.per_example.layers.kinds import register_layer as register_layer
from noisescale.collectors.per_example.layers.layer import Gradients as Gradients
from noisescale.collectors.per_example.layers.layer import Layer as Layer
from noisescale.collectors.per_example.layers.layer import Statistics as Statistics
from noisescale.collectors.per_example.layers.linear import EmbeddingLayer as EmbeddingLayer
from noisescale.collectors.per_example.layers.linear import LinearLayer as LinearLayer
from noisescale.collectors.per_example.layers.normalization import GroupNormLayer as GroupNormLayer
from noisescale.collectors.per_example.layers.normalization import NormLayer as NormLayer
