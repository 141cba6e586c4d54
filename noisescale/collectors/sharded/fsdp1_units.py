# SPDX-License-Identifier: Apache-2.0
"""FSDP1's units (`FullyShardedDataParallel`): their flat parameters, and what lies where in them.

FSDP1 lays the parameters of a unit end to end in one flat parameter. Autograd writes the unit's
local gradient to it, unsharded; after that FSDP1 reduces it and keeps this rank's shard.

Private attributes read here, as of torch 2.13: of an FSDP module `_handle`, `_inter_node_pg`,
`_comm_hook`, `_gradient_predivide_factor`, `_gradient_postdivide_factor` and `_sync_gradients`; of
a handle `flat_param`, `_use_orig_params` and `_offload_params`; of a flat parameter
`_param_extensions`, `_fqns`, `_params`, `_numels_with_padding`, `_is_padding_mask` and
`_shard_param_infos`; `clean_tensor_name`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from noisescale.collectors.context_parallel import refuse_context_parallel
from noisescale.collectors.gradient_norms import Piece
from noisescale.guard import NotMeasured


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether FullyShardedDataParallel wraps any module of the model, or the model."""
    # By name, for a torch that was built without distributed.
    return any(
        kind.__name__ == "FullyShardedDataParallel"
        for module in model.modules()
        for kind in type(module).__mro__
    )


class Member(NamedTuple):
    """A parameter of the model, as a part of a flat parameter."""

    name: str
    """The name in the model."""
    parameter: Parameter
    """What the optimizer steps: the parameter, or with `use_orig_params=False` the flat one."""
    span: slice
    """The elements in the unsharded flat parameter."""
    in_shard: slice | None
    """The elements in this rank's shard; None: none of them are there."""

    def gradient(self, flat: Tensor) -> Tensor | None:
        """Return this rank's shard of the averaged gradient, as it is in `.grad`.

        Args:
            flat: The flat parameter.
        """
        gradient = self.parameter.grad
        if gradient is None or self.in_shard is None:
            return None
        return gradient[self.in_shard] if self.parameter is flat else gradient


class Unit:
    """A flat parameter and its members.

    Args:
        module: The FSDP module.
        path: Its name in the model, with FSDP's own names.
    """

    def __init__(self, module: Any, path: str) -> None:
        self.module = module
        flat = self.flat = module._handle.flat_param
        ends = accumulate(flat._numels_with_padding)
        spans = [
            slice(end - size, end)
            for size, end, padding in zip(
                flat._numels_with_padding, ends, flat._is_padding_mask, strict=True
            )
            if not padding
        ]
        owners = flat._params if module._handle._use_orig_params else [flat] * len(spans)
        self.members = [
            Member(
                _own_name(f"{path}.{name}" if path else name),
                owner,
                span,
                slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
                if info.in_shard
                else None,
            )
            for name, owner, span, info in zip(
                flat._fqns, owners, spans, flat._shard_param_infos, strict=True
            )
        ]

    @property
    def reduces(self) -> bool:
        """Whether this backward pass reduces the gradient, not only adds to it."""
        return bool(self.module._sync_gradients)

    @property
    def factor(self) -> float:
        """p.grad over the mean over ranks: not 1 if the divisors of FSDP were changed."""
        module = self.module
        if module._comm_hook is not None:
            return 1.0
        before = max(1.0, module._gradient_predivide_factor)
        ranks = math.prod(map(len, self.ranks))
        return float(ranks / (before * max(1.0, module._gradient_postdivide_factor)))

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that the gradient is averaged over: those it is sharded over, and replicas."""
        groups = (self.module.process_group, getattr(self.module, "_inter_node_pg", None))
        return tuple(tuple(dist.get_process_group_ranks(g)) for g in groups if g is not None)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps a part of the gradient only."""
        return bool(self.module._handle.uses_sharded_strategy)

    @property
    def offloads(self) -> bool:
        """Whether gradients are brought to the CPU."""
        return bool(self.module._handle._offload_params)

    def pieces(self, index_of: dict[str, int], entry_of: list[int]) -> Iterator[Piece]:
        """Yield what counts of the unsharded gradient, in one piece if all counts alike."""
        gradient = self.flat.grad
        if gradient is None:
            return
        # Autograd writes the gradients of members that were frozen since, too.
        trained = [member.parameter.requires_grad for member in self.members]
        indices = [
            index_of.get(member.name) if trains else None
            for member, trains in zip(self.members, trained, strict=True)
        ]
        counted = [index for index in indices if index is not None]
        if len(counted) == len(indices) and len({entry_of[index] for index in counted}) == 1:
            yield Piece(counted[0], gradient)
            return
        for index, member in zip(indices, self.members, strict=True):
            if index is not None:
                yield Piece(index, gradient[member.span])


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in the order of its modules."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [
        Unit(module, path)
        for path, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield the model's parameters by their own names; several may be in one flat parameter."""
    members: dict[int, list[str]] = {}
    for unit in units_of(model):
        for member in unit.members:
            members.setdefault(id(member.parameter), []).append(member.name)
    for name, p in model.named_parameters():
        for own_name in members.get(id(p), [_own_name(name)]):
            yield own_name, p


def _own_name(name: str) -> str:
    """Return a parameter's name without those of wrappers."""
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    return clean_tensor_name(name).replace("_orig_mod.", "")


def checked_units(model: nn.Module, named: list[tuple[str, Parameter]]) -> list[Unit]:
    """Return the units that hold any of the parameters.

    Raises:
        NotMeasured: If gradients are not averaged over one set of ranks by FSDP1.
    """
    units = units_of(model)
    held = {member.name for unit in units for member in unit.members}
    for name, _ in named:
        if name not in held:
            raise NotMeasured(
                "`model` must shard every trained parameter, got"
                f" {name!r}: FSDP does not reduce its gradient. Do not ignore it"
                " (`ignored_states`), freeze it, or leave it out by `parameters`."
            )
    wanted = {name for name, _ in named}
    units = [unit for unit in units if any(member.name in wanted for member in unit.members)]
    if len({(unit.ranks, unit.is_sharded) for unit in units}) > 1:
        raise NotMeasured(
            "`model` must be sharded over one set of ranks, got several: its gradients are means"
            " over different ranks. Measure the parameters of one of them."
        )
    if any(not unit.flat.requires_grad for unit in units):
        raise NotMeasured(
            "`model` must be unfrozen before FullyShardedDataParallel wraps it, got a parameter"
            " that requires a gradient in a flat one that does not yet. Unfreeze it earlier."
        )
    mesh = getattr(units[0].module, "_device_mesh", None)
    refuse_context_parallel([] if mesh is None else [mesh])
    if any(one is not None for unit in units for one in unit.flat._param_extensions):
        raise NotMeasured(
            "`model` must be sharded by `fully_shard` over tensor parallelism, got"
            " FullyShardedDataParallel: a rank has only a part of its gradient. Use `fully_shard`."
        )
    if all(len(ranks) == 1 for ranks in units[0].ranks):
        raise NotMeasured(
            "`model` must be sharded over two or more ranks, got FullyShardedDataParallel on one:"
            " there is nothing to compare. Train without FSDP on one device."
        )
    return units
