# SPDX-License-Identifier: Apache-2.0
"""Thin callbacks for the Lightning Trainer: other rooms do the computing."""
