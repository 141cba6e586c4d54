# SPDX-License-Identifier: Apache-2.0
"""What methods have in common that combine tensors of ranks by other rules than the mean."""
