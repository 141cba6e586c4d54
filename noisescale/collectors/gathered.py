# SPDX-License-Identifier: Apache-2.0
"""Losses that see the rows of other ranks, as contrastive losses with more negatives do.

The gradients of ranks are not independent then: each rank's depends on what the others have drawn.
A collective that gradients flow through is a node of the graph. One without a gradient is not seen.
"""

from __future__ import annotations

import re

import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from noisescale.collectors.halves.graph import Node, next_nodes, walk

_LOOKS = 2
"""Backward passes that are looked at: in the first, some losses are not what they are later."""

_GATHER = re.compile("all_?gather", re.IGNORECASE)


class GatheredRows:
    """Finds such a collective in the first backward passes of a training, on this rank.

    Args:
        group: The ranks that are compared; None where one process trains.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # Where other ranks share a model's parts, they gather what is no row of theirs.
        alone = group is None or dist.get_world_size(group) < dist.get_world_size()
        self._looks_left = 0 if alone else _LOOKS
        self._found: str | None = None

    def find_in_graph(self, loss: Tensor) -> str | None:
        """Name the collective that rows of other ranks come from, if there is one."""
        if self._looks_left > 0 or self._found is not None:
            self._looks_left -= 1
            start = getattr(loss, "grad_fn", None)
            self._found = None if start is None else _gathering_node(start)
        return self._found


def _gathering_node(start: Node) -> str | None:
    nodes = walk([start], next_nodes)
    return next((str(node.name()) for node in nodes if _gathers(node)), None)


def _gathers(node: Node) -> bool:
    """Return whether a Function is such a collective by name, or calls one in its forward pass."""
    if not issubclass(type(node), BackwardCFunction):
        return False
    made_by = getattr(type(node), "_forward_cls", None)
    if str(getattr(made_by, "__module__", "")).startswith("torch.nn.modules."):
        return False  # SyncBatchNorm gathers statistics
    code = getattr(getattr(made_by, "forward", None), "__code__", None)
    called = () if code is None else code.co_names
    return any(_GATHER.search(name) for name in (node.name(), *called))
