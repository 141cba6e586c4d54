# SPDX-License-Identifier: Apache-2.0
"""Meters: a collector and its estimates in one object, optionally with a clock and a history."""

from noisescale.meter.noise_scale_meter import NoiseScaleMeter as NoiseScaleMeter
