# SPDX-License-Identifier: Apache-2.0
"""The best batch size for a fixed number of examples, by a noise scale and the training loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BLIND_STEPS, LONG_RUN = 1000, 200_000
"""The steps that a run has at the batch size that is taken before anything is measured.

Runs of more examples than the second number have more steps, as their square root: in sweeps of
language models the best batch size grows as D^0.38 (Power Lines) to D^0.57 (Step Law).
"""

KAPPA = 0.03
"""See `best_batch_size`."""

LIKELY = 2.0
"""The factor within which the best batch size is, in most runs."""

BEGINS = 0.05
"""The share of the run from which losses count: before it they fall for other reasons."""

WIDTH = 0.2
"""The width of a slice, in the logarithm of the share of the run that is over."""

LAST = 10
"""The slice in which losses no longer count. It begins at 36.9 % of the run."""

LEAST_SLICES = 3


def blind_batch_size(examples: float) -> float:
    """Return the batch size for a run of so many examples, of which nothing is known yet.

    Examples:
        >>> blind_batch_size(60_000), blind_batch_size(20_000_000)
        (60.0, 2000.0)

    References:
        Bergsma et al. 2025, "Power Lines", arXiv:2505.13738. Li et al. 2025, "Step Law",
        arXiv:2503.04715.
    """
    return examples / BLIND_STEPS / math.sqrt(max(examples / LONG_RUN, 1.0))


def critical_batch_size_at(noise_scale: float, share: float) -> float:
    """Return the critical batch size of a run from the noise scale at a share of it, up to a third.

    It is 2.1 times the noise scale at a tenth of the run. The noise scale rises as the square root
    of the share.
    """
    return 2.1 * noise_scale * math.sqrt(0.1 / share)


def best_batch_size(examples: float, critical_batch_size: float, slope: float) -> float:
    """Return B*, the largest fixed batch size that costs a run next to no loss.

    It is the geometric mean of two estimates: `blind_batch_size`, and KAPPA·r/σ. A batch B
    loses the share B/r of the progress of its examples, r being the critical batch size, and what
    is lost is worth σ = -d ln L/d ln E times that in the logarithm of the loss.

    Args:
        examples: Of the whole run.
        critical_batch_size: r.
        slope: σ.

    Examples:
        >>> round(best_batch_size(200_000, 400.0, slope=0.1))
        155
    """
    return math.sqrt(blind_batch_size(examples) * KAPPA * critical_batch_size / slope)


def slice_of(share: float) -> float:
    """Return the number of the slice that a share of the run is in: 0 begins at 5 %.

    Examples:
        >>> [slice_of(share) for share in (0.0, 0.04, 0.05, 0.1, 0.35)]
        [-inf, -2, 0, 3, 9]
    """
    return math.floor(math.log(share / BEGINS) / WIDTH) if share > 0 else -math.inf


class Slice(NamedTuple):
    """Losses of a part of the run."""

    number: int
    """See `slice_of`."""
    share: float
    """The mean share of the run that was over."""
    loss: float
    """The mean loss of its examples."""


def slope_of(slices: Sequence[Slice]) -> float:
    """Return σ = -d ln L/d ln E by least squares.

    It is NaN for few slices, for losses not above 0, and where it is within two standard errors of
    zero: its sign would be chance.
    """
    if len(slices) < LEAST_SLICES or not all(0 < one.loss < math.inf for one in slices):
        return math.nan
    x = [math.log(one.share) for one in slices]
    y = [math.log(one.loss) for one in slices]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    width = sum((a - mean_x) ** 2 for a in x)
    slope = across / width
    left = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(left / (len(slices) - 2) / width)
    return -slope if abs(slope) > 2 * error else math.nan
