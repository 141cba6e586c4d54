# SPDX-License-Identifier: Apache-2.0
"""Whether a measured step shows the noise, by its reduced norms."""

from __future__ import annotations

from noisescale.collectors.collector import Collector
from noisescale.collectors.rows.step_norms import StepNorms

_BAD_WEIGHTS = (
    "The weights of a step were all zero, negative or not finite, or only some ranks gave weights."
    " Such steps are not measured. Give each pass on each rank the number of tokens, or of other"
    " terms, in the mean that the loss is."
)
_LACKS_LOSSES = (
    "Many rows of a batch have no loss (labels of -100, boxes without a positive, a hinge that is"
    " satisfied), and their weights are not known. The halves of such a batch may show |G|² wrong"
    " by more than 5 %, so such steps are not measured. Pass `weight_fn` (or `weight` to the"
    " meter): a tensor with the weight of each row in the mean, which is its positives or tokens,"
    " or 1 for each row of a plain mean."
)
_ONE_PART = (
    "One part of a step had all of the weight, so there is nothing to compare it with. Such steps"
    " are not measured. Use larger micro-batches, so that several of a step have a weight."
)
_NO_GRADIENT = (
    "`p.grad` was zero in all parameters when the last backward pass of a step had ended. Such"
    " steps are not measured. If every step is like that, let the loss depend on the parameters"
    " that are trained, and let no hook or cache take gradients before the last pass has ended."
)


def fault_in(
    norms: StepNorms,
    way: type[Collector],
    *,
    nothing_to_compare: str,
    lone: bool,
    measured: bool,
) -> str | None:
    """Return a warning if a step does not show the noise, None if it does.

    The warning is empty where the user cannot change anything.

    Args:
        norms: The reduced norms of the step.
        way: What captured it, with warnings of its own.
        nothing_to_compare: The warning if a step has only one small batch.
        lone: Whether the last steps had too few micro-batches.
        measured: Whether some step was sound before.
    """
    if norms.bad_weights:
        return _BAD_WEIGHTS
    if norms.big_sq_norm == 0 < norms.examples:
        return "" if measured and not norms.small_sq_norm > 0 else _NO_GRADIENT
    if norms.lacks_losses:
        return _LACKS_LOSSES
    if not norms.comparable:
        if norms.alone and norms.weighted and not lone:
            return _ONE_PART
        return nothing_to_compare if norms.alone and not measured else ""
    return way.same_gradient if norms.identical_parts else None
