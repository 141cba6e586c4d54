# SPDX-License-Identifier: Apache-2.0
"""What was done to the gradients of a step that leaves nothing to be measured, and by whom.

What is measured are the gradients as backward passes make them. The step's own is `p.grad` at the
end of its last pass, see `AveragedGradient`. It is the mean of the small batches' gradients only
if nobody else writes to `p.grad` before: the norm that a pass finds is that which the last one
left, and the first pass leaves what came in it. The first measured steps and every 16th after
these are checked. The row of the step has three numbers and two counts for it, so a check needs no
collective of its own, and the host does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

from torch import Tensor
from torch.nn import Parameter

from noisescale.collectors.own_pass import is_ours, name_of

LARGEST_CHANGE = 1e-4
"""Share of |g|² that norms taken twice may differ by. Rounding is below 1e-6."""

Cause = Literal["in pieces", "gone", "stale", "between", "within"]
"""What was done to a step's gradients, see `ReducedChanges`."""


class Changes(NamedTuple):
    """What one rank saw happen to the gradients of one step."""

    sq_norms: Tensor | None = None
    """See `AveragedGradient.changes`; None: the step was not checked."""
    gone: int = 0
    """The number of parameters whose gradient was gone by the end of the pass in which it came."""
    in_pieces: bool = False
    """Whether gradients came in pieces, by passes within a pass."""


UNTOUCHED = Changes()


class ReducedChanges(NamedTuple):
    """What all ranks saw happen to the gradients of one step: `Changes`, reduced."""

    stale: float = 0.0
    """|g|² that the first pass found, as a share of the step's |g|²."""
    between: float = 0.0
    """The change of |g|² between passes, as a share of the step's |g|²."""
    within: float = 0.0
    """The difference of |g|² after the first pass and of what came in it, as a share."""
    gone: float = 0.0
    """Parameters that lost their gradient, summed over ranks."""
    in_pieces: float = 0.0
    """Ranks on which gradients came in pieces."""
    checked: bool = False
    """Whether this rank looked at `p.grad` before and after each pass."""

    @property
    def cause(self) -> Cause | None:
        """Why the step cannot be measured; None: nothing was done to it."""
        if self.in_pieces:
            return "in pieces"
        if self.gone:
            return "gone"
        for cause, share in (
            ("stale", self.stale),
            ("between", self.between),
            ("within", self.within),
        ):
            if share > LARGEST_CHANGE:
                return cast(Cause, cause)
        return None

    def explain(self, cause: Cause, gone: Sequence[str], suspects: Sequence[str]) -> str:
        """Say what happened and what helps.

        Args:
            cause: See `cause`.
            gone: Names of parameters without a gradient.
            suspects: What may have written to `p.grad`.
        """
        by = f" What may do so: {', '.join(suspects[:4])}." if suspects else ""
        names = f" of {', '.join(gone[:4])}{', ...' if len(gone) > 4 else ''}" if gone else ""
        off = (
            "it was zero" if self.within == math.inf else f"|g|² was off by {self.within:.2g} of it"
        )
        return {
            "in pieces": (
                "A backward pass ran within another one (as with GradCache and cached contrastive"
                " losses, or reentrant checkpointing of a module that is used twice), so that the"
                " gradient of a batch came in pieces. Such steps are not measured. Let the loss"
                " reach the parameters in one backward pass."
            ),
            "gone": (
                f"Gradients{names} were gone by the end of the backward pass in which they came, as"
                " with an optimizer that steps within it. Such steps are not measured. Step and"
                f" call `zero_grad` after the backward pass.{by}"
            ),
            "stale": (
                "`p.grad` held a gradient before the first backward pass of a step"
                f" ({self.stale:.2g} of |g|²): an older step's, or that of a pass that the meter"
                " did not see. Such steps are not measured. Call `zero_grad` after each step, and"
                " let the meter see all backward passes."
            ),
            "between": (
                "`p.grad` was changed between two backward passes of a step (|g|² by"
                f" {self.between:.2g} of it), so it is not the mean over them; or, with"
                " `averaged=False`, between the last pass and `meter.step()`. Such steps are not"
                " measured. Scale, clip and reset gradients only after the last pass of a step, let"
                " the meter see all passes, and close the step before the optimizer steps."
                f"{by}"
            ),
            "within": (
                f"`p.grad` was not what the backward pass had computed when the pass ended ({off}),"
                " as hooks on parameters changed it. Such steps are not measured. Take and change"
                f" gradients after the last pass of a step.{by}"
            ),
        }[cause]


def hooks_on(named_parameters: Iterable[tuple[str, Parameter]]) -> list[str]:
    """Name the hooks of others on parameters, and a parameter where each one is."""
    found: dict[str, str] = {}
    for name, parameter in named_parameters:
        accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None)
        for hooks in (parameter._backward_hooks, accumulated):
            for hook in (hooks or {}).values():
                found.setdefault(name_of(hook), name)
    return [f"the hook {hook} on {place}" for hook, place in found.items() if not is_ours(hook)]
