# SPDX-License-Identifier: Apache-2.0
"""Which batch size to train at now, how to make it up, and which learning rate goes with it."""
