# SPDX-License-Identifier: Apache-2.0
"""Branches from a checkpoint at other batch sizes: `noisescale branch`."""
