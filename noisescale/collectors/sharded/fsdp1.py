# SPDX-License-Identifier: Apache-2.0
"""Each rank's gradient norm under FSDP1 (`FullyShardedDataParallel`), before it is reduced.

A hook on each flat parameter is called when autograd has written the unit's local gradient, and
before FSDP1's own hook, which hangs on the node of the graph, reduces it. Ours only reads. The
norms are taken on the stream of the backward pass. Lightning and Hugging Face's Trainer accumulate
under `no_sync`: a step then has one round. Run on CPU with gloo: **nothing here was run on CUDA**.

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
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from noisescale.collectors.averaged_gradient import AveragedPieces
from noisescale.collectors.context_parallel import refuse_context_parallel
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.groups import Groups
from noisescale.collectors.sharded.rounds import RoundsCollector
from noisescale.guard import NotMeasured, keeps_errors


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
    refuse_context_parallel()
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


class Fsdp1Collector(RoundsCollector[Unit]):
    """Squared norms of this rank's gradient in every round, and of its shard of the averaged one.

    Args:
        model: The model with FSDP modules.
        named_parameters: Those of `named_parameters` that are trained.
        groups: See `Groups`.

    Raises:
        NotMeasured: If gradients are not averaged over one set of ranks by FSDP1.
    """

    def __init__(
        self,
        model: nn.Module,
        named_parameters: list[tuple[str, Parameter]],
        groups: Groups | None = None,
    ) -> None:
        self._units = checked_units(model, named_parameters)
        first = self._units[0]
        # Where gradients are reduced: with CPU offloading that is not where `p.grad` is.
        norms = GradientNorms(named_parameters, groups, device=first.module.compute_device)
        self._index_of = {name: index for index, name in enumerate(norms.names)}
        group = _all_ranks(first)
        average = _AveragedShards(norms, group, self._units, self._index_of)
        super().__init__(norms, group, average)
        self._shards = {
            unit: {
                self._index_of[member.name]
                for member in unit.members
                if member.name in self._index_of and member.in_shard is not None
            }
            for unit in self._units
        }
        """The measured parameters of which this rank keeps a part, by their index."""
        self._lasting_hooks = [
            unit.flat.register_post_accumulate_grad_hook(partial(self._on_accumulation, unit))
            for unit in self._units
        ]

    @property
    def averaged_too_often(self) -> bool:
        """Whether several averages of a step are not summed.

        Without shards (NO_SHARD) an average is averaged again with what was added to it. With CPU
        offloading the last one replaces the others.
        """
        first = self._units[0]
        return len(self._step.rounds) > 1 and (not first.is_sharded or first.offloads)

    @property
    def gradients_dropped(self) -> bool:
        """Whether `zero_grad` was called since the last pass, so that the step starts again."""
        return any(self._shards.values()) and not self.norms.any_gradient()

    def close(self) -> None:
        """Remove the hooks."""
        self.reset()
        for hook in self._lasting_hooks:
            hook.remove()
        self._lasting_hooks = []

    @keeps_errors
    def _on_accumulation(self, unit: Unit, _: Tensor) -> None:
        if self._reduced is None or not unit.reduces:
            return
        self._begins_round(unit)
        self._average.came |= self._shards[unit]
        self._add(list(unit.pieces(self._index_of, self.norms.entry_of)), unit.factor)


class _AveragedShards(AveragedPieces):
    """The shards in the gradients of parameters, or in those of flat parameters."""

    def __init__(
        self,
        norms: GradientNorms,
        group: dist.ProcessGroup,
        units: Sequence[Unit],
        index_of: dict[str, int],
    ) -> None:
        super().__init__(norms, group)
        sharded_over = len(units[0].ranks[0]) if units[0].is_sharded else 1
        self._holders = dist.get_world_size(group) // sharded_over
        self._members = [
            (index_of[member.name], member, unit.flat)
            for unit in units
            for member in unit.members
            if member.name in index_of
        ]

    def _pieces(self) -> Iterator[Piece]:
        for index, member, flat in self._members:
            if not member.parameter.requires_grad:
                continue
            if (gradient := member.gradient(flat)) is not None:
                yield Piece(index, gradient, holders=self._holders)
            else:
                self.gone |= {index} & self.came


def _all_ranks(unit: Unit) -> dist.ProcessGroup:
    """Return the group of all ranks that average.

    Raises:
        NotMeasured: If there is none: replicas of some of the processes.
    """
    ranks = unit.ranks
    if len(ranks) == 1:
        group: dist.ProcessGroup = unit.module.process_group
        return group
    if math.prod(map(len, ranks)) != dist.get_world_size():
        raise NotMeasured(
            "`model` must be sharded and replicated over all processes, got"
            f" {' x '.join(str(len(some)) for some in ranks)} of {dist.get_world_size()}. Use"
            " `fully_shard` with a mesh of these ranks."
        )
    return dist.distributed_c10d._get_default_group()
