# SPDX-License-Identifier: Apache-2.0
"""Allow a second backward pass only where it changes nothing, and restore what it runs again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from noisescale.collectors.halves.graph import Node
from noisescale.collectors.halves.recomputed import PythonState, forward_hooks_of_others
from noisescale.collectors.halves.second_pass import second_pass
from noisescale.collectors.halves.upset import Values
from noisescale.guard import NotMeasured

INSTEAD = " Accumulate two or more micro-batches, which avoids this, or use several devices."
"""The remedy of every refusal."""

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
                " `context_fn`.",
                INSTEAD,
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
                " `backward_twice=True`.",
                INSTEAD,
            )

    @contextmanager
    def restore_after(self) -> Iterator[None]:
        """Restore after a block with passes what these have run again in the checked graph."""
        named: list[tuple[str, Tensor]] = []
        if self.runs_python:
            named = [*self._model.named_buffers(), *self._state.tensors]
        values = Values(named)
        try:
            yield
        finally:
            try:
                values.restore()
            finally:
                self._state.restore()


def _list_of(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
