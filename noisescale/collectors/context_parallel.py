# SPDX-License-Identifier: Apache-2.0
"""Whether ranks share the tokens of one batch, as in context and sequence parallelism.

The gradients of such ranks are averaged like those of data parallel ranks, and a mesh that was
flattened does not show which ranks share a batch. They are no independent small batches.

Private attribute read here, as of torch 2.13: `torch.distributed.distributed_c10d._world`. A mesh
keeps the one that it was made from. It describes the group of its dimension `cp` as "mesh_cp", also
where the mesh of the gradients was not made from it (torchtitan, verl).
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator

import torch.distributed as dist

from noisescale.guard import NotMeasured

_CONTEXT = re.compile(
    r"(?:mesh_)?(?:cp|sp|ulysses|ring|seq|sequence|context)(?:_?\d+)?(?:_?parallel)?", re.IGNORECASE
)
"""Names of dimensions: cp (torchtitan), sp (accelerate, verl), cp0 and cp1, and in full."""


def refuse_context_parallel() -> None:
    """Raise if this rank shares its batch with others.

    All objects of the process are searched for meshes: call it once for a model.

    Raises:
        NotMeasured: If a dimension of a mesh is one of context parallelism.
    """
    for name, size in (*_dimensions_of_meshes(), *_groups()):
        if size > 1 and _CONTEXT.fullmatch(name):
            raise NotMeasured(
                f"`model` must be data parallel only, got context parallelism over {size} ranks"
                f" (mesh dimension {name.removeprefix('mesh_')!r}): these ranks share the tokens of"
                " one batch, and their gradients are not independent. Train without context"
                " parallelism."
            )


def _dimensions_of_meshes() -> Iterator[tuple[str, int]]:
    """Yield those of all meshes: one over all ranks has the default group, without a name."""
    module = sys.modules.get("torch.distributed.device_mesh")
    kind = getattr(module, "DeviceMesh", None)
    if kind is None:
        return
    # A mesh refers to its class. Forked ranks would copy all objects that a list of them touches.
    for mesh in [one for one in gc.get_referrers(kind) if type(one) is kind]:
        yield from zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)


def _groups() -> Iterator[tuple[str, int]]:
    for group in dist.distributed_c10d._world.pg_map:
        yield group.group_desc, group.size()
