# SPDX-License-Identifier: Apache-2.0
"""Each rank's gradient norm under FSDP2 (`fully_shard`), seen just before the reduce-scatter.

Lightning reduces at every micro-batch. The norms are taken on FSDP's reduce-scatter stream and
summed on the current one, which waits for it first. Run on CPU with gloo: **nothing here was run on
CUDA**.

Private attributes read here, as of torch 2.13: `DeviceMesh._flatten`; the others in `fsdp2_units`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from noisescale.collectors.collector import ACCUMULATE
from noisescale.collectors.gradient_norms import GradientNorms, Piece
from noisescale.collectors.groups import Groups
from noisescale.collectors.sharded.fsdp2_units import Unit, units_of
from noisescale.collectors.sharded.rounds import RoundsCollector
from noisescale.collectors.tensor_parallel import NOTHING_TO_COMPARE, AveragedParts
from noisescale.guard import keeps_errors


class Fsdp2Collector(RoundsCollector[Unit]):
    """Squared norms of this rank's gradient in every round, and of its shard of the averaged one.

    Args:
        model: The model that `fully_shard` was applied to.
        named_parameters: The parameters that are trained, in an order that all ranks share.
        groups: See `Groups`.

    Raises:
        NotMeasured: If gradients are not averaged over one mesh of FSDP2.
    """

    def __init__(
        self,
        model: nn.Module,
        named_parameters: list[tuple[str, Parameter]],
        groups: Groups | None = None,
    ) -> None:
        units = units_of(model, named_parameters)
        # Where gradients are reduced: with CPU offloading that is not where `p.grad` is.
        norms = GradientNorms(named_parameters, groups, device=units[0].device)
        parameters: list[Any] = norms.parameters  # DTensors
        group = _ranks_of(max((p.device_mesh for p in parameters), key=lambda mesh: mesh.size()))
        super().__init__(norms, group, AveragedParts(norms, group))
        # On a mesh that has both, what is not data parallel is tensor parallel.
        self.sharing = dist.get_world_size(group) // units[0].mesh_info.mesh.size()
        if self.sharing == dist.get_world_size(group):  # no other rank has a batch
            self.least_micro_batches = 2
            self.nothing_to_compare, self.how_to_compare = NOTHING_TO_COMPARE, f"{ACCUMULATE}."
        self._scattered_only = False
        """Whether the last round's gradients are still to be summed over replicas."""
        self._units = []
        try:
            for unit in units:
                self._units.append(Unit(unit, self.norms, self._on_reduce, self.sharing))
        except BaseException:
            self.close()
            raise

    @property
    def gradients_dropped(self) -> bool:
        """Whether `zero_grad` was called since the last round, so that the step starts again.

        Before the first round `p.grad` is always None, as passes add to unsharded gradients.
        """
        reduced = self._step.rounds and not self._scattered_only
        return bool(reduced) and not self.norms.any_gradient()

    def small_sq_norms(self) -> Tensor | None:
        """Σ|g_round|² since the last reset; None unless all rounds are whole and equally long."""
        for unit in self._units:
            unit.raise_error_of_hook()
        return super().small_sq_norms()

    def reset(self) -> None:
        """Begin another step."""
        super().reset()
        self._scattered_only = False
        for unit in self._units:
            unit.reset()

    def close(self) -> None:
        """Restore the original reduce-scatters."""
        self.reset()
        for unit in self._units:
            unit.close()
        self._units = []

    @property
    def _all_is_known(self) -> bool:
        """Whether the last round is over, over replicas too, and no buffer waits to be cut."""
        return not self._scattered_only and all(unit.waiting is None for unit in self._units)

    @keeps_errors
    def _on_reduce(self, unit: Unit, buffer: Tensor) -> None:
        if self._reduced is None:
            return
        if self._begins_round(unit):
            self._scattered_only = not all(u.reduces_over_replicas for u in self._units)
        self._step.in_parts |= unit.waiting is not None
        if unit.reduces_over_replicas:  # else `p.grad` stays None
            self._average.came |= unit.parameters_in(buffer)
        factor = unit.factor * unit.reduce_divisor(buffer.dtype)
        unit.cut(buffer, partial(self._take, factor))
        self._step.in_parts |= unit.divides_otherwise(buffer.dtype)

    @keeps_errors
    def _take(self, factor: float, pieces: list[Piece]) -> None:
        self._add(pieces, factor)


def _ranks_of(mesh: Any) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh: a collective where it has to be made."""
    if mesh.size() == dist.get_world_size():
        return dist.distributed_c10d._get_default_group()
    group: dist.ProcessGroup = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    return group
