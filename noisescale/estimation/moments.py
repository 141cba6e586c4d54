# SPDX-License-Identifier: Apache-2.0
"""One step: squared norms of gradients -> |G|² and tr(Σ). Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class GradientMoments(NamedTuple):
    """The two moments of the gradient distribution that make up the noise scale.

    Both are unbiased and therefore signed: a single step's `grad_sq_norm` is often negative
    when the noise dominates. Average them over steps; never clamp them before.
    """

    grad_sq_norm: float
    """|G|², the squared norm of the true (noise-free) gradient."""
    noise_trace: float
    """tr(Σ), the trace of the covariance of per-example gradients."""


def gradient_moments(
    small_sq_norm: float, big_sq_norm: float, *, small_batch: float, big_batch: float
) -> GradientMoments:
    """Estimate |G|² and tr(Σ) from gradient norms at two batch sizes.

    The expected squared norm of a batch-B gradient is |G|² + tr(Σ)/B. Two batch sizes give
    two equations, solved here for the two unknowns:

        |G|²  = (B_big·|g_big|² - B_small·|g_small|²) / (B_big - B_small)
        tr(Σ) = (|g_small|² - |g_big|²) / (1/B_small - 1/B_big)

    Unequal parts stay exact when `small_batch` and `big_batch` are their effective sizes, see
    `effective_batch_sizes`.

    Args:
        small_sq_norm: |g_small|², the mean over the small batches of one step.
        big_sq_norm: |g_big|², of the gradient averaged over those small batches.
        small_batch: Examples in each small batch; may be fractional.
        big_batch: Examples in the big batch; may be fractional.

    Returns:
        Both moments. Average each over steps before taking their ratio: the ratio of
        single-step values is biased, and its denominator may be negative.

    Raises:
        ValueError: If `big_batch <= small_batch`: one batch size cannot separate the moments.

    Example:
        >>> gradient_moments(9.0, 3.0, small_batch=8, big_batch=32)
        GradientMoments(grad_sq_norm=1.0, noise_trace=64.0)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """
    if not 0 < small_batch < math.inf:
        raise ValueError(
            f"`small_batch` must be a positive number of examples, got {small_batch!r}."
            " Pass the examples behind each small gradient."
        )
    if not small_batch < big_batch < math.inf:
        raise ValueError(
            f"`big_batch` must exceed `small_batch` and be finite, got {big_batch!r} against"
            f" {small_batch!r}. One batch size cannot tell signal from noise: measure on two or"
            " more devices, or accumulate."
        )
    grad_sq_norm = (big_batch * big_sq_norm - small_batch * small_sq_norm) / (
        big_batch - small_batch
    )
    noise_trace = (small_sq_norm - big_sq_norm) / (1 / small_batch - 1 / big_batch)
    return GradientMoments(grad_sq_norm, noise_trace)


class BatchSizes(NamedTuple):
    """Effective examples behind the small gradients and behind their average."""

    small: float
    big: float


def effective_batch_sizes(
    sizes: Sequence[float], weights: Sequence[float] | None = None
) -> BatchSizes:
    """Return the batch sizes that make `gradient_moments` exact for unequal parts.

    With the step's gradient g = Σ wᵢgᵢ over parts of nᵢ examples,

        E Σ wᵢ|gᵢ|² = |G|² + tr(Σ)·Σ wᵢ/nᵢ        E|g|² = |G|² + tr(Σ)·Σ wᵢ²/nᵢ

    so 1/Σ(wᵢ/nᵢ) and 1/Σ(wᵢ²/nᵢ) play the parts of B_small and B_big. Data parallelism
    averages its ranks with equal weights wᵢ = 1/m whatever their sizes, which leaves the
    harmonic mean of the sizes for B_small and m times it for B_big.

    Args:
        sizes: nᵢ, the examples of every part of one step. A part that averaged k micro-batches
            of nᵢⱼ examples counts as nᵢ = k²/Σⱼ(1/nᵢⱼ).
        weights: wᵢ, which sum to 1; default: equal.

    Returns:
        The effective sizes, in examples.

    Raises:
        ValueError: If there are fewer than two parts, or a size or a weight is not positive.

    Example:
        >>> effective_batch_sizes([8, 24])
        BatchSizes(small=12.0, big=24.0)
    """
    if len(sizes) < 2:
        raise ValueError(
            f"`sizes` must be of at least 2 parts, got {sizes!r}."
            " Measure on two or more devices, or accumulate."
        )
    if weights is None:
        weights = [1 / len(sizes)] * len(sizes)
    if not min(*sizes, *weights) > 0:
        raise ValueError(
            f"`sizes` and `weights` must be positive, got {sizes!r} and {weights!r}."
            " Leave out parts without examples."
        )
    parts = list(zip(sizes, weights, strict=True))
    return BatchSizes(1 / sum(w / n for n, w in parts), 1 / sum(w**2 / n for n, w in parts))
