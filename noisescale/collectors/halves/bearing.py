# SPDX-License-Identifier: Apache-2.0
"""Allow a second backward pass only where it changes nothing, and restore what it runs again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from noisescale.collectors.halves.graph import Node
from noisescale.collectors.halves.recomputed import PythonState, forward_hooks_of_others
from noisescale.collectors.halves.second_pass import second_pass
from noisescale.collectors.halves.side_effects import (
    Values,
    hooks_of_tensors,
    keep_random_numbers,
    keep_retained_gradients,
    silence,
)
from noisescale.collectors.own_pass import own_pass
from noisescale.guard import NotMeasured

INSTEAD = " Accumulate two or more micro-batches, which avoids this, or use several devices."
"""The end of every refusal."""

_NAMED = 4
"""The most that a message names."""


class Bearing:
    """Says of each graph whether it bears a second backward pass.

    Args:
        model: The trained model.
        backward_twice: Whether the user says that what is not known bears it, too.
    """

    def __init__(self, model: nn.Module, *, backward_twice: bool) -> None:
        self._model = model
        self._backward_twice = backward_twice
        self.forget()

    def forget(self) -> None:
        """Release the graph that was checked last."""
        self._state = PythonState([])
        self.runs_python = False
        """Whether the graph that was checked last runs Functions of others, or parts again."""

    def check(self, loss: Node) -> None:
        """Check the graph of a loss, before any pass through it.

        Raises:
            NotMeasured: If a second pass may change the training, or end it.
        """
        second = second_pass(loss)
        self._state = PythonState(second.frames)
        self.runs_python = second.runs_python
        if second.impossible:
            raise NotMeasured(
                "`model` must allow a backward pass before the training's own, got"
                f" {_list_of(second.impossible)}. Checkpointing needs `use_reentrant=False` and no"
                " `context_fn`." + INSTEAD
            )
        unknown = list(second.unknown)
        if not self._state.complete:
            unknown.append("a checkpointed part that cannot be looked into")
        hooks = forward_hooks_of_others(self._state.modules) if second.frames else []
        unknown += [f"the forward hook {hook} in a checkpointed part" for hook in hooks]
        if unknown and not self._backward_twice:
            raise NotMeasured(
                "`model` must consist of what is known to bear a second backward pass, got"
                f" {_list_of(unknown)}, which may keep state. If it keeps none, pass"
                " `backward_twice=True`." + INSTEAD
            )

    @contextmanager
    def leave_no_trace(self) -> Iterator[None]:
        """Restore after a block what passes through the checked graph change.

        These are what they run again, retained gradients and random numbers. They call no hooks of
        tensors but those that the block registers.
        """
        parameters = list(self._model.parameters())
        named: list[tuple[str, Tensor]] = []
        if self.runs_python:
            named = [*self._model.named_buffers(), *self._state.tensors]
        with ExitStack() as after:
            after.callback(self._state.restore)
            after.callback(Values(named).restore)
            after.enter_context(keep_retained_gradients())
            after.enter_context(silence(hooks_of_tensors(parameters)))
            after.enter_context(keep_random_numbers({p.device for p in parameters}))
            after.enter_context(own_pass())
            yield


def _list_of(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
