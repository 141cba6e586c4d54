# SPDX-License-Identifier: Apache-2.0
"""Each rank's gradient norm under FSDP1 (`FullyShardedDataParallel`), before it is reduced.

A hook on each flat parameter is called when autograd has written the unit's local gradient, and
before FSDP1's own hook, which hangs on the node of the graph, reduces it. Ours only reads. The
norms are taken on the stream of the backward pass. Lightning and Hugging Face's Trainer accumulate
under `no_sync`: a step then has one round. Run on CPU with gloo: **nothing here was run on CUDA**.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from noisescale.collectors.averaged_gradient import AveragedPieces
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.groups import Groups
from noisescale.collectors.sharded.fsdp1_units import Unit, checked_units
from noisescale.collectors.sharded.rounds import RoundsCollector
from noisescale.guard import NotMeasured, keeps_errors


class Fsdp1Collector(RoundsCollector[Unit]):
    """Squared norms of this rank's gradient in every round, and of its shard of the averaged one.

    Args:
        model: The model with FSDP modules.
        named_parameters: Those of `fsdp1_units.named_parameters` that are trained.
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
        self._hooks = [
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
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

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
