# SPDX-License-Identifier: Apache-2.0
"""Callbacks for the Lightning Trainer, thin: everything they compute is done elsewhere."""
