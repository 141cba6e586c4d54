# SPDX-License-Identifier: Apache-2.0
"""Concurrent adversarial learning: adversarial copies of the next batch, made beside the step."""
