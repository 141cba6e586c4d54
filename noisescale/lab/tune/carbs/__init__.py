# SPDX-License-Identifier: Apache-2.0
"""Cost-aware search along the front of cost and performance (Fetterman et al. 2023)."""
