# SPDX-License-Identifier: Apache-2.0
import io
import math
from html import escape
from typing import Any

import numpy as np
import pytest
import torch
from cpus import printed_on_each_kind
from refused import refused
from tiers import slow_after

from noisescale import GradientMoments, NoiseScale, NoiseScaleEstimator, gradient_moments
from noisescale.estimation.estimator import LARGEST_MOMENT
from noisescale.history.increments import LOSS, Increments


def estimator_after(noise: Any, signal: Any, **options: object) -> NoiseScaleEstimator:
    estimator = NoiseScaleEstimator(**options)
    for s, q in zip(noise, signal, strict=True):
        assert estimator.update(GradientMoments(q, s))
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

    assert str(estimator.estimate()) == "not known at 95 % after 3 steps"


def test_low_signal_is_not_biased_by_clamping() -> None:
    """|G|² is 0.05 with steps scattered by 0.5: clamping each at zero would read 0.22."""
    noise, signal = draws(20_000, signal=0.05)

    estimate = estimator_after(noise, signal, window=1_000_000).estimate()

    standard_error = 0.5 / math.sqrt(20_000)
    assert abs(estimate.grad_sq_norm - 0.05) < 4 * standard_error
    assert np.maximum(signal, 0).mean() > 0.2


def rising(steps: int, parts: int, seed: int = 0, directions: int = 50) -> NoiseScaleEstimator:
    """The noise scale of 16 examples a step rises from 10 to 100 while |G|² falls a hundredfold."""
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


CASES = slow_after(2, [(4, 1000), (16, 300), (4, 300), (16, 1000)])


@pytest.mark.parametrize(("parts", "steps"), CASES)
def test_the_interval_holds_the_noise_scale_after_it_has_risen(parts: int, steps: int) -> None:
    """The average of a run's raw moments reads 20 to 30 here."""
    answers = [rising(steps, parts, seed).estimate() for seed in range(12)]

    assert sum(answer.low <= 100 <= answer.high for answer in answers) >= 10, answers
    assert np.median([answer.value for answer in answers]) == pytest.approx(90, rel=0.25)
    assert all(answer.resolved for answer in answers)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e101, -1e200])
def test_moments_that_are_not_finite_or_whose_squares_might_not_be_are_left_out(bad: float) -> None:
    estimator = estimator_after(*draws(20))
    before = estimator.state_dict()

    assert not estimator.update(GradientMoments(bad, 1.0))
    assert not estimator.update(GradientMoments(1.0, bad))
    assert estimator.state_dict() == before


def test_a_run_that_diverges_is_estimated_up_to_the_end_of_floats() -> None:
    """|G|² grows tenfold a step, to infinity and beyond."""
    estimator, increments = NoiseScaleEstimator(), Increments()
    for step, (noise, signal) in enumerate(zip(*draws(400), strict=True)):
        level = 10.0 ** min(step - 50, 308)
        moments = GradientMoments(float(signal) * level, float(noise) * level)
        if estimator.update(moments, 32.0):
            increments.add(moments, 32.0)
        estimate = estimator.estimate()
        str(estimate)
        assert estimate.low <= estimate.high  # neither is NaN

    assert estimator.estimate().grad_sq_norm < LARGEST_MOMENT
    taken = increments.take()
    assert math.isnan(taken.pop(LOSS))  # none was given
    assert all(map(math.isfinite, taken.values()))


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

        random.seed(0)
        estimator = NoiseScaleEstimator()
        for step in range(200):
            moments = GradientMoments(random.gauss(1, 1), random.gauss(20, 5))
            weight = random.randrange(8, 64)
            estimator.update(moments, weight)
            print(repr(estimator.estimate()))
        print(estimator.state_dict())
    """

    (printed,) = printed_on_each_kind(program)

    assert printed.count("NoiseScale(") == 200


@pytest.mark.parametrize(
    ("name", "saved", "own"), [("window", 20, 50), ("unit", "examples", "tokens")]
)
def test_a_state_of_other_averages_is_refused(name: str, saved: Any, own: Any) -> None:
    state = NoiseScaleEstimator(**{name: saved}).state_dict()

    with refused(name, requirement="saved", remedy="Restore") as raised:
        NoiseScaleEstimator(**{name: own}).load_state_dict(state)
    assert raised.value.got.startswith(repr(own))
    assert f"{saved}" in raised.value.got


def test_what_is_known_grows_with_the_steps() -> None:
    estimator = NoiseScaleEstimator(window=100)
    for counted in (0, 0, 1):  # the first step only sets the level
        unknown = estimator.estimate()
        assert (unknown.steps, unknown.low, unknown.high) == (counted, 0, math.inf)
        assert math.isnan(unknown.value)
        estimator.update(GradientMoments(1.0 + counted / 10, 20.0 + counted))

    assert estimator.estimate().resolved


UNRESOLVED = (math.inf, -1, 9, 50)


@pytest.mark.parametrize(
    ("scale", "text", "short"),
    [
        ((19.13, 15.2, 24.81, 1, 19, 200), "19.1 examples (95 % 15.2 to 24.8, 200 steps)", "19.1"),
        (
            (19130, 15200, 24810, 1, 19, 1, 0.9, "<b>tokens"),
            *("19,130 <b>tokens (90 % 15,200 to 24,810, 1 step)", "19,130"),
        ),
        (
            (math.nan, 310.2, *UNRESOLVED),
            *("above 310 examples (only a lower bound yet, 95 %, 50 steps)", ">310"),
        ),
        ((math.nan, 0.0, *UNRESOLVED), "not known at 95 % after 50 steps", "?"),
        ((math.nan, 0.0, math.inf, math.nan, math.nan, 0), "not measured yet", "?"),
    ],
)
def test_text_says_what_is_known_and_no_more(scale: Any, text: str, short: str) -> None:
    scale, (value, space, rest) = NoiseScale(*scale), text.partition(" (")

    assert (str(scale), scale.short()) == (text, short)
    in_a_notebook = f"<b>{escape(value)}</b>" + (f" <small>({rest}</small>" if space else "")
    assert scale._repr_html_() == in_a_notebook


def test_efficiency_is_one_half_at_the_noise_scale() -> None:
    scale = NoiseScale(20, 15, 25, 1, 20, 100)

    assert scale.efficiency(20) == 0.5
    assert scale.efficiency(0) == 1
    assert math.isnan(NoiseScale(0.0, 0.0, 1.0, 1.0, -0.1, 10).efficiency(0))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("window", value) for value in (1, -5, 2.5, True, None, "car")),
        *(("confidence", value) for value in (0, 1, 95, math.nan, None)),
        ("unit", 5),
    ],
)
def test_an_impossible_option_is_refused(name: str, wrong: Any) -> None:
    with refused(name, got=repr(wrong)):
        NoiseScaleEstimator(**{name: wrong})


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with refused("weight", got=repr(weight)):
        NoiseScaleEstimator().update(GradientMoments(1, 1), weight)


@pytest.mark.parametrize("window", [50, "auto"])
@pytest.mark.parametrize("noise", [-0.3, -5.0, 0.0])
def test_a_negative_noise_reads_as_no_noise_within_the_interval(window: Any, noise: float) -> None:
    """Averages of tr(Σ) are signed; B_simple and its interval end at 0."""
    generator = np.random.default_rng(0)
    estimator = NoiseScaleEstimator(window)
    for scatter in generator.normal(0, 1, 60):
        estimator.update(GradientMoments(2.0 + 0.1 * scatter, noise + scatter), 32.0)

    estimate = estimator.estimate()

    assert estimate.resolved
    assert estimate.low <= estimate.value <= estimate.high
    assert 0 <= estimate.efficiency(32) <= 1
    if noise < 0:
        assert estimate.noise_trace < 0
        assert estimate.value == 0
