# SPDX-License-Identifier: Apache-2.0
"""S_min and E_min of a run: both ways in, and what stands in where nothing was measured."""

import math

import numpy as np
import pytest

from noisescale.tradeoff.run_sums import Parts, Sums

B, BATCH, STEPS = np.array([5.0, 40.0, 90.0]), np.array([8.0, 64.0, 16.0]), np.array([10.0, 20, 5])


def test_noise_scales_and_the_progress_they_mean_contribute_alike() -> None:
    """Against the sums of McCandlish et al. 2018, appendix D, step by step."""
    by_hand = [0.0, 0.0]
    for b, size, steps in zip(B.tolist(), BATCH.tolist(), STEPS.tolist(), strict=True):
        by_hand[0] += steps / (1 + b / size)
        by_hand[1] += steps * b / (1 + b / size)

    known, estimated = (
        Parts.at_noise_scale(B, BATCH, STEPS),
        Parts.at_progress(BATCH / (BATCH + B), BATCH, STEPS),
    )

    assert known.sums == pytest.approx(by_hand)
    assert estimated.sums == pytest.approx(by_hand)
    assert estimated.steps(32.0).sum() == pytest.approx(known.sums.steps(32.0))
    assert estimated.of_blocks(np.array([0, 0, 1])).sums == pytest.approx(by_hand)


def test_gamma_of_a_noise_scale_that_grows_as_the_root_of_the_steps_is_24_25ths() -> None:
    """Per noise-free step b = √s: (∫ s^¼ ds)²/∫ √s ds = (4/5)²/(2/3)."""
    s = (np.arange(20_000) + 0.5) / 20_000
    b = np.sqrt(s)

    parts = Parts.at_noise_scale(b, batch_size=1.0, steps=1 + b)

    assert parts.gamma == pytest.approx(24 / 25, rel=1e-4)
    assert Parts.at_noise_scale(B[:1], BATCH[:1], STEPS[:1]).gamma == pytest.approx(1.0)


def test_a_run_without_noise_or_without_progress_has_no_gamma() -> None:
    assert math.isnan(Parts.at_noise_scale(np.zeros(2), 8.0, 10.0).gamma)
    assert math.isnan(Parts.at_progress(np.zeros(1), np.ones(1), np.ones(1)).gamma)
    assert Sums(0.0, 10.0).critical_batch_size == math.inf
