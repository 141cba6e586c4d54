# SPDX-License-Identifier: Apache-2.0
"""The steps of a rank that keeps a shard of the averaged gradient, in rounds.

A backward pass that reduces gradients is a *round*. It may follow passes that only added to the
unsharded ones (FSDP1's `no_sync`, FSDP2's `set_requires_gradient_sync(False)`), and reduces their
sum. The parts of a step are the rounds of all ranks.

A module whose parameters are reduced together is a *unit*.

Private attribute read here, as of torch 2.13: `Variable._execution_engine.queue_callback`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.collector import Collector
from noisescale.collectors.gradient_norms import GradientNorms, Norms, Piece
from noisescale.collectors.squared_norms import scale
from noisescale.guard import keeps_errors


@dataclass
class Step:
    """The rounds since the last reset, and the norms of their gradients."""

    captured: Norms
    passes: int = 0
    rounds: list[int] = field(default_factory=list)
    """The number of passes up to the end of each round."""
    in_parts: bool = False
    """Whether some round may have shown a gradient in parts."""

    @property
    def are_whole(self) -> bool:
        """Whether the last pass ended a round, and all rounds are equally long and whole."""
        lengths = {end - start for start, end in pairwise([0, *self.rounds])}
        return len(lengths) == 1 and self.rounds[-1] == self.passes and not self.in_parts


class ReducedTogether(Protocol):
    """A unit of FSDP."""

    @property
    def reduces(self) -> bool:
        """Whether this backward pass reduces the unit's gradients, not only adds to them."""


_U = TypeVar("_U", bound=ReducedTogether)


class RoundsCollector(Collector, Generic[_U]):
    """Squared norms of this rank's gradient in every round, and of its shard of the averaged one.

    A unit that reduces twice in one backward pass (two methods of one module were called) may
    show a gradient in parts: such a step has no small norms.

    Args:
        norms: See `Collector`.
        group: All ranks that average gradients.
        average: Norms this rank's shard.
    """

    _units: list[_U]
    """The units that hold measured parameters."""

    def __init__(
        self, norms: GradientNorms, group: dist.ProcessGroup | None, average: AveragedGradient
    ) -> None:
        super().__init__(norms, group)
        self._average = average
        self._step = Step(norms.empty())
        self._reduced: set[object] | None = None
        """Units that the pass under way has reduced; None between passes."""

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured."""
        self._step.passes += 1
        self._reduced = set() if loss.requires_grad else None
        if loss.requires_grad:
            loss.register_hook(self._on_backward_start)
        self._average.before_backward(loss, capture=capture_average)

    def _ends_of_parts(self, passes: int) -> Sequence[int]:
        """Every round is a part."""
        return self._step.rounds

    def small_sq_norms(self) -> Tensor | None:
        """Σ|g_round|² since the last reset; None unless all rounds are whole and equally long."""
        self.raise_error_of_hook()
        if not self._step.are_whole or not self._all_is_known:
            return None
        self.norms.wait()
        return self.norms.sums(self._step.captured)

    def reset(self) -> None:
        """Begin another step."""
        super().reset()
        self._reduced = None
        self._step = Step(self.norms.empty())

    @property
    def _all_is_known(self) -> bool:
        """Whether the norms of all gradients that were seen have been taken."""
        return True

    def _begins_round(self, unit: object) -> bool:
        """Note that a unit reduces in the pass under way; return whether it is the first to."""
        assert self._reduced is not None, "asked in a pass"
        first = not self._reduced
        if first:
            self._step.rounds.append(self._step.passes)
            # Units that reduce in different passes have no rounds in common.
            self._step.in_parts |= not all(one.reduces for one in self._units)
        self._step.in_parts |= unit in self._reduced
        self._reduced.add(unit)
        return first

    def _add(self, pieces: list[Piece], factor: float = 1.0) -> None:
        """Add norms of gradients times `factor`: `p.grad` is the mean over ranks of these."""
        for captured, norms in zip(self._step.captured, self.norms.compute(pieces), strict=True):
            captured.extend(norms if factor == 1 else scale(norms, factor))

    @keeps_errors
    def _on_backward_start(self, _: Tensor) -> None:
        if self._reduced is not None:
            # FSDP queues a callback in the pass that reduces what is left and waits for it all:
            # one that is queued by a callback comes after.
            queue_callback = torch.autograd.Variable._execution_engine.queue_callback
            queue_callback(lambda: queue_callback(self._on_backward_end))

    @keeps_errors
    def _on_backward_end(self) -> None:
        self._reduced = None
