# SPDX-License-Identifier: Apache-2.0
import io
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from cpus import printed_on_each_kind

from noisescale import GradientMoments, NoiseScale, NoiseScaleEstimator, gradient_moments
from noisescale.estimation.estimator import LARGEST_MOMENT
from noisescale.estimation.recent import RecentSteps
from noisescale.history.increments import Increments


def estimator_after(
    noise: np.ndarray,
    signal: np.ndarray,
    weights: np.ndarray | None = None,
    **options: object,
) -> NoiseScaleEstimator:
    estimator = NoiseScaleEstimator(**options)
    for t, (s, q) in enumerate(zip(noise, signal, strict=True)):
        weight = 1 if weights is None else weights[t]
        assert estimator.update(GradientMoments(q, s), weight)
    return estimator


def draws(steps: int, *, signal: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Correlated noisy moments: tr(Σ) around 20, |G|² around `signal`."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=steps)
    return (
        20 + 3 * rng.normal(size=steps) - 2 * common,
        signal + 0.4 * rng.normal(size=steps) + 0.3 * common,
    )


def test_gradients_without_any_signal_are_not_resolved() -> None:
    """Ranks with disjoint supports have g₁·g₂ = 0, and |G|² is exactly that."""
    estimator = estimator_after(np.array([20.0, 20.0, 21.0, 20.5]), np.zeros(4))

    assert str(estimator.estimate()) == "not resolved at 95 % after 3 steps"


def test_low_signal_is_not_biased_by_clamping() -> None:
    """|G|² is 0.05 with steps scattered by 0.5: clamping each at zero would read 0.22."""
    noise, signal = draws(20_000, signal=0.05)

    estimate = estimator_after(noise, signal, window=1_000_000).estimate()

    standard_error = 0.5 / math.sqrt(20_000)
    assert abs(estimate.grad_sq_norm - 0.05) < 4 * standard_error
    assert np.maximum(signal, 0).mean() > 0.2


def test_averages_stay_unbiased_when_the_batch_size_changes() -> None:
    rng = np.random.default_rng(3)
    batches = np.repeat([8, 64, 16], 10)
    answers = [
        estimator_after(
            20 + rng.normal(size=30), 1 + 8 / batches * rng.normal(size=30), batches, window=20
        ).estimate()
        for _ in range(400)
    ]

    noise = np.array([answer.noise_trace for answer in answers])
    error = (noise.mean() - 20) / (noise.std() / math.sqrt(400))
    assert abs(error) < 4, f"error in standard errors: {error}"
    assert np.median([answer.value for answer in answers]) == pytest.approx(20, rel=0.05)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """A small run of benchmarks/accuracy/coverage.py, at a quarter of its price."""
    answers = [
        estimator_after(*draws(60, signal=0.5, seed=seed), window=30).estimate()
        for seed in range(500)
    ]

    covered = np.mean([a.low <= 40 <= a.high for a in answers])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 500), covered


def rising(steps: int, parts: int, seed: int = 0, directions: int = 50) -> NoiseScaleEstimator:
    """The noise scale rises from 10 to 100 examples while |G|² falls a hundredfold.

    Every step draws 16 examples' gradients; they are measured in that many equal parts.
    """
    rng = np.random.default_rng(seed)
    progress = np.log(np.arange(1, steps + 1))[:, None, None] / math.log(steps)
    signal, noise_scale = 100.0**-progress, 10 ** (1 + progress)
    gradients = rng.normal(size=(steps, 16, directions))
    gradients *= np.sqrt(signal * noise_scale / directions)
    gradients[:, :, :1] += np.sqrt(signal)
    big = (gradients.mean(axis=1) ** 2).sum(axis=1)
    means = gradients.reshape(steps, parts, 16 // parts, directions).mean(axis=2)
    small = (means**2).sum(axis=2).mean(axis=1)
    estimator = NoiseScaleEstimator()
    for one, all_ in zip(small, big, strict=True):
        moments = gradient_moments(one, all_, small_batch=16 / parts, big_batch=16)
        estimator.update(moments, weight=16)
    return estimator


@pytest.mark.parametrize("steps", [300, 1000])
@pytest.mark.parametrize("parts", [4, 16])
def test_the_interval_holds_the_noise_scale_of_now_after_it_has_risen(
    parts: int, steps: int
) -> None:
    """The average of a run's raw moments reads 20 to 30 here."""
    answers = [rising(steps, parts, seed).estimate() for seed in range(12)]

    assert sum(answer.low <= 100 <= answer.high for answer in answers) >= 10, answers
    assert np.median([answer.value for answer in answers]) == pytest.approx(90, rel=0.25)
    assert all(answer.resolved for answer in answers)


def test_two_ways_of_measuring_one_run_show_nearly_the_same() -> None:
    """By 4 micro-batches and by 16 examples. With too short windows they differ 1.5-fold."""
    ratios = [
        rising(600, 4, seed).estimate().value / rising(600, 16, seed).estimate().value
        for seed in range(12)
    ]

    apart = np.abs(np.log(ratios))
    assert np.median(apart) < math.log(1.1), ratios
    assert apart.max() < math.log(1.35), ratios


def test_auto_does_not_pick_windows_that_are_narrow_by_luck() -> None:
    """At B_simple/B = 70; choosing by the interval itself reads 0.62 to 0.77 of the truth."""
    answers = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        noise = 70 * (1 + 0.01 * rng.normal(size=300))
        signal = 1 + 1.5 * rng.normal(size=300)
        answers.append(estimator_after(noise, signal).estimate())

    covered = np.mean([a.low <= 70 <= a.high for a in answers])
    assert covered > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 100), covered
    assert np.median([a.value for a in answers]) == pytest.approx(70, rel=0.06)


def test_moments_are_those_of_the_steps_that_the_noise_scale_is_of() -> None:
    """In their own unit: |G|² falls from 1,000 to 1, and the last steps have about 1.3."""
    signal = np.geomspace(1000, 1, 1000)
    estimate = estimator_after(20 * signal, signal, np.full(1000, 16.0)).estimate()

    assert estimate.noise_trace / estimate.grad_sq_norm == pytest.approx(estimate.value)
    assert estimate.steps == pytest.approx(8)
    assert estimate.grad_sq_norm == pytest.approx(signal[-8:].mean(), rel=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e101, -1e200])
def test_moments_that_are_not_finite_or_whose_squares_might_not_be_are_left_out(bad: float) -> None:
    estimator = estimator_after(*draws(20))
    before = estimator.state_dict()

    taken = [
        estimator.update(GradientMoments(bad, 1.0)),
        estimator.update(GradientMoments(1.0, bad)),
    ]

    assert taken == [False, False]
    assert estimator.state_dict() == before


def test_a_run_that_diverges_is_estimated_up_to_the_end_of_floats() -> None:
    """|G|² grows tenfold a step, to infinity and beyond."""
    estimator, recent, increments = NoiseScaleEstimator(), RecentSteps(), Increments()
    for step, (noise, signal) in enumerate(zip(*draws(400), strict=True)):
        level = 10.0 ** min(step - 50, 308)
        moments = GradientMoments(float(signal) * level, float(noise) * level)
        if estimator.update(moments, 32.0):
            recent.add(moments, 32.0)
            increments.add(moments, 32.0)
        for estimate in (estimator.estimate(), recent.estimate()):
            str(estimate)
            assert estimate.low <= estimate.high  # neither is NaN

    assert estimator.estimate().grad_sq_norm < LARGEST_MOMENT
    assert all(math.isfinite(value) for value in increments.take().values())


def test_a_damaged_state_changes_nothing() -> None:
    saved = estimator_after(*draws(20)).state_dict()
    saved["recent"]["steps"].append([0.0, 0.0, 0.0])
    estimator = estimator_after(*draws(30))
    before = estimator.state_dict()

    with pytest.raises(ValueError, match="inhomogeneous shape"):
        estimator.load_state_dict(saved)

    assert estimator.state_dict() == before


def test_resuming_continues_every_number_exactly() -> None:
    noise, signal = draws(300)
    whole = estimator_after(noise, signal)
    first = estimator_after(noise[:140], signal[:140])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)

    second = NoiseScaleEstimator()
    second.load_state_dict(torch.load(file, weights_only=True))
    for s, q in zip(noise[140:], signal[140:], strict=True):
        second.update(GradientMoments(q, s))

    assert second.estimate() == whole.estimate()
    assert second.state_dict() == whole.state_dict()


def test_estimates_are_the_same_to_the_last_bit_on_every_kind_of_cpu() -> None:
    """Or ranks on unlike machines would neither log nor want the same."""
    program = """if True:
        import random
        from noisescale import GradientMoments, NoiseScaleEstimator
        from noisescale.estimation.recent import RecentSteps

        random.seed(0)
        estimator, recent = NoiseScaleEstimator(), RecentSteps()
        for step in range(200):
            moments = GradientMoments(random.gauss(1, 1), random.gauss(20, 5))
            weight = random.randrange(8, 64)
            estimator.update(moments, weight)
            recent.add(moments, weight)
            print(repr(estimator.estimate()), repr(recent.estimate()))
        print(estimator.state_dict())
    """

    (printed,) = printed_on_each_kind(program)

    assert printed.count("NoiseScale(") == 400


def test_a_state_of_another_window_is_refused() -> None:
    message = (
        "`window` must be the one that the state was saved with, got 50; the saved averages are"
        " over 20 steps. Restore the earlier `window`, or start new averages."
    )
    state = NoiseScaleEstimator(window=20).state_dict()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NoiseScaleEstimator(window=50).load_state_dict(state)


def test_a_state_in_another_unit_is_refused() -> None:
    state = NoiseScaleEstimator(unit="examples").state_dict()
    message = (
        "`unit` must be the one that the state was saved with, got 'tokens'; the saved averages are"
        " in examples. Restore the earlier `unit`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        NoiseScaleEstimator(unit="tokens").load_state_dict(state)


def test_what_is_known_grows_with_the_steps() -> None:
    estimator = NoiseScaleEstimator(window=100)
    nothing = estimator.estimate()
    estimator.update(GradientMoments(1.0, 20.0))
    one = estimator.estimate()
    estimator.update(GradientMoments(1.1, 21.0))
    two = estimator.estimate()
    estimator.update(GradientMoments(1.0, 22.0))
    three = estimator.estimate()

    for unknown, steps in ((nothing, 0), (one, 0), (two, 1)):  # the first only sets the level
        assert (unknown.steps, unknown.low, unknown.high) == (steps, 0, math.inf)
        assert math.isnan(unknown.value)
    assert three.resolved


@pytest.mark.parametrize(
    ("scale", "text", "short"),
    [
        (
            NoiseScale(19.13, 15.2, 24.81, 1, 19, 200),
            "19.1 examples (95 % 15.2 to 24.8, 200 steps)",
            "19.1",
        ),
        (
            NoiseScale(19130, 15200, 24810, 1, 19, 1, 0.9, "tokens"),
            "19,130 tokens (90 % 15,200 to 24,810, 1 step)",
            "19,130",
        ),
        (
            NoiseScale(math.nan, 310.2, math.inf, -1, 9, 50),
            "above 310 examples (not resolved at 95 % after 50 steps)",
            ">310",
        ),
        (
            NoiseScale(math.nan, 0.0, math.inf, -1, 9, 50),
            "not resolved at 95 % after 50 steps",
            "?",
        ),
        (NoiseScale(math.nan, 0.0, math.inf, math.nan, math.nan, 0), "not measured yet", "?"),
    ],
)
def test_text_says_what_is_known_and_no_more(scale: NoiseScale, text: str, short: str) -> None:
    assert str(scale) == text
    assert scale.short() == short


def test_efficiency_is_one_half_at_the_noise_scale() -> None:
    scale = NoiseScale(20, 15, 25, 1, 20, 100)

    assert scale.efficiency(20) == 0.5
    assert scale.efficiency(0) == 1


@pytest.mark.parametrize("window", [1, 0, -5, 2.5, True, None, "car"])
def test_an_impossible_window_is_refused(window: object) -> None:
    message = (
        f'`window` must be "auto" or at least 2 steps, got {window!r}.'
        ' With "auto" the estimator chooses the window from the noise.'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NoiseScaleEstimator(window=window)


@pytest.mark.parametrize("confidence", [0, 1, 95, -0.1, math.nan, None])
def test_an_impossible_confidence_is_refused(confidence: float) -> None:
    message = f"`confidence` must lie between 0 and 1, got {confidence!r}. Pass 0.95 for 95 %."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        NoiseScaleEstimator(confidence=confidence)


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="`weight` must be positive and finite"):
        NoiseScaleEstimator().update(GradientMoments(1, 1), weight)


def test_a_unit_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`unit` must be a word, got 5"):
        NoiseScaleEstimator(unit=5)


@pytest.mark.parametrize("make", [lambda: NoiseScaleEstimator(window=50), RecentSteps])
@pytest.mark.parametrize("noise", [-0.3, -5.0, 0.0])
def test_a_negative_noise_reads_as_no_noise_within_the_interval(make: Any, noise: float) -> None:
    """Averages of tr(Σ) are signed; B_simple and its interval end at 0."""
    generator = np.random.default_rng(0)
    estimator = make()
    add = getattr(estimator, "update", None) or estimator.add
    for scatter in generator.normal(0, 1, 60):
        add(GradientMoments(grad_sq_norm=2.0 + 0.1 * scatter, noise_trace=noise + scatter), 32.0)

    estimate = estimator.estimate()

    assert estimate.resolved
    assert estimate.low <= estimate.value <= estimate.high
    assert 0 <= estimate.efficiency(32) <= 1
    if noise < 0:
        assert estimate.noise_trace < 0
        assert estimate.value == 0


def test_the_efficiency_of_no_noise_at_an_empty_batch_is_not_known() -> None:
    assert math.isnan(NoiseScale(0.0, 0.0, 1.0, 1.0, -0.1, 10).efficiency(0))
