# SPDX-License-Identifier: Apache-2.0
"""Where tr(Σ) is known within a factor, the interval holds whatever it is within that."""

import math

import numpy as np
import pytest

from noisescale.estimator import NoiseScaleEstimator
from noisescale.moments import GradientMoments
from noisescale.recent import RecentSteps
from noisescale.systematic import widened

FACTOR = 1.5


def moments_read(noise_scale: float, batch_size: float, ratio: float) -> GradientMoments:
    """What is read where tr(Σ) is `ratio` times what it should be, and |g|² what it is; |G| = 1."""
    noise_trace = ratio * noise_scale
    return GradientMoments(1 + (noise_scale - noise_trace) / batch_size, noise_trace)


@pytest.mark.parametrize("noise_scale", [3.0, 50.0, 4000.0])
@pytest.mark.parametrize("batch_size", [16, 256])
@pytest.mark.parametrize("ratio", [1 / FACTOR, 0.9, 1.0, 1.1, FACTOR])
def test_the_widened_interval_holds_what_the_factor_hides(
    noise_scale: float, batch_size: int, ratio: float
) -> None:
    signal, noise = moments_read(noise_scale, batch_size, ratio)
    read = noise / signal if signal > 0 else math.inf

    low, high = widened(read * (1 - 1e-9), read * (1 + 1e-9), FACTOR, batch_size)

    assert low <= noise_scale <= high


def test_the_ends_are_those_of_the_factor() -> None:
    for ratio in (1 / FACTOR, FACTOR):
        signal, noise = moments_read(50.0, 128, ratio)
        ends = widened(noise / signal, noise / signal, FACTOR, 128)
        assert min(abs(end - 50.0) for end in ends) < 1e-9


@pytest.mark.parametrize("interval", [(0.0, math.inf), (0.0, 5.0), (0.0, 0.0), (7.0, math.inf)])
def test_open_ends_stay_open(interval: tuple[float, float]) -> None:
    low, high = widened(*interval, FACTOR, 32)

    assert 0 <= low <= interval[0]
    assert high >= interval[1]
    assert widened(*interval, 1.0, 32) == interval


def test_estimators_go_by_the_batch_sizes_of_their_steps() -> None:
    """Steps of 16 and of 48: the mean of 1/B over them, weighted by B, is 2/64."""
    estimator, recent = NoiseScaleEstimator(window=4000), RecentSteps(relative_width=0.01)
    rng = np.random.default_rng(0)
    for step in range(400):
        size = 16 if step % 2 else 48
        signal, noise = moments_read(20.0, size, 1.0)
        moments = GradientMoments(signal + rng.normal() / size, noise)
        estimator.update(moments, size)
        recent.add(moments, size)
    for estimate in (estimator.estimate, recent.estimate):
        exact, wide = estimate(), estimate(FACTOR)
        expected = widened(exact.low, exact.high, FACTOR, 32)
        assert (wide.low, wide.high) == pytest.approx(expected, rel=0.01)
        assert wide.value == exact.value


def test_a_state_of_before_has_about_as_many_steps() -> None:
    estimator = NoiseScaleEstimator(window=100)
    for _ in range(50):
        estimator.update(GradientMoments(1.0, 20.0), 32)
    state = estimator.state_dict()
    del state["averages"]["number"]
    resumed = NoiseScaleEstimator(window=100)

    resumed.load_state_dict(state)

    assert resumed.estimate() == estimator.estimate()
    assert resumed.estimate(FACTOR).low == pytest.approx(estimator.estimate(FACTOR).low, rel=0.1)
