# SPDX-License-Identifier: Apache-2.0
"""Norms of single examples, layer by layer."""

from noisescale.collectors.per_example.collector import Layers as Layers
from noisescale.collectors.per_example.collector import PerExampleCollector as PerExampleCollector
