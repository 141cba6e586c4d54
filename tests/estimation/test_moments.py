# SPDX-License-Identifier: Apache-2.0
import itertools
import re

import numpy as np
import pytest

from noisescale.estimation.moments import effective_batch_sizes, gradient_moments


def test_the_moments_that_made_the_norms_are_recovered() -> None:
    signal, noise = 3.0, 40.0
    small, big = signal + noise / 4, signal + noise / 12

    moments = gradient_moments(small, big, small_batch=4, big_batch=12)

    assert moments.grad_sq_norm == pytest.approx(signal)
    assert moments.noise_trace == pytest.approx(noise)


@pytest.mark.parametrize("sizes", [(8, 8), (1, 31), (3, 5, 40)])
def test_moments_are_unbiased_on_gaussian_gradients(sizes: tuple[int, ...]) -> None:
    """For unequal parts too, where the peers' formula with the mean sizes is far off."""
    rng = np.random.default_rng(0)
    true_gradient, spread = np.full(10, 0.3), np.linspace(0.5, 2, 10)
    steps = 20_000
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


def test_one_batch_size_is_refused() -> None:
    message = (
        "`big_batch` must exceed `small_batch` and be finite, got 8 against 8. One batch size"
        " cannot separate signal and noise: measure on two or more devices, or accumulate"
        " gradients."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gradient_moments(1.0, 1.0, small_batch=8, big_batch=8)
    with pytest.raises(ValueError, match=r"^`big_batch` must exceed"):
        gradient_moments(1.0, 1.0, small_batch=8, big_batch=float("inf"))


@pytest.mark.parametrize("small_batch", [0, -1, float("nan"), float("inf")])
def test_an_impossible_small_batch_is_refused(small_batch: float) -> None:
    with pytest.raises(ValueError, match="`small_batch` must be a positive number of examples"):
        gradient_moments(1.0, 1.0, small_batch=small_batch, big_batch=8)


def test_impossible_parts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`sizes` must have at least 2 parts, got \[8\]\."):
        effective_batch_sizes([8])
    with pytest.raises(ValueError, match=r"`sizes` and `weights` must be positive, got \[8, 0\]"):
        effective_batch_sizes([8, 0])
    with pytest.raises(ValueError, match=r"`sizes` and `weights` must be positive"):
        effective_batch_sizes([8, 8], [1.5, -0.5])
