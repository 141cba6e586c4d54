# SPDX-License-Identifier: Apache-2.0
"""What the norms of single examples are made of."""
