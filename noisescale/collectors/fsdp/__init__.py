# SPDX-License-Identifier: Apache-2.0
"""Norms under FSDP2: of each rank before the reduce-scatter."""

from noisescale.collectors.fsdp.collector import FsdpCollector as FsdpCollector
