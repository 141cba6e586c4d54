# SPDX-License-Identifier: Apache-2.0
import math
import re

import numpy as np
import pytest
from scipy.stats import t as students_t

from noisescale import History, Tradeoff
from noisescale.band import Band
from noisescale.prediction.run_law import RunLaw
from noisescale.prediction.stretches import Stretches, noise_scale_at


def columns(step: list[float], **others: list[float]) -> dict[str, np.ndarray]:
    rows = {"step": step, **others}
    rows.setdefault("examples", [32 * s for s in step])
    rows.setdefault("low", [0.8 * b for b in rows["noise_scale"]])
    rows.setdefault("high", [1.3 * b for b in rows["noise_scale"]])
    return {name: np.array(values, dtype=float) for name, values in rows.items()}


def test_steps_and_batch_sizes_are_those_between_rows() -> None:
    run = Stretches.of(columns([10, 30, 60], examples=[320, 960, 3840], noise_scale=[5, 6, 7]))

    assert run.steps.tolist() == [10, 20, 30]
    assert run.batch_size.tolist() == [32, 32, 96]


def measured(
    rng: np.random.Generator, noise_scale: np.ndarray, batch_size: float = 64, every: int = 10
) -> dict[str, np.ndarray]:
    """Rows of a run whose steps have these noise scales; |G|² falls as they rise, tr(Σ) is 1.

    A step's own |G|² and tr(Σ) scatter as those of a gradient of independent parameters.
    """
    steps = np.arange(1.0, len(noise_scale) + 1)
    q, s = 1 / noise_scale, np.ones_like(noise_scale)
    q_own = q + rng.normal(0, np.sqrt(2 * q / batch_size / 20 + (1 / batch_size) ** 2 / 100))
    s_own = s + rng.normal(0, 0.1, len(steps))
    rows = np.append(np.arange(every - 1, len(steps), every), len(steps) - 1)
    rows = np.unique(rows)
    sums = {"sum_weight": batch_size * steps, "sum_grad_sq_norm": batch_size * np.cumsum(q_own),
            "sum_noise_trace": batch_size * np.cumsum(s_own)}  # fmt: skip
    unknown = np.full_like(steps, math.nan)
    columns = {"step": steps, "examples": batch_size * steps, **sums, "noise_scale": unknown,
               "low": unknown, "high": unknown, "batch_size": unknown + batch_size}  # fmt: skip
    return {name: values[rows] for name, values in columns.items()}


def test_the_noise_scale_of_each_time_is_found_where_windows_lag() -> None:
    """It rises from 20 to 2,000 in 1,000 steps, while |G|² falls a hundredfold."""
    truth = 20 * 100 ** (np.arange(1000) / 1000)

    run = Stretches.of(measured(np.random.default_rng(0), truth))

    local = truth.reshape(100, 10).mean(axis=1)
    assert np.abs(np.log(run.noise_scale / local)).mean() < 0.25
    assert len(set(run.block.tolist())) == 12  # as many as leave eight rows to each
    mean_of_all = 1000 / (1 / truth).sum()
    assert np.abs(np.log(mean_of_all / local)).mean() > 1


def test_a_run_is_cut_into_as_few_blocks_as_its_noise_demands() -> None:
    """At 60 batches a twelfth of 1,000 steps does not resolve it; more of them do."""
    rng = np.random.default_rng(0)
    clear, noisy = (
        Stretches.of(measured(rng, np.full(1000, b))).block.max() + 1 for b in (64.0, 10_000.0)
    )

    assert clear == 12
    assert noisy < 6


def test_three_quarters_of_the_blocks_are_resolved() -> None:
    """Wherever there are several: else they would be fewer."""
    numbers = set()
    for seed, noise_scale in enumerate(np.geomspace(200, 10_000, 40)):
        run = Stretches.of(measured(np.random.default_rng(seed), np.full(1000, noise_scale)))
        number = run.block.max() + 1
        starts = np.unique(run.block, return_index=True)[1]
        assert number == 1 or run.resolved[starts].mean() >= 0.75
        numbers.add(int(number))

    assert len(numbers) > 4


def test_the_bounds_of_a_run_cover_its_critical_batch_size() -> None:
    """Of runs with a rising noise scale; each block's interval would be far wider."""
    truth = np.linspace(50, 400, 600)
    expected = Tradeoff.from_run(truth, np.full(600, 64), np.ones(600)).critical_batch_size
    one = Band(1.0, 1.0, 1.0)
    covered, widths = [], []

    for seed in range(200):
        run = Stretches.of(measured(np.random.default_rng(seed), truth, every=5))
        critical = RunLaw.of(run, one).critical_batch_size
        covered.append(critical.low <= expected <= critical.high)
        widths.append((critical.high - critical.low) / expected)

    assert 0.9 <= np.mean(covered) <= 1, np.mean(covered)
    blocks = (run.high - run.low) / run.noise_scale
    assert np.median(widths) < 0.5 * np.median(blocks)


def test_the_interval_of_a_block_is_fiellers_of_its_weighted_rows() -> None:
    """Both ends r of nine unequal rows solve (S - r·Q)² = t²·var(S - r·Q), row by row."""
    rng = np.random.default_rng(0)
    weight = np.array([1.0, 2, 2, 4, 1, 3, 2, 2, 1])
    q, s = rng.normal(1, 0.3, 9), rng.normal(50, 6, 9) + 10 * rng.normal(0, 1, 9)
    s += 20 * (q - 1)  # they err together
    sums = {"sum_weight": weight, "sum_noise_trace": weight * s, "sum_grad_sq_norm": weight * q}
    rows = columns(np.arange(1.0, 10).tolist(), noise_scale=[math.nan] * 9)
    history = History.from_columns(
        rows | {name: np.cumsum(x) for name, x in sums.items()}, confidence=0.9
    )

    run = Stretches.of(history)

    share = weight / weight.sum()
    mean_s, mean_q = (share * s).sum(), (share * q).sum()
    freedom = (share**2).sum() ** 2 / (share**4).sum() - 1
    assert set(run.block.tolist()) == {0}
    assert run.noise_scale == pytest.approx(mean_s / mean_q)
    for end in (run.low[0], run.high[0]):
        residuals = share * ((s - mean_s) - end * (q - mean_q))
        variance = (residuals**2).sum() / (1 - (share**2).sum())
        t = (mean_s - end * mean_q) / math.sqrt(variance)
        assert abs(t) == pytest.approx(students_t.ppf(0.95, freedom))


def test_the_wholes_sums_count_whatever_rows_are_dropped() -> None:
    """TensorBoard keeps some rows at random, long histories every second one."""
    history = measured(np.random.default_rng(0), np.linspace(50, 400, 2000), every=5)
    every_third = {name: values[2::3] for name, values in history.items()}

    whole, thinned = (
        RunLaw.of(Stretches.of(rows), Band(1.0, 1.0, 1.0)).critical_batch_size.value
        for rows in (history, every_third)
    )

    assert thinned == pytest.approx(whole, rel=0.05)


def test_runs_of_few_rows_keep_the_estimates_that_were_logged() -> None:
    history = measured(np.random.default_rng(0), np.full(70, 64.0))
    history |= {"noise_scale": np.full(7, 60.0), "low": np.full(7, 50.0), "high": np.full(7, 80.0)}

    run = Stretches.of(history)

    assert run.noise_scale.tolist() == [60] * 7
    assert set(run.block.tolist()) == {0}


@pytest.mark.parametrize(
    "sums",
    [
        {"sum_grad_sq_norm": np.cumsum([1.0, -1, 1, -1, 1, -1, 1, -1, 1, -1])},
        {"sum_weight": np.array([1.0, 2, 3, 4, 5, 1, 2, 3, 4, 5])},
        {"sum_noise_trace": np.full(10, math.nan)},
        {f"sum_{name}": np.zeros(10) for name in ("weight", "noise_trace", "grad_sq_norm")},
    ],
    ids=["nothing resolved", "a sum that falls", "no sums", "nothing measured"],
)
def test_where_sums_tell_nothing_the_estimates_that_were_logged_are_kept(
    sums: dict[str, np.ndarray],
) -> None:
    row = np.arange(1.0, 11)
    logged = columns(row.tolist(), noise_scale=(50 + row).tolist())
    whole = {"sum_weight": row, "sum_noise_trace": 60 * row, "sum_grad_sq_norm": row}

    run = Stretches.of({**logged, **whole, **sums})

    assert run.noise_scale.tolist() == (50 + row).tolist()
    assert set(run.block.tolist()) == {0}


def test_the_noise_scale_at_a_step_is_that_of_the_row_it_belongs_to() -> None:
    history = columns([10, 20, 30], noise_scale=[5, 6, 7])

    found = [noise_scale_at(history, step) for step in (0, 10, 11, 20, 30)]

    assert [band.value for band in found] == [5, 5, 6, 6, 7]
    assert (found[2].low, found[2].high) == pytest.approx((0.8 * 6, 1.3 * 6))
    with pytest.raises(
        ValueError, match=r"^`step` must be one of the run's, got 31\. It has 30\.$"
    ):
        noise_scale_at(history, 31)


def test_what_is_not_resolved_takes_the_next_value_and_keeps_its_own_bounds() -> None:
    run = Stretches.of(
        columns(
            [10, 20, 30, 40, 50, 60],
            noise_scale=[math.nan, 12, math.nan, 13, math.nan, math.nan],
            low=[9, 10, 11, 10, 11, 14],
            high=[math.inf, 20, math.inf, 20, math.inf, math.inf],
        )
    )

    # The last one is known to be above 14.
    assert run.noise_scale.tolist() == [12, 12, 13, 13, 13, 14]
    assert run.low.tolist() == [9, 10, 11, 10, 11, 14]
    assert run.high.tolist() == [math.inf, 20, math.inf, 20, math.inf, math.inf]
    assert run.resolved.tolist() == [0, 1, 0, 1, 0, 0]


def test_a_run_without_any_resolved_row_has_bounds_alone() -> None:
    run = Stretches.of(
        columns([10, 20], noise_scale=[math.nan] * 2, low=[math.nan, 7], high=[math.nan, math.inf])
    )

    assert np.isnan(run.noise_scale).all()
    assert run.low.tolist() == [0, 7]
    assert run.high.tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            [],
            "`history` must have rows of rising `step`, got 0 rows. Measure a run with"
            " NoiseScaleMonitor first.",
        ),
        (
            [10, 20, 20],
            "`history` must have rows of rising `step`, got 3 rows with 20 out of order. Measure a"
            " run with NoiseScaleMonitor first.",
        ),
    ],
)
def test_a_history_that_is_no_run_is_refused(step: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Stretches.of(columns(step, noise_scale=[5.0] * len(step)))
