# SPDX-License-Identifier: Apache-2.0
import math
import re

import numpy as np
import pytest

from noisescale import Tradeoff


def test_both_costs_are_twice_their_optimum_at_the_critical_batch_size() -> None:
    tradeoff = Tradeoff(min_steps=1000, min_examples=20_000)

    assert tradeoff.critical_batch_size == 20
    assert tradeoff.steps(20) == 2 * tradeoff.min_steps
    assert tradeoff.examples(20) == 2 * tradeoff.min_examples


@pytest.mark.parametrize("batch_size", [0.5, 20, 4096])
def test_costs_lie_on_the_papers_hyperbola(batch_size: float) -> None:
    """(S/S_min - 1)(E/E_min - 1) = 1 and E = B·S, McCandlish et al. equation 2.11."""
    tradeoff = Tradeoff(min_steps=1234, min_examples=56_789)
    steps, examples = tradeoff.steps(batch_size), tradeoff.examples(batch_size)

    assert (steps / 1234 - 1) * (examples / 56_789 - 1) == pytest.approx(1)
    assert examples == pytest.approx(batch_size * steps)


def test_a_run_costs_at_its_own_batch_size_what_it_cost() -> None:
    rng = np.random.default_rng(0)
    tradeoff = Tradeoff.from_run(rng.uniform(5, 50, 30), np.full(30, 64), np.full(30, 10))

    assert tradeoff.steps(64) == pytest.approx(300)
    assert tradeoff.examples(64) == pytest.approx(300 * 64)


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


def test_changes_of_the_batch_size_within_a_run_are_counted() -> None:
    """One noise scale throughout: whatever the batch sizes were, the law is the same."""
    fixed = Tradeoff.from_run([20, 20], batch_size=[20, 20], steps=[50, 50])
    # 100 steps at B = 20 make 50 steps of progress; 25 steps at 20 and 75 · 2/3 at 60 do too.
    changed = Tradeoff.from_run([20, 20], batch_size=[20, 60], steps=[50, 100 / 3])

    assert changed.min_steps == pytest.approx(fixed.min_steps)
    assert changed.min_examples == pytest.approx(fixed.min_examples)


def test_segments_not_measured_take_the_next_value_and_the_last_one_at_the_end() -> None:
    gaps = Tradeoff.from_run(
        [math.nan, 10, math.nan, 30, math.nan], np.full(5, 32), np.array([1, 2, 3, 4, 5])
    )

    filled = Tradeoff.from_run([10, 10, 30, 30, 30], np.full(5, 32), np.array([1, 2, 3, 4, 5]))
    assert gaps == filled


def test_a_saved_step_costs_the_exchange_rate() -> None:
    """By differences along the front, at batch sizes below and above B_crit."""
    tradeoff = Tradeoff(min_steps=1000, min_examples=50_000)
    for batch_size in (10.0, 50.0, 300.0):
        near = batch_size * (1 + 1e-6)
        more_examples = tradeoff.examples(near) - tradeoff.examples(batch_size)
        saved_steps = tradeoff.steps(batch_size) - tradeoff.steps(near)

        rate = tradeoff.exchange_rate(batch_size)

        assert rate == pytest.approx(more_examples / saved_steps, rel=1e-4)
        assert tradeoff.batch_size_for(rate) == pytest.approx(batch_size)


def test_the_two_definitions_of_critical_differ() -> None:
    tradeoff = Tradeoff(min_steps=1000, min_examples=2_000_000)

    zhang = tradeoff.overhead_batch_size(0.2, 256)

    perfect_scaling = tradeoff.examples(256) / zhang
    assert tradeoff.steps(zhang) == pytest.approx(1.2 * perfect_scaling)
    assert (zhang, tradeoff.critical_batch_size) == pytest.approx((707.2, 2000))


def test_costs_of_many_batch_sizes_come_at_once() -> None:
    tradeoff = Tradeoff(min_steps=1000, min_examples=20_000)
    sizes = np.array([4.0, 20, 64])

    assert tradeoff.steps(sizes).tolist() == [tradeoff.steps(size) for size in sizes]
    assert tradeoff.examples(sizes).tolist() == [tradeoff.examples(size) for size in sizes]


def test_gamma_is_what_following_the_noise_scale_saves() -> None:
    """Two segments of 100 noise-free steps at b = 10 and 90, batches √(r·b), summed by hand."""
    run = Tradeoff.from_run([10, 90], batch_size=[30, 30], steps=[100 * 4 / 3, 100 * 4])
    r = 40.0
    batches = [math.sqrt(r * 10), math.sqrt(r * 90)]
    steps = sum(100 * (1 + b / batch) for b, batch in zip((10, 90), batches, strict=True))
    examples = sum(100 * (batch + b) for b, batch in zip((10, 90), batches, strict=True))

    assert run.adaptive_examples(steps) == pytest.approx(examples)
    assert run.gamma == pytest.approx(0.8)
    fixed = run.min_examples * (1 + 1 / (steps / run.min_steps - 1))
    assert examples < fixed


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            ([math.nan, math.nan], [32, 32], [1, 1]),
            "`noise_scale` must have a measured value, got 2 without one. Train longer, or at a"
            " larger batch size, until the monitor resolves it.",
        ),
        (
            ([10, 20], [32], [1, 1]),
            "`noise_scale`, `batch_size` and `steps` must be one-dimensional and equally long, got"
            " shapes (2,), (1,) and (2,). Give one value for each segment of the run.",
        ),
        (
            ([10, -20], [32, 32], [1, 1]),
            "`noise_scale` must be finite and not negative, got -20.0 at position 1."
            " Leave that segment out.",
        ),
        (
            ([10, 20], [0, 32], [1, 1]),
            "`batch_size` must be finite and positive, got 0.0 at position 0."
            " Leave that segment out.",
        ),
        (
            ([0, 0], [32, 32], [1, 1]),
            "`min_examples` must be positive and finite, got 0.0. Take it from `Tradeoff.from_run`"
            " or from `fit_tradeoff`.",
        ),
        (
            ([10, 20], [32, 32], [1, math.inf]),
            "`steps` must be finite and positive, got inf at position 1. Leave that segment out.",
        ),
    ],
)
def test_a_run_that_says_nothing_is_refused(run: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Tradeoff.from_run(*run)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^`min_steps` must be positive and finite, got 0\."):
        Tradeoff(0, 10)
    with pytest.raises(ValueError, match=r"^`min_examples` must be positive and finite, got nan\."):
        Tradeoff(10, math.nan)
    with pytest.raises(ValueError, match=r"^`batch_size` must be positive and finite, got -1\."):
        Tradeoff(10, 10).steps(-1)
    with pytest.raises(ValueError, match=r"^`batch_size` must be positive and finite, got inf\."):
        Tradeoff(10, 10).examples(math.inf)
    with pytest.raises(ValueError, match=r"^`gamma` must lie between 0 and 1, got 1\.1\."):
        Tradeoff(10, 10, gamma=1.1)
    with pytest.raises(ValueError, match=r"^`gamma` must lie between 0 and 1, got 0\."):
        Tradeoff(10, 10, gamma=0)
    with pytest.raises(
        ValueError, match=r"^`overhead` must be positive and finite, got 0\. Give a s"
    ):
        Tradeoff(10, 10).overhead_batch_size(0, 256)
    with pytest.raises(ValueError, match=r"^`exchange_rate` must be positive and finite, got -1\."):
        Tradeoff(10, 10).batch_size_for(-1)
    with pytest.raises(
        ValueError, match=r"^`steps` must exceed `min_steps`, got 10 <= 10\. No batch"
    ):
        Tradeoff(10, 10).adaptive_examples(10)
    with pytest.raises(ValueError, match=r"^`steps` must exceed `min_steps`, got inf <= 10\."):
        Tradeoff(10, 10).adaptive_examples(math.inf)
