# SPDX-License-Identifier: Apache-2.0
"""Whether the optimizers of manual optimization step on the gradient of one loss.

Muon with AdamW does: the gradient of a step is that of all parameters, and has one noise scale. A
GAN does not: each network has a loss of its own. It is seen in the first steps, by what each
backward pass reaches and by when the optimizers step, not by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from noisescale.collectors.halves.graph import walk

Verdict = Literal["one loss", "losses of their own", "steps apart"]

STEPS_APART = (
    "The optimizers must step together, got one that stepped twice before another one did: both are"
    " on the gradient of one loss, which has no noise scale of its own then. Step all of them after"
    " the same backward passes, or give all parameters to one optimizer, as parameter groups."
)


class OneLoss:
    """Looks at the first steps of several optimizers.

    Args:
        optimizers: Those of the module, in their order.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._of = {
            id(p): which
            for which, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._all = {*self._of.values()}
        self._stepped: set[int] = set()
        self._came_between = False
        self.examples = 0.0
        """Examples of the passes so far, on this rank."""

    def look_at_pass(self, loss: Tensor, examples: float) -> Verdict | None:
        """Look at a backward pass that begins at the loss."""
        self.examples += examples
        self._came_between |= bool(self._stepped)
        start = [] if loss.grad_fn is None else [loss.grad_fn]
        nodes = walk(start, lambda node: [n for n, _ in node.next_functions if n is not None])
        reached = {self._of.get(id(getattr(node, "variable", None))) for node in nodes}
        return None if self._all <= reached else "losses of their own"

    def look_at_step(self, which: int) -> Verdict | None:
        """Look at a step of one of the optimizers, which is about to be taken."""
        if which in self._stepped:
            return "steps apart"
        self._stepped.add(which)
        if self._stepped != self._all:
            return None
        return "losses of their own" if self._came_between else "one loss"
