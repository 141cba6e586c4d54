# SPDX-License-Identifier: Apache-2.0
"""Each rank's gradient norm under FSDP2 (`fully_shard`), seen just before the reduce-scatter.

A backward pass that reduces gradients is a *round*. It may follow passes that only added to the
unsharded ones (`set_requires_gradient_sync(False)`), and reduces their sum. Lightning reduces at
every micro-batch. The parts of a step are the rounds of all ranks.

The norms are taken on FSDP's reduce-scatter stream and summed on the current one, which waits for
it first. Run on CPU with gloo: **nothing here was run on CUDA**.

Private attributes read here, as of torch 2.13: `Variable._execution_engine.queue_callback`,
`DeviceMesh._flatten`; the others in `units`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.collector import Collector
from noisescale.collectors.fsdp.units import Unit, units_of
from noisescale.collectors.fsdp.units import is_sharded as is_sharded
from noisescale.collectors.gradient_norms import GradientNorms, Norms, Piece
from noisescale.collectors.groups import Groups
from noisescale.collectors.rows.window_layout import (
    Weight,
    WindowLayout,
    mean_inverse,
    weighted_rounds,
)
from noisescale.collectors.squared_norms import scale
from noisescale.guard import keeps_errors


@dataclass
class _Pass:
    """A backward pass under way."""

    reduced: set[Unit] = field(default_factory=set)


@dataclass
class _Step:
    """The rounds since the last reset, and the norms of their gradients."""

    captured: Norms
    passes: int = 0
    rounds: list[int] = field(default_factory=list)
    """The number of passes up to the end of each round."""
    scattered_only: bool = False
    """Whether the last round's gradients are still to be summed over replicas."""
    in_parts: bool = False
    """Whether some round may have shown a gradient in parts."""

    @property
    def is_reduced(self) -> bool:
        """Whether the last pass ended a round."""
        return self.rounds[-1:] == [self.passes]


class FsdpCollector(Collector):
    """Squared norms of this rank's gradient in every round, and of its shard of the averaged one.

    A unit that reduces twice in one backward pass (two methods of one module were called) may
    show a gradient in parts: such a step has no small norms.

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
        mesh_info = units[0].mesh_info
        # Where gradients are reduced: with CPU offloading that is not where `p.grad` is.
        norms = GradientNorms(named_parameters, groups, device=units[0].device)
        super().__init__(norms, _ranks_of(mesh_info.mesh))
        replicas = mesh_info.mesh.size() // mesh_info.shard_mesh_size
        self._average = _AveragedShards(self.norms, self.group, replicas)
        self._units = [Unit(unit, self.norms, self._on_reduce) for unit in units]
        self._step = _Step(self.norms.empty())
        self._live: _Pass | None = None

    @property
    def gradients_dropped(self) -> bool:
        """Whether `zero_grad` was called since the last round, so that the step starts again.

        Before the first round `p.grad` is always None, as passes add to unsharded gradients.
        """
        step = self._step
        return bool(step.rounds) and not step.scattered_only and not self.norms.any_gradient()

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured."""
        self._step.passes += 1
        self._live = _Pass() if loss.requires_grad else None
        if loss.requires_grad:
            loss.register_hook(self._on_backward_start)
        self._average.before_backward(loss, capture=capture_average)

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Every round is a part: the mean over its micro-batches, equally many in all rounds."""
        passes, rounds = len(sizes), len(self._step.rounds)
        inverse_size = mean_inverse(sizes) / max(passes, 1)
        if not passes or not rounds:
            return WindowLayout(math.nan, math.nan, math.nan, inverse_size)
        return WindowLayout(
            small_scale=(loss_divisor * rounds / passes) ** 2 / rounds,
            big_scale=(loss_divisor / passes) ** 2,
            inverse_part_size=inverse_size * rounds,
            inverse_size=inverse_size,
        )

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Every round is a part, as heavy as its micro-batches together."""
        return weighted_rounds(sizes, weights, self._step.rounds)

    def small_sq_norms(self) -> Tensor | None:
        """Σ|g_round|² since the last reset; None unless all rounds are whole and equally long."""
        for hooked in (self, *self._units):
            hooked.raise_error_of_hook()
        step = self._step
        passes_in_round = {end - start for start, end in pairwise([0, *step.rounds])}
        unfinished = step.scattered_only or not step.is_reduced
        unknown = any(unit.waiting is not None for unit in self._units)
        if len(passes_in_round) != 1 or unfinished or unknown or step.in_parts:
            return None
        self.norms.wait()
        return self.norms.sums(step.captured)

    def reset(self) -> None:
        """Begin another step."""
        super().reset()
        self._live = None
        self._step = _Step(self.norms.empty())
        for unit in self._units:
            unit.reset()

    def close(self) -> None:
        """Restore the original reduce-scatters."""
        self.reset()
        for unit in self._units:
            unit.close()
        self._units = []

    @keeps_errors
    def _on_backward_start(self, _: Tensor) -> None:
        if self._live is not None:
            # FSDP queues a callback in the pass that reduces what is left and waits for it all:
            # one that is queued by a callback comes after.
            queue_callback = torch.autograd.Variable._execution_engine.queue_callback
            queue_callback(lambda: queue_callback(self._on_backward_end))

    @keeps_errors
    def _on_backward_end(self) -> None:
        self._live = None

    @keeps_errors
    def _on_reduce(self, unit: Unit, buffer: Tensor) -> None:
        live, step = self._live, self._step
        if live is None:
            return
        if not live.reduced:
            step.rounds.append(step.passes)
            step.scattered_only = not all(u.reduces_over_replicas for u in self._units)
            # Units that reduce in different passes have no rounds in common.
            step.in_parts |= not all(u.reduces for u in self._units)
        step.in_parts |= unit in live.reduced or unit.waiting is not None
        live.reduced.add(unit)
        self._average.came |= unit.parameters_in(buffer)
        unit.cut(buffer, partial(self._add, unit.factor * unit.reduce_divisor(buffer.dtype)))

    @keeps_errors
    def _add(self, factor: float, pieces: list[Piece]) -> None:
        """Add the norms of a buffer, times `factor`: p.grad is the mean of these gradients."""
        for captured, norms in zip(self._step.captured, self.norms.compute(pieces), strict=True):
            captured.extend(norms if factor == 1 else scale(norms, factor))


class _AveragedShards(AveragedGradient):
    """|g|² of this rank's shard, shared out among the replicas that all hold it."""

    def __init__(
        self, norms: GradientNorms, group: dist.ProcessGroup | None, replicas: int
    ) -> None:
        super().__init__(norms, group)
        self._replicas = replicas

    def current_sq_norms(self) -> Tensor:
        """Return this rank's share as `p.grad` is now, shape (entries,)."""
        norms, pieces = self._norms, []
        for index, p in enumerate(norms.parameters):
            if p.grad is not None and p.requires_grad:
                pieces.append(Piece(index, p.grad.to_local()))  # type: ignore[attr-defined]
            elif p.requires_grad:
                self.gone |= {index} & self.came
        return norms.sums(norms.compute(pieces)).div_(self._replicas)


def _ranks_of(mesh: Any) -> dist.ProcessGroup | None:
    """Return the group of all ranks of a mesh: a collective where it has to be made."""
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    group: dist.ProcessGroup = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    return group
