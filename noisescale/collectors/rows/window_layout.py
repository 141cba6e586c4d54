# SPDX-License-Identifier: Apache-2.0
"""How the micro-batches of one optimizer step make up the small and the big batch.

Of each backward pass of the step on this rank `sizes` has the examples, `weights` what the mean
loss was multiplied by, up to a factor common to all ranks, and `loss_divisor` divided every loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

Weight = float | Tensor
"""The weight of a loss; a number on the device if only the device knows it."""


class WindowLayout(NamedTuple):
    """Factors from one rank's captured squared norms to the squared norms of mean gradients.

    A rank's gradient is the mean over its parts (its micro-batches, its halves, or itself), and
    the step's gradient is the mean over the ranks. If passes have weights u, the step's gradient is
    Σu·g/Σu over all passes of all ranks, and the captured gradient of a part is W·u·g/Σu. Ranks sum
    the weights too, so only the ratios of weights matter.

    A rank describes its parts by two numbers, a = Σw/n and c = Σw²/n, with the weights w of the
    parts within the rank. With W ranks the effective batch sizes are W/Σa and W²/Σc, whatever the
    parts are. So a new way of training only has to give its a and its c.
    """

    small_scale: float
    """Factor from the captured Σ|g_part|² to the mean of |g_part|² over this rank's parts."""
    big_scale: float
    """Factor from the captured |g|² to |g|² of the mean gradient."""
    inverse_part_size: Weight
    """Mean of 1/n over this rank's parts, in 1/examples."""
    inverse_size: Weight
    """1/n of this rank's own gradient as a mean of unequal parts: Σw²/n, in 1/examples."""
    part_weight: Weight = 1.0
    """Σu² over this rank's parts, which |g_part|² is averaged with; 1: ranks count alike."""
    total_weight: Weight = 1.0
    """Σu over this rank's parts, which the step's gradient is averaged with."""
    over_step: float = 0.0
    """1 if the loss is one mean over all that the weights count in the step (its tokens, say); 0 if
    it is a mean of means over examples.

    Then |g|² has tr(Σ)/B of noise, B the step's examples, whatever the weights: tr(Σ)/B is the
    variance of such a step's gradient. In a mean of means it has tr(Σ)·Σ(w²/n).
    """


UNKNOWN = WindowLayout(math.nan, math.nan, math.nan, math.nan, over_step=math.nan)
"""The layout of a step that is left out."""


def layout_of_parts(
    sizes: Sequence[float], ends: Sequence[int], loss_divisor: float
) -> WindowLayout:
    """Every part is a mean over as many micro-batches; `ends`: micro-batches up to each part's."""
    passes, parts = len(sizes), len(ends)
    mean_inverse = sum(1 / n if n else math.inf for n in sizes) / passes if passes else math.nan
    if not passes or not parts:
        return WindowLayout(math.nan, math.nan, math.nan, mean_inverse / max(passes, 1))
    length = passes / parts
    return WindowLayout(
        small_scale=(loss_divisor / length) ** 2 / parts,
        big_scale=(loss_divisor / passes) ** 2,
        inverse_part_size=mean_inverse / length,
        inverse_size=mean_inverse / passes,
    )


def weighted_layout(
    sizes: Sequence[float], ends: Sequence[int], weights: Sequence[Weight]
) -> WindowLayout:
    """Every part is a weighted mean over micro-batches, as heavy as all of them together.

    With parts of weights u the mean of |g_part|², weighted by u², is |G|² + tr(Σ)·Σ(u²/n)/Σu², and
    |g|² is |G|² + tr(Σ)·Σ(u²/n)/(Σu)². Within a rank Σ(u²/n) is that of the rank as well.
    """
    squares = [u * u for u in weights]
    inverse = _sum([uu * (1 / n) if n else math.inf for uu, n in zip(squares, sizes, strict=True)])
    if len(ends) < len(weights):
        totals = [_sum(weights[start:end]) for start, end in pairwise([0, *ends])]
        squares = [u * u for u in totals]
    return WindowLayout(1.0, 1.0, inverse, inverse, _sum(squares), _sum(weights))


def halved_layout(whole: WindowLayout, size: float) -> WindowLayout:
    """Return the layout where the small norm is |g|² and the variance of g, as of two halves.

    Args:
        whole: The layout of the step's gradient.
        size: Its examples.
    """
    weight = 2.0 * whole.total_weight  # unlike 1: a variance may well come out below zero
    inverse = weight * weight * (1 / size if size else math.inf)
    return whole._replace(
        small_scale=whole.big_scale,
        total_weight=weight,
        part_weight=weight * weight,
        inverse_part_size=2 * inverse,
        inverse_size=inverse,
    )


def _sum(numbers: Sequence[Weight]) -> Weight:
    """Return the sum of numbers, without adding a zero to numbers on the device."""
    return sum(numbers[1:], start=numbers[0]) if numbers else 0.0
