# SPDX-License-Identifier: Apache-2.0
import itertools
import math
from typing import Any

import numpy as np
import pytest
from refused import refused

from noisescale.estimation.moments import effective_batch_sizes, gradient_moments


@pytest.mark.parametrize(
    ("sizes", "weights"), [((2, 2), None), ((1, 2, 5), None), ((1, 2), (0.75, 0.25))]
)
def test_moments_are_unbiased(sizes: tuple[int, ...], weights: Any) -> None:
    """E Σw|gᵢ|² and E|g|² over all draws of examples from {0, 2}, where |G|² = tr(Σ) = 1."""
    draws = np.array([*itertools.product((0.0, 2.0), repeat=sum(sizes))])
    parts = [part.mean(axis=1) for part in np.split(draws, np.cumsum(sizes)[:-1], axis=1)]
    share = np.full(len(sizes), 1 / len(sizes)) if weights is None else np.array(weights)
    small, big = (share @ np.square(parts)).mean(), ((share @ parts) ** 2).mean()
    batches = effective_batch_sizes(sizes, weights)

    moments = gradient_moments(small, big, small_batch=batches.small, big_batch=batches.big)

    assert moments == pytest.approx((1.0, 1.0), abs=1e-12)


BAD = [("small_batch", 0, 8), ("small_batch", math.nan, 8), ("big_batch", 8, math.inf)]


@pytest.mark.parametrize(("name", "small", "big"), [*BAD, ("big_batch", 8, 8)])
def test_impossible_batches_are_refused(name: str, small: float, big: float) -> None:
    with refused(name):
        gradient_moments(1.0, 1.0, small_batch=small, big_batch=big)


def test_impossible_parts_are_refused() -> None:
    with refused("sizes", got="[8]"):
        effective_batch_sizes([8])
    for sizes, *weights in (([8, 0],), ([8, 8], [1.5, -0.5])):
        with refused("sizes", "weights", requirement="positive"):
            effective_batch_sizes(sizes, *weights)
