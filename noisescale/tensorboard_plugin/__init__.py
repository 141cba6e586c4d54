# SPDX-License-Identifier: Apache-2.0
"""The tab "Noise scale" in TensorBoard. TensorBoard imports this file at its start."""
