# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Callable

import numpy as np
import pytest
from refused import refused

from noisescale import Tradeoff
from noisescale.tradeoff.run_sums import Parts, Sums


def test_costs_lie_on_the_papers_hyperbola() -> None:
    """(S/S_min - 1)(E/E_min - 1) = 1 and E = B·S, McCandlish et al. equation 2.11."""
    tradeoff, sizes = Tradeoff(min_steps=1000, min_examples=20_000), np.array([0.5, 20, 4096])

    steps, examples = tradeoff.steps(sizes), tradeoff.examples(sizes)

    assert (steps / 1000 - 1) * (examples / 20_000 - 1) == pytest.approx([1] * 3)
    assert examples == pytest.approx(sizes * steps)
    assert tradeoff.critical_batch_size == 20  # at which both costs are twice their least
    assert (tradeoff.steps(20), tradeoff.examples(20)) == (steps[1], examples[1]) == (2000, 40_000)


def test_a_run_predicts_the_steps_a_simulation_takes_at_another_batch_size() -> None:
    """A run is simulated step by step: progress 1/(1 + b/B), b rising with the progress made."""

    def noise_scale(progress: float) -> float:
        return 10 + 0.4 * progress

    def simulate(batch_size: float) -> tuple[list[float], int]:
        progress, scales = 0.0, []
        while progress < 200:
            scales.append(noise_scale(progress))
            progress += 1 / (1 + scales[-1] / batch_size)
        return scales, len(scales)

    scales, steps = simulate(32)

    tradeoff = Tradeoff.from_run(scales, np.full(steps, 32), np.ones(steps))

    for batch_size in (4, 32, 500):
        assert tradeoff.steps(batch_size) == pytest.approx(simulate(batch_size)[1], rel=0.02)


def test_segments_not_measured_take_the_next_value_and_the_last_one_at_the_end() -> None:
    of_run = {"batch_size": np.full(5, 32), "steps": np.array([1, 2, 3, 4, 5])}

    gaps = Tradeoff.from_run([math.nan, 10, math.nan, 30, math.nan], **of_run)

    assert gaps == Tradeoff.from_run([10, 10, 30, 30, 30], **of_run)


def test_a_saved_step_costs_the_exchange_rate() -> None:
    """By differences along the front, at batch sizes below and above B_crit."""
    tradeoff = Tradeoff(min_steps=1000, min_examples=50_000)
    for batch_size in (10.0, 50.0, 300.0):
        near = batch_size * (1 + 1e-6)
        more_examples = tradeoff.examples(near) - tradeoff.examples(batch_size)
        saved_steps = tradeoff.steps(batch_size) - tradeoff.steps(near)

        rate = tradeoff.exchange_rate(batch_size)

        assert rate == pytest.approx(more_examples / saved_steps, rel=1e-4)


def test_the_two_definitions_of_critical_differ() -> None:
    tradeoff = Tradeoff(min_steps=1000, min_examples=2_000_000)

    zhang = tradeoff.overhead_batch_size(0.2, 256)

    perfect_scaling = tradeoff.examples(256) / zhang
    assert tradeoff.steps(zhang) == pytest.approx(1.2 * perfect_scaling)
    assert (zhang, tradeoff.critical_batch_size) == pytest.approx((707.2, 2000))


def test_gamma_is_what_following_the_noise_scale_saves() -> None:
    """Two segments of 100 noise-free steps at b = 10 and 90, batches √(r·b), summed by hand."""
    run = Tradeoff.from_run([10, 90], batch_size=[30, 30], steps=[100 * 4 / 3, 100 * 4])
    r = 40.0
    batches = [math.sqrt(r * 10), math.sqrt(r * 90)]
    steps = sum(100 * (1 + b / batch) for b, batch in zip((10, 90), batches, strict=True))
    examples = sum(100 * (batch + b) for b, batch in zip((10, 90), batches, strict=True))

    excess = (steps / run.min_steps - 1) * (examples / run.min_examples - 1)
    assert run.gamma == pytest.approx(excess) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("call", "arguments", "got"),
    [
        (lambda: Tradeoff.from_run([math.nan] * 2, [32] * 2, [1] * 2), "noise_scale", "2 with"),
        (lambda: Tradeoff.from_run([1, 2], [3], [1, 1]), "noise_scale batch_size steps", "shapes"),
        (lambda: Tradeoff.from_run([10, -20], [32, 32], [1, 1]), "noise_scale", "-20.0 at"),
        (lambda: Tradeoff.from_run([10, 20], [0, 32], [1, 1]), "batch_size", "0.0 at position 0"),
        (lambda: Tradeoff.from_run([0, 0], [32, 32], [1, 1]), "min_examples", "0.0"),
        (lambda: Tradeoff.from_run([10, 20], [32, 32], [1, math.inf]), "steps", "inf at position"),
        (lambda: Tradeoff(0, 10), "min_steps", "0"),
        (lambda: Tradeoff(10, math.nan), "min_examples", "nan"),
        (lambda: Tradeoff(10, 10).steps(-1), "batch_size", "-1"),
        (lambda: Tradeoff(10, 10, gamma=1.1), "gamma", "1.1"),
        (lambda: Tradeoff(10, 10).overhead_batch_size(0, 256), "overhead", "0"),
    ],
)
def test_impossible_numbers_are_refused(
    call: Callable[[], object], arguments: str, got: str
) -> None:
    with refused(*arguments.split()) as raised:
        call()

    assert raised.value.got.startswith(got)


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
    # A run without noise or without progress has none.
    assert math.isnan(Parts.at_noise_scale(np.zeros(2), 8.0, 10.0).gamma)
    assert math.isnan(Parts.at_progress(np.zeros(1), np.ones(1), np.ones(1)).gamma)
    assert Sums(0.0, 10.0).critical_batch_size == math.inf
