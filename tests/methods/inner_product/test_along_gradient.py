# SPDX-License-Identifier: Apache-2.0
"""The noise along the gradient, from Gaussian gradients whose moments are known."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.recent import RecentSteps
from noisescale.meter.options import MeterOptions
from noisescale.methods.inner_product.along_gradient import NoiseAlongGradient

RANKS, EACH = 4, 8
BATCH = RANKS * EACH
G = np.array([1.0, 0.0, 0.0, 0.0])
VARIANCES = np.array([20.0, 40.0, 40.0, 60.0])
"""Of an example's gradient: b_ip = 20, b = 160."""


def unbiased(parts: NDArray[np.float64]) -> GradientMoments:
    """|G|² and tr(Σ) of the mean gradients of ranks, by pairs."""
    dots = parts @ parts.T
    signal = (dots.sum() - np.trace(dots)) / (RANKS * (RANKS - 1))
    noise = (np.trace(dots) / RANKS - dots.mean()) / (1 / EACH - 1 / BATCH)
    return GradientMoments(float(signal), float(noise))


def measured(
    direction: NDArray[np.float64], *, steps: int = 400, seed: int = 0
) -> tuple[NoiseAlongGradient, RecentSteps]:
    rng = np.random.default_rng(seed)
    v = direction / np.linalg.norm(direction)
    found, whole = NoiseAlongGradient(MeterOptions(), None), RecentSteps()
    for step in range(1, steps + 1):
        parts = G + rng.normal(size=(RANKS, 4)) * np.sqrt(VARIANCES / EACH)
        moments = unbiased(parts)
        whole.add(moments, BATCH)
        found.update(unbiased((parts @ v)[:, None]), moments, BATCH, step)
    return found, whole


def estimate(
    found: NoiseAlongGradient, whole: NoiseScale, persistence: float, steps: int = 400
) -> NoiseScale:
    found._persistence = persistence
    return found.estimate(lambda _: whole, steps)


def test_along_the_gradient_it_is_the_noise_there_and_the_alignment_is_the_squared_cosine() -> None:
    held = np.zeros(2)
    for seed in range(20):
        found, whole = measured(G, seed=seed)
        along = estimate(found, whole.estimate(), 0.9)
        aside, _ = measured(np.array([1.0, 0.0, 1.0, 0.0]), seed=seed)
        alignment = aside.alignment()
        held += 5 * along.low <= 20 <= along.high / 5, alignment.low <= 0.5 <= alignment.high
        assert along.value == pytest.approx(20, rel=0.6)

    assert (held >= 17).all()  # of 95 %


@pytest.mark.parametrize(("angle", "known"), [(30, True), (80, False), (90, False)])
def test_where_momentum_points_elsewhere_nothing_is_known(angle: float, known: bool) -> None:
    """At 80° the ratio would be (20·cos² + 40·sin²)/cos² = 1,300."""
    turned = np.array([math.cos(math.radians(angle)), math.sin(math.radians(angle)), 0.0, 0.0])
    found, whole = measured(turned)

    along = estimate(found, whole.estimate(), 0.9)

    assert math.isfinite(along.high) == known
    assert (along.low > 0) == known


def test_momentum_that_its_own_noise_turns_is_taken() -> None:
    """At β = 0.5 a = 1/(1 + 160/(3·32)) = 0.375: cos² of 0.35 is more than half of that."""
    turned = np.array([math.sqrt(0.35), math.sqrt(0.65), 0.0, 0.0])
    found, whole = measured(turned, steps=1000)
    now = whole.estimate()

    assert estimate(found, now, 0.5, 1000).resolved
    assert not estimate(found, now, 0.9, 1000).resolved  # a = 0.79


def test_momentum_that_is_nearly_all_noise_tells_nothing() -> None:
    """At β = 0 a = 1/(1 + 160/32) = 0.17, of which cos² = 0.15 is more than half."""
    turned = np.array([math.sqrt(0.15), math.sqrt(0.85), 0.0, 0.0])
    found, whole = measured(turned, steps=1000, seed=3)

    assert 0.09 < found.alignment(1000).value < 0.24
    assert estimate(found, whole.estimate(), 0.0, 1000).low == 0
