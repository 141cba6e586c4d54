# SPDX-License-Identifier: Apache-2.0
"""Any optimizer, with what its steps change combined over ranks by Adasum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import refuse, require_count
from noisescale.methods.across_ranks.alike import (
    check_alike,
    check_same_values,
    on_any_rank,
)
from noisescale.methods.across_ranks.peers import Peers
from noisescale.methods.across_ranks.wrapped_optimizer import WrappedOptimizer
from noisescale.methods.adasum.all_reduce import AdasumStatistics, parts_of, reduce_
from noisescale.methods.adasum.fused import Buffers, as_real, copy_

STATE = "adasum"
"""The key of what this optimizer adds to the state of the inner one."""


class AdasumOptimizer(WrappedOptimizer):
    """Steps of each rank on its own gradient, combined over ranks by Adasum (see `adasum`).

    Each rank takes `local_steps` steps of the inner optimizer, with its own moments. What these
    steps changed is combined, and all ranks go on from the same weights. For SGD without momentum
    and one local step, that is Adasum of the gradients. In one process it is the inner optimizer.

    Gradients must not be averaged before: leave DistributedDataParallel out, or train in its
    `no_sync()`. Clip gradients before the step, as ever. The weights must be the same on all ranks
    at the first step.

    The learning rate is not scaled with the number of ranks. The best one of a single process times
    2 to 2.5 is a start (Maleki et al.). With `mean_group`, times the size of that group as well.

    With a loss scaler of `torch.amp` this optimizer unscales the gradients. If any rank's gradient
    is not finite, all ranks leave the step out.

    Args:
        optimizer: Any optimizer of torch.
        group: The ranks that are combined; None: all.
        local_steps: Steps of each rank before they are combined.
        mean_group: See `adasum_all_reduce_`.

    Raises:
        TypeError: If `optimizer` is no optimizer.
        ValueError: If `local_steps` is not a positive whole number. On all ranks: if `local_steps`
            differs between ranks, or what they train does, in number, shape, dtype or first value.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdasumOptimizer(torch.optim.Adam(model.parameters()), local_steps=4)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> optimizer.step()

    References:
        Maleki et al. 2020, arXiv:2006.02924.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None = None,
        local_steps: int = 1,
        *,
        mean_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer)
        self.local_steps = require_count("local_steps", local_steps, "Pass 1 to combine each step.")
        self.group, self.mean_group = group, mean_group
        self.statistics: AdasumStatistics | None = None
        """The last reduction's statistics of `trained_parameters`, on the device."""
        self._step_supports_amp_scaling = True  # GradScaler asks for it.
        self._done = 0
        self._round: _Round | None = None
        self._resumed: list[Tensor] = []

    @property
    def steps_done(self) -> int:
        """Local steps since the last reduction."""
        return self._done

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of this rank. After `local_steps` of them combine what they changed."""
        if self._alone:
            return self._local_step(closure)
        with torch.no_grad():
            one = self._round = self._this_round()
            if self._not_finite_anywhere():
                return None
        loss = self._local_step(closure)
        self._done += 1
        if self._done >= self.local_steps:
            with torch.no_grad():
                self.statistics = one.combine()
            self._done = 0
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, and how far this rank is since the last reduction.

        The state is this rank's. A checkpoint that is to be resumed exactly needs it of each rank.
        """
        start = [] if self._round is None or not self._done else self._round.start
        own = {"steps_done": self._done, "start": [each.clone() for each in start or self._resumed]}
        return self.optimizer.state_dict() | {STATE: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, or from one of the inner optimizer alone."""
        self.optimizer.load_state_dict(state_dict)
        own = state_dict.get(STATE, {"steps_done": 0, "start": []})
        self._done, self._resumed, self._round = own["steps_done"], own["start"], None

    @property
    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [self.group] if self.mean_group is None else [self.group, self.mean_group]

    def _this_round(self) -> _Round:
        """Return the round under way, or begin one where this rank's weights are now."""
        one, trained = self._round, self.trained_parameters
        if one is not None and self._done:
            return one
        peers, known = Peers(self.group), one is not None and one.has(trained)
        others = on_any_rank(not known, self._groups)
        if others:
            settings = {
                "local_steps": self.local_steps,
                "steps_done": self._done,
                "mean_group": f"{parts_of(self.mean_group)} ranks",
            }
            check_alike(trained, self._groups, settings)
        if one is None or not known or not one.in_place:
            one = _Round(trained, peers, self.mean_group)
        if self._done:
            _check_resumed(self._resumed, one.start)
            copy_(one.start, self._resumed)
        if others:
            check_same_values(one.start if self._done else trained, self._groups)
        if not self._done:
            copy_(one.start, one.now)
        self._resumed = []
        return one


class _Round:
    """The local steps between two reductions: where they started, and buffers for the changes."""

    def __init__(
        self, parameters: list[Tensor], peers: Peers, mean_group: dist.ProcessGroup | None
    ) -> None:
        self._parameters, self._peers, self._mean_group = parameters, peers, mean_group
        self.now = [as_real(p) for p in parameters]
        self.start = [torch.empty_like(p) for p in self.now]
        self._changes = Buffers(self.now, parts_of(mean_group), in_place=False)

    def has(self, parameters: list[Tensor]) -> bool:
        """Return whether the round is one of these parameters."""
        return [*map(id, parameters)] == [*map(id, self._parameters)]

    @property
    def in_place(self) -> bool:
        """Whether the parameters still have the storage that they had."""
        pairs = zip(self._parameters, self.now, strict=True)
        return all(p.data_ptr() == now.data_ptr() for p, now in pairs)

    def combine(self) -> AdasumStatistics:
        """Combine the changes of all ranks, and go on from there."""
        self._changes.pack()
        torch._foreach_sub_(self._changes.views, self.start)
        statistics = reduce_(self._changes, self._peers, self._mean_group)
        torch._foreach_add_(self.start, self._changes.views)
        copy_(self.now, self.start)
        return statistics


def _check_resumed(resumed: list[Tensor], now: list[Tensor]) -> None:
    shapes, wanted = [tuple(each.shape) for each in resumed], [tuple(each.shape) for each in now]
    if shapes != wanted:
        remedy = "Resume with the same parameters trained, or without the optimizer's state."
        needed = "have the shapes of the parameters that are trained"
        refuse("start", needed, f"{len(shapes)} tensors for {len(wanted)}", remedy)
