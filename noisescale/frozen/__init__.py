# SPDX-License-Identifier: Apache-2.0
"""The noise scale at fixed weights, from independent batches: `measure`."""
