# SPDX-License-Identifier: Apache-2.0
"""The noise scale of independent batches, against formulas that keep every gradient."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from noisescale.estimation.independent_batches import LEAST, BatchProducts, IndependentBatches

Gradients = NDArray[np.float64]


def products(gradients: Gradients, weights: Any = None, examples: Any = None) -> Any:
    """Those of gradients that come one after the other, of shape (batches, elements)."""
    weights = np.ones(len(gradients)) if weights is None else weights
    examples = weights if examples is None else examples
    found = []
    mean, before = np.zeros(gradients.shape[1]), 0.0
    for g, w, n in zip(gradients, weights, examples, strict=True):
        if before:
            deviation = w * before / (w + before) * ((g - mean) ** 2).sum()
            found.append(BatchProducts(w, n, before, float(g @ mean), float(deviation)))
        before += w
        mean = mean + (g - mean) * w / before
    return IndependentBatches(found)


def drawn(rng: Any, batches: int, directions: int, noise: float) -> Gradients:
    """Gradients around a mean of length 1, whose noise has the trace `noise`."""
    mean = rng.normal(size=directions)
    scatter = rng.normal(size=(batches, directions)) * (noise / directions) ** 0.5
    return mean / np.linalg.norm(mean) + scatter


@pytest.mark.parametrize("weighted", [False, True])
def test_moments_are_those_of_all_gradients_at_once(weighted: bool) -> None:
    """τ is the weighted sum of squared deviations over n - 1, |G|² the mean product of pairs."""
    rng = np.random.default_rng(0)
    gradients = drawn(rng, 30, 7, noise=4.0)
    weights = rng.integers(1, 6, 30).astype(float) if weighted else np.ones(30)

    found = products(gradients, weights, examples=np.full(30, 16.0))

    deviations = ((gradients - weights @ gradients / weights.sum()) ** 2).sum(axis=1)
    pairs = np.triu(np.outer(weights, weights), 1)
    assert found.batches == 30
    assert found.noise_trace == pytest.approx(weights @ deviations / weights[1:].sum() * 16)
    signal = (pairs * (gradients @ gradients.T)).sum() / pairs.sum()
    assert found.grad_sq_norm == pytest.approx(signal)


@pytest.mark.parametrize("noise", [0.3, 20.0])
def test_the_variance_of_the_signal_is_no_less_than_what_it_scatters(noise: float) -> None:
    """As a mean of independent terms it would be a third of it where noise is small."""
    rng = np.random.default_rng(2)
    found = [products(drawn(rng, 40, 20, noise)) for _ in range(600)]

    of_noise, _, of_signal = np.mean([one.covariance for one in found], axis=0)
    assert 0.9 < of_signal / np.var([one.grad_sq_norm for one in found]) < 4
    assert of_noise == pytest.approx(np.var([one.noise_trace for one in found]), rel=0.2)


@pytest.mark.parametrize(
    ("batches", "directions", "noise"), [(10, 100, 5.0), (40, 10, 5.0), (80, 30, 20.0)]
)
def test_intervals_cover(batches: int, directions: int, noise: float) -> None:
    rng = np.random.default_rng(3)
    scales = [products(drawn(rng, batches, directions, noise)).noise_scale() for _ in range(400)]

    covered = sum(scale.low <= noise <= scale.high for scale in scales)
    assert covered / 400 > 0.93


def test_few_batches_say_nothing() -> None:
    gradients = drawn(np.random.default_rng(4), LEAST - 1, 5, noise=0.1)

    found = products(gradients).noise_scale(unit="sequences")

    assert (found.low, found.resolved) == (0, False)
    assert (found.steps, found.unit) == (LEAST - 1, "sequences")


def test_an_interval_that_hangs_on_one_batch_is_known() -> None:
    rng = np.random.default_rng(5)
    gradients = drawn(rng, 40, 100, noise=5.0)
    even = products(gradients)
    gradients[30] += 20 * rng.normal(size=100)
    uneven = products(gradients)
    few = IndependentBatches([BatchProducts(1, 1, 1.0 + k, 1.0, k) for k in range(11)])

    assert not even.hangs_on_one
    assert uneven.hangs_on_one
    assert uneven.largest_share > 0.9
    assert 0.2 < few.largest_share < 6 / few.batches
    assert not few.hangs_on_one  # a few always have a largest one


def test_bounds_are_in_order_whatever_the_batches() -> None:
    rng = np.random.default_rng(6)
    for _ in range(200):
        lengths = np.exp(1.5 * rng.normal(size=(rng.integers(10, 40), 1)))
        scale = products(lengths * [[1.0, 0.0]]).noise_scale()
        assert 0 <= scale.low <= scale.high
