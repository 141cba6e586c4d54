# SPDX-License-Identifier: Apache-2.0
"""Momentum SGD in which each rank averages its weights with its neighbours' weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.methods.across_ranks.alike import (
    check_alike,
    check_same_values,
    raise_on_all_ranks,
)
from noisescale.methods.across_ranks.peers import Peers
from noisescale.methods.adasum.fused import as_real
from noisescale.methods.decentlam.mixing import add_differences_, neighbours_of
from noisescale.methods.decentlam.own_weights import OwnWeights
from noisescale.methods.decentlam.sgd import (
    LR_OF_U,
    Flat,
    check_sgd,
    check_sgd_groups,
    flats_of,
    local_step_,
    rescale,
)
from noisescale.methods.decentlam.topology import topology_of

STATE = "decentlam"
"""The key of what this optimizer adds to the state of the inner one."""


class DecentLaM(OwnWeights):
    """Momentum SGD in which each rank averages its weights with its neighbours' weights alone.

    No rank waits for all others, and no gradient is averaged. Rank i with weights x_i, learning
    rate γ and momentum β steps, with the shares w_ij of a mixing matrix W,

        u_i ← β·u_i + x_i - Σ_j w_ij·(x_j - γ·∇F_j(x_j))
        x_i ← x_i - u_i

    in which u = γ·m is the momentum times the learning rate. It is scaled with the learning rate
    when that changes. Momentum of this kind has no bias of its own: plain decentralized momentum
    moves the ranks' common point off the optimum by 1/(1-β)² times as much (squared) as none.

    With W = 1/n everywhere this is SGD with momentum on the mean gradient, and without momentum
    decentralized SGD. In one process it is the inner optimizer.

    Ranks have weights of their own while they train. Use the mean of them: `use_mean()` swaps it in
    to validate or to save, `average_()` for good at the end. A noise scale cannot be measured.
    Buffers, such as the running statistics of BatchNorm, are not averaged.

    Gradients must not be averaged before: leave DistributedDataParallel out, or train in its
    `no_sync()`. Clip gradients before the step. A parameter without a gradient counts as one whose
    gradient is zero on this rank. It has no weight decay there, and is still averaged.

    With a loss scaler of `torch.amp` this optimizer unscales the gradients. If any rank's gradient
    is not finite, all ranks leave the step out.

    Args:
        optimizer: A `torch.optim.SGD` without Nesterov's momentum, dampening and `maximize`. Its
            learning rates, momenta and weight decays are used, also as schedules change them.
        topology: Who averages with whom. "ring": both neighbours. "exponential": the ranks at
            distance 1, 2, 4, ... both ways. Both have Metropolis weights. "one-peer": one rank a
            step, at distance 1, 2, 4, ... in turn, see below. Or W itself: doubly stochastic, one
            row for each rank, and such that all ranks are connected. `metropolis_weights` makes one
            for any graph.
        group: The ranks; None: all.

    In step t of "one-peer" rank i averages with rank i XOR 2^(t mod k), k = ⌈log2 n⌉. A rank whose
    partner there is none sits that step out. The shares are 1/2 without momentum, so that the ranks
    agree after k steps if n is a power of two. With momentum they are 1/(2(k-1)), which is 1/2 up
    to four ranks: kicks of 1/2 in turn make more ranks swing apart.

    A matrix that is not symmetric drives ranks apart from some momentum on, which is refused.

    All ranks of the group must construct it, as they compare what they were given.

    Raises:
        TypeError: If `optimizer` is another one, or `topology` neither a name nor a matrix.
        ValueError: If an option of SGD is not possible, or `topology` is not as above. At the first
            step: if parameters differ in number, shape, dtype or value between ranks, or learning
            rates, momenta and weight decays do. All ranks raise the error.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = DecentLaM(sgd, topology="ring")
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> optimizer.step()
        >>> with optimizer.use_mean():
        ...     validated = model(torch.ones(3, 2))

    References:
        Yuan et al. 2021, arXiv:2104.11981, algorithm 2.
    """

    def __init__(
        self, optimizer: Optimizer, topology: Any = "exponential", group: Any = None
    ) -> None:
        peers = Peers(group) if dist.is_initialized() else None
        error: Exception | None = None
        try:
            check_sgd(optimizer)
            self.topology = topology_of(topology, 1 if peers is None else peers.size)
            check_sgd_groups(optimizer.param_groups, self.topology.largest_momentum())
        except (TypeError, ValueError) as found:
            error = found
        raise_on_all_ranks(error, group)
        super().__init__(optimizer, group)
        self._largest_momentum = self.topology.largest_momentum()
        self._step_supports_amp_scaling = True  # GradScaler asks for it.
        self._steps_done = 0
        self._resumed = False
        self._of: list[int] = []
        self._flats: list[Flat] = []

    @property
    def steps_done(self) -> int:
        """Steps so far, which "one-peer" takes its partners by."""
        return self._steps_done

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, together with the ranks of the group."""
        if self.is_swapped:
            raise RuntimeError(
                "The mean of the ranks' weights is swapped in, so there is nothing to step from."
                " Leave the block of `use_mean()` first."
            )
        if self._alone:
            self._as_plain_momentum()
            return self._local_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            trained = self.trained_parameters
            check_sgd_groups(self.param_groups, self._largest_momentum)
            self._set_up(trained)
            if not self._not_finite_anywhere():
                self._step(trained)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules ask for it
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with u of this rank and the number of steps.

        A checkpoint that is to be resumed exactly needs it of each rank, and each rank's weights.
        """
        return self.optimizer.state_dict() | {STATE: {"steps_done": self._steps_done}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, or from one of an SGD. Weights may then differ."""
        self.optimizer.load_state_dict(state_dict)
        self._steps_done = state_dict.get(STATE, {"steps_done": 0})["steps_done"]
        self._of, self._flats, self._resumed = [], [], True

    def state_between_rounds(self) -> dict[str, Any]:
        """Return the state: each step is a round."""
        return self.state_dict()

    @property
    def _groups(self) -> list[dist.ProcessGroup | None]:
        return [self.group]

    def _set_up(self, trained: list[Tensor]) -> None:
        """Make buffers at the first step, and if other parameters are trained."""
        if self._of == [*map(id, trained)]:
            return
        first = not self._of
        check_alike(trained, [self.group], self._settings() if first else None)
        if first and not self._resumed and not self._steps_done:
            check_same_values(trained, [self.group])
        groups = [
            i
            for i, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]
        self._flats = flats_of([as_real(p) for p in trained], groups)
        for flat in self._flats:
            for index, group_index, view in zip(
                flat.indices, flat.groups, flat.u_views, strict=True
            ):
                self._adopt(trained[index], self.param_groups[group_index], view)
        self._of = [*map(id, trained)]

    def _adopt(self, p: Tensor, group: dict[str, Any], view: Tensor) -> None:
        """Keep u of a parameter in the buffer from now on."""
        state = self.state[p]
        if "u" in state:
            view.copy_(state["u"])
        elif state.get("momentum_buffer") is not None:  # of a plain SGD
            view.copy_(as_real(state.pop("momentum_buffer"))).mul_(float(group["lr"]))
        state["u"] = view

    def _frozen(self, group: dict[str, Any]) -> list[Tensor]:
        """Return u of parameters that were trained and are frozen now."""
        frozen = (p for p in group["params"] if not p.requires_grad)
        return [self.state[p]["u"] for p in frozen if "u" in self.state.get(p, {})]

    def _as_plain_momentum(self) -> None:
        """Return what several ranks left to the optimizer's own momentum."""
        for group in self.param_groups:
            lr = float(group.pop(LR_OF_U, group["lr"]))
            for p in group["params"]:
                if (u := self.state.get(p, {}).pop("u", None)) is not None and lr > 0:
                    u = torch.view_as_complex(u) if p.is_complex() else u
                    self.state[p]["momentum_buffer"] = (u / lr).clone()
        self._of = []

    def _settings(self) -> dict[str, str]:
        said = {"topology": str(self.topology)}
        for name in ("lr", "momentum", "weight_decay"):
            said[name] = str([float(group[name]) for group in self.param_groups])
        return said | {"steps_done": str((self._steps_done, self._resumed))}

    def _step(self, trained: list[Tensor]) -> None:
        settings = [rescale(group, self._frozen(group)) for group in self.param_groups]
        momentum = any(each.momentum for each in settings)
        peers = Peers(self.group)
        matrix = self.topology.matrix(self._steps_done, momentum=momentum)
        neighbours = neighbours_of(matrix, peers.rank)
        for flat in self._flats:
            parameters = [as_real(trained[i]) for i in flat.indices]
            gradients = [trained[i].grad for i in flat.indices]
            local_step_(flat, parameters, gradients, settings)
            add_differences_(flat.u, flat.z, neighbours, peers, flat.rooms)
            torch._foreach_sub_(parameters, flat.u_views)
        self._steps_done += 1
