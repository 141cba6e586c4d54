# SPDX-License-Identifier: Apache-2.0
"""|G|² and tr(Σ) of one step, from squared norms of gradients. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from noisescale.refusal import Refusal


class GradientMoments(NamedTuple):
    """The two moments of the gradient's distribution. Their ratio is the noise scale.

    Both estimates are unbiased, so they may be negative: the `grad_sq_norm` of a single step often
    is when the noise dominates. Average the moments over steps, and never clamp them before.
    """

    grad_sq_norm: float
    """|G|², the squared norm of the true (noise-free) gradient."""
    noise_trace: float
    """tr(Σ), the trace of the covariance of per-example gradients."""


def gradient_moments(
    small_sq_norm: float, big_sq_norm: float, *, small_batch: float, big_batch: float
) -> GradientMoments:
    """Estimate |G|² and tr(Σ) from gradient norms at two batch sizes.

    The expected squared norm of the gradient of a batch of size B is |G|² + tr(Σ)/B. Two batch
    sizes give two equations. Their solution is:

        |G|²  = (B_big·|g_big|² - B_small·|g_small|²) / (B_big - B_small)
        tr(Σ) = (|g_small|² - |g_big|²) / (1/B_small - 1/B_big)

    For small batches of unequal sizes the equations hold with the effective sizes that
    `effective_batch_sizes` returns.

    Args:
        small_sq_norm: |g_small|², the mean over the small batches of one step.
        big_sq_norm: |g_big|², of the average of the gradients of the small batches.
        small_batch: Examples in each small batch; may be fractional.
        big_batch: Examples in the big batch; may be fractional.

    Returns:
        Both moments. Average each of them over steps, then take the ratio: the ratio of the moments
        of a single step is biased, and its denominator may be negative.

    Raises:
        ValueError: If `big_batch <= small_batch`: one batch size cannot separate the moments.

    Examples:
        >>> gradient_moments(9.0, 3.0, small_batch=8, big_batch=32)
        GradientMoments(grad_sq_norm=1.0, noise_trace=64.0)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    if not 0 < small_batch < math.inf:
        raise Refusal(
            "small_batch",
            "be a positive number of examples",
            repr(small_batch),
            "Pass the number of examples in each small batch.",
        )
    if not small_batch < big_batch < math.inf:
        raise Refusal(
            "big_batch",
            "exceed `small_batch` and be finite",
            f"{big_batch!r} against {small_batch!r}",
            "One batch size cannot separate signal and noise: measure on two or more"
            " devices, or accumulate gradients.",
        )
    grad_sq_norm = (big_batch * big_sq_norm - small_batch * small_sq_norm) / (
        big_batch - small_batch
    )
    noise_trace = (small_sq_norm - big_sq_norm) / (1 / small_batch - 1 / big_batch)
    return GradientMoments(grad_sq_norm, noise_trace)


class BatchSizes(NamedTuple):
    """Effective sizes, in examples, of the small batches and of the big batch."""

    small: float
    big: float


def effective_batch_sizes(
    sizes: Sequence[float], weights: Sequence[float] | None = None
) -> BatchSizes:
    """Return the batch sizes with which `gradient_moments` is exact for unequal parts.

    The gradient of the step is g = Σ wᵢgᵢ over parts of nᵢ examples. Then

        E Σ wᵢ|gᵢ|² = |G|² + tr(Σ)·Σ wᵢ/nᵢ        E|g|² = |G|² + tr(Σ)·Σ wᵢ²/nᵢ

    so B_small is 1/Σ(wᵢ/nᵢ) and B_big is 1/Σ(wᵢ²/nᵢ). Data parallelism averages m ranks with equal
    weights wᵢ = 1/m, whatever their sizes. B_small is then the harmonic mean of the sizes, and
    B_big is m times B_small.

    Args:
        sizes: nᵢ, the number of examples of each part of one step. For a part that is the average
            of k micro-batches of nᵢⱼ examples pass nᵢ = k²/Σⱼ(1/nᵢⱼ).
        weights: wᵢ, with the sum 1. Default: equal weights.

    Returns:
        The effective sizes, in examples.

    Raises:
        ValueError: If there are fewer than two parts, or a size or a weight is not positive.

    Examples:
        >>> effective_batch_sizes([8, 24])
        BatchSizes(small=12.0, big=24.0)
    """
    if len(sizes) < 2:
        raise Refusal(
            "sizes",
            "have at least 2 parts",
            repr(sizes),
            "Measure on two or more devices, or accumulate gradients.",
        )
    if weights is None:
        weights = [1 / len(sizes)] * len(sizes)
    if not min(*sizes, *weights) > 0:
        raise Refusal(
            ("sizes", "weights"),
            "be positive",
            f"{sizes!r} and {weights!r}",
            "Leave out parts without examples.",
        )
    parts = list(zip(sizes, weights, strict=True))
    return BatchSizes(1 / sum(w / n for n, w in parts), 1 / sum(w**2 / n for n, w in parts))
