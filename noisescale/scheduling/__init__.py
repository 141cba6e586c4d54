# SPDX-License-Identifier: Apache-2.0
"""Batch sizes and learning rates that follow the training run."""
