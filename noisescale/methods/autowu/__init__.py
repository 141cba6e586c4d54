# SPDX-License-Identifier: Apache-2.0
"""AutoWU (Kim et al. 2021): a warm-up that ends where the loss does not fall any more."""
