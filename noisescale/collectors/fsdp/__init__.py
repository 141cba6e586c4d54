# SPDX-License-Identifier: Apache-2.0
"""Norms under FSDP2: each rank's gradient, before the reduce-scatter."""

from noisescale.collectors.fsdp.collector import FsdpCollector as FsdpCollector
