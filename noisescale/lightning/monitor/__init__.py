# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMonitor: measure the noise scale, log it and report on it."""
