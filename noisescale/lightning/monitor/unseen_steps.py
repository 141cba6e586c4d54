# SPDX-License-Identifier: Apache-2.0
"""Steps of manual optimization that no monitor can close: in a backward pass, or past Lightning."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from noisescale.guard import Guard, NotMeasured

_HOW = (
    " Call `step` of the optimizers that `self.optimizers()` returns, after `manual_backward` has"
    " returned."
)


class UnseenSteps:
    """Finds the optimizers whose steps are not seen, or not as the end of backward passes.

    torch calls a hook after each step of any optimizer, until the steps of all have been seen.

    Args:
        optimizers: Those of the Trainer.
        guard: What an error in the hook warns by.
    """

    def __init__(self, optimizers: Iterable[Optimizer], guard: Guard) -> None:
        self._parameters = dict(enumerate(map(_ids_of_parameters, optimizers)))
        """The ids of what an optimizer steps, by its index, while it was not seen to step."""
        self._reasons: dict[int, NotMeasured] = {}
        self._guard = guard
        self._passes = False
        self._hook = register_optimizer_step_post_hook(self._on_step)

    def note_pass(self) -> None:
        """Note that a backward pass is about to begin."""
        self._passes = True

    def is_closed_by(self, which: int) -> bool:
        """Return whether a step that Lightning is about to take ends the passes before it."""
        if _in_a_pass():
            self._reasons[which] = _steps_in_a_pass()
            return False
        self._parameters.pop(which, None)
        if not self._parameters:
            self.close()
        return True

    def take(self) -> dict[int, NotMeasured]:
        """Return why optimizers cannot be measured, for those found since the last call."""
        reasons, self._reasons = self._reasons, {}
        for which in reasons:
            self._parameters.pop(which, None)
        return reasons

    def take_all(self) -> dict[int, NotMeasured]:
        """Return `take`, and at the end of a training the optimizers that never stepped."""
        never = NotMeasured("No step of an optimizer was seen in this training." + _HOW)
        if self._passes:
            self._reasons = dict.fromkeys(self._parameters, never) | self._reasons
        return self.take()

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _on_step(self, optimizer: Optimizer, *_: object) -> None:
        with self._guard("The steps of optimizers were not looked at"):
            stepped = _ids_of_parameters(optimizer)
            for which, parameters in self._parameters.items():
                if which not in self._reasons and not stepped.isdisjoint(parameters):
                    self._reasons[which] = (
                        _steps_in_a_pass() if _in_a_pass() else _steps_past_lightning(optimizer)
                    )


def _steps_in_a_pass() -> NotMeasured:
    return NotMeasured(
        "An optimizer steps within the backward pass, as in hooks on parameters, so that the"
        " gradient of a step is never there as a whole." + _HOW
    )


def _steps_past_lightning(optimizer: Optimizer) -> NotMeasured:
    return NotMeasured(
        f"{type(optimizer).__name__} steps past Lightning, so that no step is seen." + _HOW
    )


def _in_a_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


def _ids_of_parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
