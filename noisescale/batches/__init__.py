# SPDX-License-Identifier: Apache-2.0
"""How many examples a batch holds, and whether ranks train on the same examples."""
