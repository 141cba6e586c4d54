# SPDX-License-Identifier: Apache-2.0
"""A collector and the estimates behind one object, and with a clock and a history."""

from noisescale.meter.meter import NoiseScaleMeter as NoiseScaleMeter
