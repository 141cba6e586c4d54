# SPDX-License-Identifier: Apache-2.0
"""Whether the optimizers of manual optimization step on the gradient of one loss.

Muon with AdamW does: the gradient of a step is that of all parameters, and has one noise scale. A
GAN does not: each network has a loss of its own. It is seen in the first steps, by what each
backward pass reaches and by when the optimizers step, not by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from noisescale.collectors.halves.graph import walk

Verdict = Literal["one loss", "losses of their own", "steps apart"]

_MOST_STEPS = 16
"""Steps that are looked at, each with a walk through the graph: where one optimizer rests for
longer, each is measured on its own parameters."""

STEPS_APART = (
    "The optimizers must step together, got one that stepped twice before another one did: both are"
    " on the gradient of one loss, which has no noise scale of its own then. Step all of them after"
    " the same backward passes, or give all parameters to one optimizer, as parameter groups."
    " Networks with losses of their own (a GAN's) need `toggle_optimizer` or `detach`."
)


class OneLoss:
    """Looks at the first steps of several optimizers.

    Args:
        optimizers: Those of the module, in their order.
        on_any_rank: Returns whether something holds on any rank. It is a collective, and called
            where an optimizer is about to step, which all ranks do alike.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], on_any_rank: Callable[[bool], bool]
    ) -> None:
        self._parameters = [
            [p for group in optimizer.param_groups for p in group["params"]]
            for optimizer in optimizers
        ]
        self._of = {id(p): which for which, some in enumerate(self._parameters) for p in some}
        self._all = {*range(len(optimizers))}
        self._on_any_rank = on_any_rank
        self._stepped: set[int] = set()
        self._steps = 0
        self._kept: set[int] = set()
        """Optimizers that had not stepped, and whose gradients a later pass added to."""
        self._differ = self._came_between = self._stepped_again = False
        self.examples = 0.0
        """Examples of the passes so far, on this rank."""

    def look_at_pass(self, loss: Tensor, examples: float) -> None:
        """Look at a backward pass that begins at the loss."""
        self.examples += examples
        if self._stepped:
            self._came_between = True
            self._kept = {
                i for i in self._all - self._stepped if _has_gradients(self._parameters[i])
            }
        start = [] if loss.grad_fn is None else [loss.grad_fn]
        nodes = walk(start, lambda node: [n for n, _ in node.next_functions if n is not None])
        reached = {self._of.get(id(getattr(node, "variable", None))) for node in nodes}
        self._differ |= not self._all <= reached

    def look_at_step(self, which: int) -> Verdict | None:
        """Look at a step of one of the optimizers, which is about to be taken."""
        self._stepped_again |= which in self._stepped
        self._stepped.add(which)
        self._steps += 1
        if self._on_any_rank(self._differ) or self._steps > _MOST_STEPS:
            return "losses of their own"
        if self._stepped != self._all:
            return None
        if self._stepped_again and self._on_any_rank(which in self._kept):
            return "steps apart"
        return "losses of their own" if self._came_between else "one loss"


def _has_gradients(parameters: Sequence[Tensor]) -> bool:
    """Return whether a gradient is there that is not zero. Reads the device."""
    return any(p.grad is not None and bool(p.grad.any()) for p in parameters)
