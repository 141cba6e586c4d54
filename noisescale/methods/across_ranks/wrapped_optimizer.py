# SPDX-License-Identifier: Apache-2.0
"""An optimizer around another one, which takes the local step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import refuse
from noisescale.refusal import TypeRefusal


class WrappedOptimizer(Optimizer):
    """Everything but `step` is the inner optimizer's: parameter groups, state, defaults.

    So learning-rate schedulers may be given either of both.

    Args:
        optimizer: Any optimizer of torch.

    Raises:
        TypeError: If it is no optimizer.
    """

    optimizer: Optimizer
    """The inner one."""

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            remedy = "Wrap one: `torch.optim.SGD(model.parameters(), lr=0.1)`."
            got = type(optimizer).__name__
            refuse("optimizer", "be a torch optimizer", got, remedy, error=TypeRefusal)
        # As a loaded optimizer is set up: the hooks alone, no groups of its own.
        self.__setstate__({"optimizer": optimizer})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the inner optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the inner optimizer."""
        return self.optimizer.defaults

    @property
    def trained_parameters(self) -> list[Tensor]:
        """The parameters that require a gradient, in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def _groups(self) -> list[dist.ProcessGroup | None]:
        """The groups of ranks that step together."""
        raise NotImplementedError

    @property
    def _alone(self) -> bool:
        """Whether there is no other rank."""
        return not dist.is_initialized() or all(
            dist.get_world_size(group) == 1 for group in self._groups
        )

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def _not_finite_anywhere(self) -> bool:
        """Return whether a gradient of any rank is not finite, by its loss scaler; else unscale.

        A scaler of `torch.amp` has left in this optimizer what it found, and its scale.
        """
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is None:
            return False
        found = found_inf.detach().clone().reshape(1)
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        if found.item():
            return True
        if scale is not None:
            gradients = [p.grad for p in self.trained_parameters if p.grad is not None]
            torch._foreach_div_(gradients, float(scale))
        return False

    def state_between_rounds(self) -> dict[str, Any]:
        """Return a state in which no local steps are under way."""
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
