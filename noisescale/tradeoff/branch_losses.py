# SPDX-License-Identifier: Apache-2.0
"""B_crit from the losses of branches that trained on equally many examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from noisescale.bounded import Bounded
from noisescale.checks import check_confidence, require_positive
from noisescale.refusal import Refusal
from noisescale.tradeoff.profile import profile_of
from noisescale.tradeoff.run_sums import Array
from noisescale.tradeoff.tradeoff import Floats

LEAST_SCATTER = 1e-4
"""The least scatter of a loss: repeats that differ by rounding alone show no scatter."""

LOSS_SCATTER = 0.01
"""The scatter of a branch's loss if no branch is repeated: the tolerance of Merrill et al."""


class BranchLosses(NamedTuple):
    """The result of `fit_branch_losses`."""

    critical_batch_size: Bounded
    """0 and infinite are possible values, and ends."""
    keeping_up: float | None
    """Merrill's largest batch size that keeps up; None if even the second batch size does not.

    It depends on the tolerance and on how far the loss falls, and is not B_crit.
    """
    scatter: float
    """The scatter of a loss that the interval is made with."""


def fit_branch_losses(
    batch_sizes: Floats,
    losses: Floats,
    scatter: float | None = None,
    *,
    orders: Sequence[object] | None = None,
    tolerance: float = 0.01,
    confidence: float = 0.95,
) -> BranchLosses:
    """Fit loss(B) = L + D·B/(B + B_crit) to branches from one checkpoint over equal examples.

    With E examples a branch takes E/B steps, each with 1/(1 + B_crit/B) of the progress of a
    noise-free step. So a branch of batch size B lags behind one of a vanishing batch size, whose
    loss is L, by B/(B + B_crit) of the drop D. L and D >= 0 are fitted at each B_crit.

    Args:
        batch_sizes: Of the branches, in examples, shape (n,); repeated ones for several orders.
        losses: Smoothed losses at the ends of the branches, shape (n,).
        scatter: Standard deviation of a loss. Default: that of repeated branches around their own
            mean; 0.01 where none are repeated.
        orders: The order of the data that each branch had, shape (n,). What branches of one order
            have in common then does not count as scatter. Each order needs a branch of each batch
            size.
        tolerance: Loss that Merrill's largest batch size may lose.
        confidence: Coverage of the interval.

    Raises:
        ValueError: If there are fewer than three batch sizes, or a value is not finite.

    Examples:
        >>> sizes = [64, 256, 1024, 4096]
        >>> losses = [2 + 0.1 * b / (b + 500) for b in sizes]
        >>> found = fit_branch_losses(sizes, losses, 0.001, tolerance=0.05)
        >>> f"{found.critical_batch_size.value:.1f} {found.keeping_up:g}"
        '500.0 256'

    References:
        Merrill et al. 2025, arXiv:2505.23971, for branches; McCandlish et al. 2018, for the law.
    """
    check_confidence(confidence)
    batch, loss = (np.asarray(x, dtype=np.float64) for x in (batch_sizes, losses))
    if batch.shape != loss.shape or batch.ndim != 1 or len(sizes := np.unique(batch)) < 3:
        raise Refusal(
            ("batch_sizes", "losses"),
            "be equally long and have three batch sizes or more",
            f"shapes {batch.shape} and {loss.shape}",
            "Give the final loss of each branch.",
        )
    if not (np.isfinite(loss).all() and (batch > 0).all() and np.isfinite(batch).all()):
        raise Refusal(
            ("losses", "batch_sizes"),
            "be finite, and batch sizes positive",
            f"{losses!r} at {batch_sizes!r}",
            "Leave out branches that diverged.",
        )
    freedom = math.inf
    if scatter is None:
        scatter, freedom = _scatter(batch, loss, orders)
    else:
        require_positive("scatter", scatter, "Pass 0.01, in units of the loss.")
    quantile = float(stdtrit(min(freedom, 1e9), 0.5 + confidence / 2))

    def misfit(log_critical: float) -> float:
        lag = batch / (batch + math.exp(log_critical))
        off, lag = loss - loss.mean(), lag - lag.mean()
        spread = float(lag @ lag)
        drop = max(float(lag @ off) / spread, 0.0) if spread > 1e-24 else 0.0
        return float(((off - drop * lag) ** 2).sum())

    means = np.array([loss[batch == size].mean() for size in sizes])
    return BranchLosses(
        profile_of(misfit, batch, (quantile * scatter) ** 2),
        _largest_in_reach(sizes, means, tolerance),
        scatter,
    )


def _largest_in_reach(sizes: Array, losses: Array, tolerance: float) -> float | None:
    """Return the largest batch size up to which all are within a tolerance of the best so far."""
    worse = losses[1:] > np.minimum.accumulate(losses)[:-1] + tolerance
    kept = int(np.argmax(worse)) if worse.any() else len(worse)
    return float(sizes[kept]) if kept else None


def _scatter(batch: Array, loss: Array, orders: Sequence[object] | None) -> tuple[float, float]:
    """Return the standard deviation of repeats and its degrees of freedom; else `LOSS_SCATTER`."""
    sizes = np.unique(batch)
    freedom = len(loss) - len(sizes)
    if not freedom:
        return LOSS_SCATTER, math.inf
    if orders is None:
        groups = [loss[batch == size] for size in sizes]
        residuals = np.concatenate([group - group.mean() for group in groups])
    else:
        table = _by_order(batch, loss, list(orders))
        table = table - table.mean(axis=0)
        residuals = (table - table.mean(axis=1, keepdims=True)).ravel()
        freedom -= len(table) - 1
    return max(math.sqrt(float(residuals @ residuals) / freedom), LEAST_SCATTER), freedom


def _by_order(batch: Array, loss: Array, orders: list[object]) -> Array:
    """Return the losses by order and batch size."""
    cells = {
        (size, order): k
        for k, (size, order) in enumerate(zip(batch.tolist(), orders, strict=False))
    }
    sizes, names = np.unique(batch).tolist(), list(dict.fromkeys(orders))
    try:
        if len(orders) != len(loss) or len(cells) != len(loss):
            raise KeyError
        return np.array([[loss[cells[size, name]] for size in sizes] for name in names])
    except KeyError:
        raise Refusal(
            "orders",
            "name, for each batch size, each order once",
            f"{len(names)} orders for {len(loss)} branches of {len(sizes)} batch sizes",
            "Leave them out.",
        ) from None
