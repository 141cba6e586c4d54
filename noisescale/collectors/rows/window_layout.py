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


def whole_rank(sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
    """The rank is the part: a mean over micro-batches of `sizes` examples."""
    scale = (loss_divisor / len(sizes)) ** 2 if sizes else math.nan
    inverse_size = mean_inverse(sizes) / max(len(sizes), 1)
    return WindowLayout(scale, scale, inverse_size, inverse_size)


def each_micro_batch(sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
    """Every micro-batch is a part."""
    window = len(sizes)
    inverse_part_size = mean_inverse(sizes)
    return WindowLayout(
        small_scale=loss_divisor**2 / window if window else math.nan,
        big_scale=(loss_divisor / window) ** 2 if window else math.nan,
        inverse_part_size=inverse_part_size,
        inverse_size=inverse_part_size / max(window, 1),
    )


def halves_of_a_batch(size: float, rows: int, loss_divisor: float) -> WindowLayout:
    """The two halves of one batch are the parts, each of as many of its rows.

    An odd row is in neither. Then the half difference of the halves, g_s, has tr(Σ)·(B - 1)/B² of
    noise instead of tr(Σ)/B, B rows: |g|² + |g_s|² is that of parts of B²/(2·B - 1) rows. There
    are two or more, of `size` examples together.
    """
    signed = rows - rows % 2
    return WindowLayout(
        small_scale=loss_divisor**2,
        big_scale=loss_divisor**2,
        inverse_part_size=(1 + signed / rows) / size if size else math.inf,
        inverse_size=1 / size if size else math.inf,
    )


def weighted_rank(sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
    """The rank is the part: a weighted mean over its micro-batches, as heavy as all of them."""
    total = _sum(weights)
    return _weighted_layout(sizes, _squares(weights), part_weight=total * total, total_weight=total)


def weighted_micro_batches(sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
    """Every micro-batch is a part, with a weight of its own."""
    squares = _squares(weights)
    return _weighted_layout(sizes, squares, part_weight=_sum(squares), total_weight=_sum(weights))


def weighted_rounds(
    sizes: Sequence[float], weights: Sequence[Weight], rounds: Sequence[int]
) -> WindowLayout:
    """Every round is a part, as heavy as its micro-batches; `rounds`: micro-batches up to each."""
    of_rounds = [_sum(weights[start:end]) for start, end in pairwise([0, *rounds])]
    return _weighted_layout(
        sizes,
        _squares(weights),
        part_weight=_sum(_squares(of_rounds)),
        total_weight=_sum(weights),
    )


def weighted_rows(sizes: Tensor, weights: Tensor) -> WindowLayout:
    """Every row of one micro-batch is a part, or every group of rows, with a weight of its own.

    Args:
        sizes: The examples in each part.
        weights: Of the parts.
    """
    squares = weights.square()
    inverse = (squares / sizes).sum()
    return WindowLayout(1.0, 1.0, inverse, inverse, squares.sum(), weights.sum())


def _weighted_layout(
    sizes: Sequence[float], squares: Sequence[Weight], *, part_weight: Weight, total_weight: Weight
) -> WindowLayout:
    # With parts of weights u the mean of |g_part|², weighted by u², is E = |G|² + tr(Σ)·Σ(u²/n)/Σu²
    # and |g|² is |G|² + tr(Σ)·Σ(u²/n)/(Σu)². Within a rank Σ(u²/n) is that of the rank as well.
    inverse = _sum([uu * (1 / n) if n else math.inf for uu, n in zip(squares, sizes, strict=True)])
    return WindowLayout(1.0, 1.0, inverse, inverse, part_weight, total_weight)


def _squares(weights: Sequence[Weight]) -> list[Weight]:
    return [u * u for u in weights]


def _sum(numbers: Sequence[Weight]) -> Weight:
    """Return the sum of numbers, without adding a zero to numbers on the device."""
    return sum(numbers[1:], start=numbers[0]) if numbers else 0.0


def mean_inverse(sizes: Sequence[float]) -> float:
    """Return the mean of 1/n; infinite if a part is empty, NaN if there is no part."""
    if not sizes:
        return math.nan
    return sum(1 / n if n else math.inf for n in sizes) / len(sizes)
