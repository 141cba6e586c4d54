# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import numpy as np
import pytest
from refused import refused

from noisescale.estimation.moments import effective_batch_sizes, gradient_moments


@pytest.mark.parametrize("sizes", [(8, 8), (1, 31), (3, 5, 40)])
def test_moments_are_unbiased_on_gaussian_gradients(sizes: tuple[int, ...]) -> None:
    """For unequal parts too, where the peers' formula with the mean sizes is far off."""
    rng = np.random.default_rng(0)
    true_gradient, spread = np.full(10, 0.3), np.linspace(0.5, 2, 10)
    steps = 10_000
    parts = [
        true_gradient + spread * rng.normal(size=(steps, 10)) / np.sqrt(size) for size in sizes
    ]
    small = np.mean([(g**2).sum(axis=1) for g in parts], axis=0)
    big = (np.mean(parts, axis=0) ** 2).sum(axis=1)
    batches = effective_batch_sizes(sizes)

    estimates = np.array(
        [
            gradient_moments(s, b, small_batch=batches.small, big_batch=batches.big)
            for s, b in zip(small, big, strict=True)
        ]
    )

    truth = np.array([(true_gradient**2).sum(), (spread**2).sum()])
    errors = (estimates.mean(axis=0) - truth) / (estimates.std(axis=0) / np.sqrt(steps))
    assert np.abs(errors).max() < 4, f"errors in standard errors: {errors}"


def test_equal_weights_of_unequal_parts_have_the_expected_squared_norms() -> None:
    """E Σw|gᵢ|² and E|g|² in closed form, against an enumeration of all draws from {-1, +1}."""
    sizes = (1, 2)
    draws = list(itertools.product((-1.0, 1.0), repeat=sum(sizes)))
    small = np.mean([(d[0] ** 2 + np.mean(d[1:]) ** 2) / 2 for d in draws])
    big = np.mean([((d[0] + np.mean(d[1:])) / 2) ** 2 for d in draws])
    batches = effective_batch_sizes(sizes)

    moments = gradient_moments(small, big, small_batch=batches.small, big_batch=batches.big)

    assert moments == pytest.approx((0.0, 1.0), abs=1e-12)


def test_the_ratio_of_one_steps_moments_is_biased() -> None:
    """Why moments are averaged before they are divided: exact, over all four equal draws."""
    estimates = [
        gradient_moments(first**2, ((first + second) / 2) ** 2, small_batch=1, big_batch=2)
        for first, second in itertools.product((1.0, 3.0), repeat=2)
    ]

    assert np.mean([m.noise_trace for m in estimates]) == 1
    assert np.mean([m.grad_sq_norm for m in estimates]) == 4
    assert np.mean([m.noise_trace / m.grad_sq_norm for m in estimates]) == pytest.approx(-19 / 7)


@pytest.mark.parametrize(
    ("name", "small", "big"),
    [
        ("big_batch", 8, 8),
        ("big_batch", 8, math.inf),
        *(("small_batch", bad, 8) for bad in (0, -1, math.nan, math.inf)),
    ],
)
def test_impossible_batches_are_refused(name: str, small: float, big: float) -> None:
    with refused(name):
        gradient_moments(1.0, 1.0, small_batch=small, big_batch=big)


def test_impossible_parts_are_refused() -> None:
    with refused("sizes", got="[8]"):
        effective_batch_sizes([8])
    for sizes, *weights in (([8, 0],), ([8, 8], [1.5, -0.5])):
        with refused("sizes", "weights", requirement="positive"):
            effective_batch_sizes(sizes, *weights)
