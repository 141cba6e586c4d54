# SPDX-License-Identifier: Apache-2.0
"""The average over a run that its learning rate goes by."""

import json

import numpy as np
import pytest

from noisescale import GradientMoments
from noisescale.meter.estimates import Estimates
from noisescale.meter.options import MeterOptions


def average_after(*steps: tuple[GradientMoments, float, int]) -> GradientMoments:
    """The average over a run of steps with these moments, batch sizes, and numbers of steps."""
    estimates = Estimates([], MeterOptions())
    for moments, batch_size, stands_for in steps:
        estimates.update(moments, [], batch_size, stands_for)
    assert estimates.run.mean is not None
    return estimates.run.mean


def test_steps_of_one_batch_size_count_alike_with_those_that_they_stand_for() -> None:
    rng = np.random.default_rng(0)
    signal, noise = rng.uniform(0.5, 2, 20), rng.uniform(10, 50, 20)
    stands_for = rng.integers(1, 9, 20)
    drawn = zip(signal, noise, stands_for, strict=True)

    run = average_after(*((GradientMoments(q, s), 64.0, int(n)) for q, s, n in drawn))

    assert run.grad_sq_norm == pytest.approx(np.average(signal, weights=stands_for))
    assert run.noise_trace == pytest.approx(np.average(noise, weights=stands_for))


@pytest.mark.parametrize(("first", "then"), [(2048.0, 32.0), (2.0, 128.0)])
def test_a_step_counts_by_its_progress(first: float, then: float) -> None:
    """A noise scale of 40 all along: a step makes the share B/(B + 40) of a noise-free one's.

    |G|² is 5 in eight steps at the first batch size, and 1 in 80 at the next.
    """
    early, late = (GradientMoments(5.0, 200.0), first, 1), (GradientMoments(1.0, 40.0), then, 1)

    run = average_after(*[early] * 8, *[late] * 80)

    progress = [8 * first / (first + 40), 80 * then / (then + 40)]
    assert run.grad_sq_norm == pytest.approx(np.average([5.0, 1.0], weights=progress))
    assert run.noise_trace == pytest.approx(40 * run.grad_sq_norm)


def test_where_no_signal_is_seen_a_step_counts_by_its_batch_size() -> None:
    no_signal, some = GradientMoments(-1.0, 200.0), GradientMoments(1.0, 100.0)

    run = average_after((no_signal, 16.0, 1), (some, 64.0, 1))

    assert run.noise_trace == pytest.approx((16 * 200 + 64 * 100) / 80)


def test_it_is_saved() -> None:
    saved, restored = (Estimates([], MeterOptions()) for _ in range(2))
    for batch_size, steps in ((64.0, 1), (64.0, 7), (16.0, 3)):
        saved.update(GradientMoments(1.0, 50.0), [], batch_size, steps, loss=1.5)
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert restored.state_dict() == saved.state_dict()
