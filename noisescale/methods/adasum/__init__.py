# SPDX-License-Identifier: Apache-2.0
"""Adasum (Maleki et al. 2020): combine the gradients or deltas of ranks by their angles."""
