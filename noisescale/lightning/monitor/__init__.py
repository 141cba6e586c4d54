# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMonitor, and what it logs, writes and reports."""
