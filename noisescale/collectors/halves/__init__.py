# SPDX-License-Identifier: Apache-2.0
"""Compare the two halves of one batch, in one process without accumulation."""
