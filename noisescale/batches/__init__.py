# SPDX-License-Identifier: Apache-2.0
"""How many examples a batch holds, and whether ranks share them."""
