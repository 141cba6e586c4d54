# SPDX-License-Identifier: Apache-2.0
"""Norms where each rank keeps a shard of the gradient: FSDP1 and FSDP2."""
