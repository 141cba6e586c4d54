# SPDX-License-Identifier: Apache-2.0
"""Training in which DDP does not average gradients: each rank steps on its own."""
