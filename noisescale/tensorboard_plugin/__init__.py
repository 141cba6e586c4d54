# SPDX-License-Identifier: Apache-2.0
"""The page "Noise scale" in TensorBoard. Imports nothing: TensorBoard imports it at its start."""
