# SPDX-License-Identifier: Apache-2.0
"""Norms of single examples, layer by layer. For your own layers see `register_layer`."""

from noisescale.collectors.per_example.collector import Layers as Layers
from noisescale.collectors.per_example.collector import PerExampleCollector as PerExampleCollector
from noisescale.collectors.per_example.layers import Layer as Layer
from noisescale.collectors.per_example.layers import LinearLayer as LinearLayer
from noisescale.collectors.per_example.layers import register_layer as register_layer
from noisescale.collectors.per_example.norms import ExampleGradient as ExampleGradient
from noisescale.collectors.per_example.norms import Lookup as Lookup
from noisescale.collectors.per_example.norms import Outer as Outer
from noisescale.collectors.per_example.norms import Summed as Summed
