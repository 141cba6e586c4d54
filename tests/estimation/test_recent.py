# SPDX-License-Identifier: Apache-2.0
"""The noise scale of the last steps: as averages written out, with its coverage."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from noisescale import GradientMoments
from noisescale.estimation.ratio_interval import fieller_interval
from noisescale.estimation.recent import RecentSteps


def draws(signal: np.ndarray, batch: float, seed: int = 0) -> list[GradientMoments]:
    """Moments of steps with a noise scale of 40 and gradients in 200 independent directions."""
    rng, noise = np.random.default_rng(seed), 40 * signal
    of_signal = signal + noise / batch * rng.normal(size=len(signal)) * 0.1
    of_noise = noise * (1 + rng.normal(size=len(signal)) * math.sqrt(0.01 / 8))
    return [GradientMoments(q, s) for q, s in zip(of_signal, of_noise, strict=True)]


def recent_after(steps: list[GradientMoments], batch: float, **options: float) -> RecentSteps:
    recent = RecentSteps(**options)  # type: ignore[arg-type]
    for moments in steps:
        recent.add(moments, batch)
    return recent


def age(now: int, step: int) -> float:
    """Log time since a step, from the 8th step on."""
    return math.log((now + 8) / (step + 8))


@pytest.mark.parametrize(("window", "measured"), [("auto", 12), ("auto", 30), (6, 12)])
def test_estimate_agrees_with_sums_written_out(window: int, measured: int) -> None:
    """Of steps 1, 4, 7, ...; now is two steps after the last."""
    rng = np.random.default_rng(1)
    moments = [GradientMoments(1 + 0.4 * rng.normal(), 20 + rng.normal()) for _ in range(measured)]
    moments[-10] = GradientMoments(12.0, 300.0)  # a step far above the level is cut
    weights = rng.integers(8, 64, measured).astype(float)
    at = [1 + 3 * i for i in range(measured)]
    now = at[-1] + 2
    recent = RecentSteps(window, confidence=0.9)
    for one, weight, step in zip(moments, weights, at, strict=True):
        recent.add(one, weight, step)

    level, rows, cut = 0.0, [], 0
    for (q, s), weight, step in zip(moments, weights, at, strict=True):
        if level:
            over = max(level, (q + s / weight) / 8)
            cut += over > level
            rows.append((step, weight, over, s / over, q / over))
        sq_norm = min(q + s / weight, 8 * level or math.inf)
        level = (7 * level + 2 * sq_norm) / 9 if level else sq_norm
    assert cut == 1

    def drift(rows: list[tuple[float, ...]]) -> float:
        total = sum(row[1] for row in rows)
        pairs = (
            one[1] * other[1] * min(age(now, one[0]), age(now, other[0]))
            for one in rows
            for other in rows
        )
        return 0.36 * sum(pairs) / total**2 if window == "auto" else 0.0

    if window == "auto":
        rows = rows[-max(8, sum(row[0] > 0.3 * now for row in rows)) :]
        _, w, _, s, q = np.array(rows).T
        ratio = (w @ s) / (w @ q)
        differences = np.diff(s - ratio * q) ** 2 / (1 / w[1:] + 1 / w[:-1])
        of_one = differences.mean() / ((w @ s) / w.sum()) ** 2
        variances = {n: of_one / w[-n:].sum() + drift(rows[-n:]) for n in range(8, len(rows) + 1)}
        rows = rows[-min(variances, key=variances.__getitem__) :]
        assert 8 <= len(rows) < measured - 1
    else:
        rows = rows[-window:]
    _, w, levels, s, q = np.array(rows).T
    w = w / w.sum()
    raw = w @ (levels * s)
    means = w @ s, w @ q
    residuals = np.stack([s - means[0], q - means[1]])
    covariance = (w**2 * residuals) @ residuals.T / (1 - w @ w)
    quantile = stats.t.ppf(0.95, (w @ w) ** 2 / (w**4).sum() - 1)
    low, high = fieller_interval(*means, covariance[[0, 0, 1], [0, 1, 1]], quantile)
    value = means[0] / means[1]
    drifted = stats.norm.ppf(0.95) * math.sqrt(drift(rows))
    high = value * math.exp(math.hypot(math.log(high / value), drifted))
    if low > 0:
        low = value / math.exp(math.hypot(math.log(value / low), drifted))

    estimate = recent.estimate(now)
    assert estimate.resolved
    assert estimate.value == pytest.approx(value, rel=1e-12)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=1e-4)
    assert estimate.steps == pytest.approx(1 / (w @ w), rel=1e-12)
    assert estimate.first_step == rows[0][0]
    assert estimate.noise_trace == pytest.approx(raw, rel=1e-12)
    assert estimate.grad_sq_norm == pytest.approx(raw / value, rel=1e-12)


def test_old_steps_say_less_about_now() -> None:
    """No step was measured after the 100th: the interval widens while the run goes on."""
    recent = recent_after(draws(np.ones(100), 16), 16)
    now, later, much_later = (recent.estimate(step) for step in (100, 200, 10_000))

    assert now.value == pytest.approx(later.value, rel=0.2) == much_later.value
    assert now.low > later.low > much_later.low > 0
    assert now.high < later.high < much_later.high < math.inf
    assert much_later.high / much_later.low > 20


def test_a_bound_that_is_not_resolved_holds_later_too() -> None:
    rng = np.random.default_rng(0)
    steps = [GradientMoments(0.1 * rng.normal(), 20 + rng.normal()) for _ in range(100)]
    recent = recent_after(steps, 8)
    now, later = recent.estimate(100), recent.estimate(1_000)

    assert not now.resolved
    assert not later.resolved
    assert now.low > 200  # noise alone
    assert 0 < later.low < now.low / 2


def test_the_longest_window_has_the_last_steps_of_the_run() -> None:
    """Pure noise asks for all steps: 70 of 100 measured ones, and 8 where they are far apart."""
    rng = np.random.default_rng(0)
    moments = [GradientMoments(-0.1 + 0.01 * rng.normal(), 20.0) for _ in range(101)]

    assert recent_after(moments, 8).estimate().steps == pytest.approx(70, abs=1)
    sparse = RecentSteps()
    for k, one in enumerate(moments[:20]):
        sparse.add(one, 8, 2**k)
    assert sparse.estimate().steps == pytest.approx(8)


@pytest.mark.parametrize("drift", [0.0, -0.05])
def test_the_interval_covers_a_constant_noise_scale(drift: float) -> None:
    signal, covered = np.exp(drift * np.arange(60)), 0
    for seed in range(200):
        steps = draws(signal, 16, seed)
        estimate = recent_after(steps, 16).estimate()
        covered += estimate.low <= 40 <= estimate.high

    assert covered / 200 > 0.95 - 4 * math.sqrt(0.95 * 0.05 / 200)


@pytest.mark.parametrize(("batch", "window"), [(400.0, 8), (3.3, 85)])
def test_the_window_is_as_long_as_the_noise_asks_for(batch: float, window: int) -> None:
    """cv²/n + DRIFT²·n/(3·1000) is least at n = cv·√3000/DRIFT; cv is (b/B)·√(2/200) here."""
    found = recent_after(draws(np.ones(1000), batch), batch).estimate()
    assert found.steps == pytest.approx(window, rel=0.35)


@pytest.mark.parametrize("count", [10, 41, 42, 100])
def test_only_the_last_steps_are_kept(count: int) -> None:
    steps = draws(np.ones(count), 8.0)
    recent = recent_after(steps, 8.0, window=20)

    assert len(recent) == min(count - 1, 20)
    assert recent.state_dict()["steps"] == recent_after(steps, 8.0).state_dict()["steps"][-20:]


def after_rates(rates: list[float], *, now: float = math.nan, window: int | str = "auto") -> Any:
    """The noise scale after steps with these learning rates, as seen at the rate of now."""
    recent = RecentSteps(window)  # type: ignore[arg-type]
    for moments, rate in zip(draws(np.ones(len(rates)), 64.0), rates, strict=True):
        recent.add(moments, 64.0, learning_rate=rate)
    return recent.estimate(learning_rate=now)


def test_where_the_rate_has_fallen_the_interval_is_wider_by_its_logarithm() -> None:
    constant, fallen = after_rates([0.1] * 300, now=0.1), after_rates([0.1] * 300, now=0.02)

    assert fallen.value == constant.value
    quantile = stats.norm.ppf(0.975) * 0.5 * math.log(5)
    for end in ("low", "high"):
        ends = [abs(math.log(getattr(one, end) / one.value)) for one in (constant, fallen)]
        assert ends[1] == pytest.approx(math.hypot(ends[0], quantile), rel=1e-6)


def test_at_a_rate_of_almost_zero_the_interval_is_wide_and_has_ends() -> None:
    at_end, earlier = after_rates([0.1] * 300, now=1e-9), after_rates([0.1] * 300, now=1e-8)

    assert (at_end.low, at_end.high) == (earlier.low, earlier.high)
    assert at_end.high > 50 * at_end.value


@pytest.mark.parametrize(
    ("rates", "now", "window"),
    [
        ([0.1] * 300, 0.1, "auto"),
        ([0.1] * 300, 0.5, "auto"),
        ([math.nan] * 300, 0.1, "auto"),
        ([0.1] * 299 + [math.nan], 0.01, "auto"),
        ([0.1] * 300, 0.0, "auto"),
        ([0.1] * 300, 0.01, 200),
    ],
)
def test_rates_that_stay_rise_or_are_not_known_change_nothing(
    rates: list[float], now: float, window: int | str
) -> None:
    """Nor does a rate change the interval of a number of steps, which is of their mean."""
    assert after_rates(rates, now=now, window=window) == after_rates(rates, window=window)
