# SPDX-License-Identifier: Apache-2.0
import csv
import math
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit
from scipy.stats import f as f_distribution

from noisescale import fit_tradeoff
from noisescale.tradeoff.fit import TradeoffFit
from noisescale.tradeoff.profile import STEPS_SCATTER, profiled_critical_batch_size

DATA = Path(os.environ.get("NOISESCALE_DATA", Path(__file__).parents[2] / "data"))

# Zhang et al. 2024, arXiv:2410.21676, figures' data (MIT): steps of the 85M model to loss 3.42.
SIZES_85M = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
STEPS_85M = [46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600]


def assert_published(fit: TradeoffFit, min_steps: float, min_examples: float, at_20: float) -> None:
    assert fit.min_steps == pytest.approx(min_steps, rel=1e-5)
    assert fit.min_examples == pytest.approx(min_examples, rel=1e-5)
    assert fit.overhead_batch_size(0.2, 256) == pytest.approx(at_20, rel=1e-5)


def test_a_published_fit_is_reproduced() -> None:
    fit = fit_tradeoff(SIZES_85M, STEPS_85M)

    assert_published(fit, 1293.8268694659337, 2834258.0888740215, 745.3201466381583)
    assert fit.rms_log_residual == pytest.approx(0.04946707984012436, rel=1e-6)


def test_all_published_fits_are_reproduced() -> None:
    folder = DATA / "critical_batch_size"
    if not folder.exists():
        pytest.skip(f"There is no {folder}: set NOISESCALE_DATA to where the published sweeps are.")
    runs = list(csv.DictReader((folder / "steps_to_target.csv").read_text().splitlines()))
    published = list(csv.DictReader((folder / "reference_fits.csv").read_text().splitlines()))

    for row in published:
        of_it = [run for run in runs if run["model"] == row["model"]]
        fit = fit_tradeoff(
            [float(run["batch_size_sequences"]) for run in of_it],
            [float(run["steps_in_fit"]) for run in of_it],
        )
        assert_published(
            fit,
            float(row["published_S_min"]),
            float(row["published_E_min"]),
            float(row["published_cbs_20pct_overhead"]),
        )
    assert len(published) == 3


def simulated(
    rng: np.random.Generator, *, scatter: float, alpha: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Steps of S_min 200 and B_crit 100 with a bend of sharpness alpha."""
    sizes = np.array([8.0, 16, 32, 64, 128, 256, 512, 1024])
    steps = 200 * (1 + (100 / sizes) ** alpha) ** (1 / alpha)
    return sizes, steps * np.exp(rng.normal(0, scatter, len(sizes)))


def test_the_interval_of_the_critical_batch_size_covers_it() -> None:
    rng = np.random.default_rng(0)
    covered = 0

    for _ in range(400):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one fit in twenty warns, as it should
            band = fit_tradeoff(*simulated(rng, scatter=0.05)).critical_batch_size_band(0.95)
        covered += band.low <= 100 <= band.high

    assert 0.92 <= covered / 400 <= 0.98, covered  # 95 % ± 3 standard errors


def test_a_warning_comes_about_as_often_as_its_level_where_the_law_holds() -> None:
    rng = np.random.default_rng(1)
    warned = 0

    for _ in range(400):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit_tradeoff(*simulated(rng, scatter=0.02))
        warned += bool(caught)

    assert 0.02 <= warned / 400 <= 0.09, warned


def test_errors_and_the_p_value_are_those_of_scipys_own_fits() -> None:
    sizes, steps = simulated(np.random.default_rng(9), scatter=0.05)
    logs = np.log(sizes), np.log(steps)

    def law(x: np.ndarray, min_steps: float, min_examples: float, alpha: float = 1) -> np.ndarray:
        excess = np.exp(alpha * (min_examples - min_steps - x))
        return min_steps + np.log(1 + excess) / alpha

    fit = fit_tradeoff(sizes, steps)

    start = [math.log(200), math.log(20_000)]
    found, covariance = curve_fit(lambda x, s, e: law(x, s, e), *logs, start)
    bent, _ = curve_fit(law, *logs, [*start, 1.0])
    squares = [((logs[1] - law(logs[0], *values)) ** 2).sum() for values in (found, bent)]
    assert [fit.min_steps, fit.min_examples] == pytest.approx(np.exp(found), rel=1e-5)
    errors = [*np.sqrt(np.diag(covariance)), math.sqrt(covariance.sum() - 4 * covariance[0, 1])]
    assert list(fit.relative_errors) == pytest.approx(errors, rel=1e-4)
    assert fit.sharpness == pytest.approx(bent[2], rel=1e-3)
    ratio = (squares[0] - squares[1]) / (squares[1] / (len(sizes) - 3))
    assert fit.p_value == pytest.approx(f_distribution.sf(ratio, 1, len(sizes) - 3), rel=1e-3)


def test_three_batch_sizes_do_not_tell_another_bend_however_often_they_are_run() -> None:
    sizes = np.repeat([16.0, 128, 1024], 4)
    steps = 200 * (1 + 100 / sizes) * np.exp(np.random.default_rng(4).normal(0, 0.02, 12))

    assert math.isnan(fit_tradeoff(sizes, steps).p_value)


@pytest.mark.parametrize(("scatter", "told"), [(0.10, False), (0.20, True)])
def test_scatter_beyond_15_percent_is_too_much(scatter: float, told: bool) -> None:
    sizes, steps = simulated(np.random.default_rng(0), scatter=0)
    signs = np.array([1, -1, -1, 1, 1, -1, -1, 1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_tradeoff(sizes, steps * np.exp(scatter * signs))

    assert bool(caught) == told
    assert all(warning.filename == __file__ for warning in caught)  # where the user's call is


def test_a_gentler_bend_than_the_law_is_told() -> None:
    sizes, steps = simulated(np.random.default_rng(2), scatter=0.01, alpha=0.6)

    with pytest.warns(UserWarning, match=r"^The steps bend more gently than the law: an exponent"):
        fit_tradeoff(sizes, steps)


def test_a_sharper_bend_than_the_law_is_told() -> None:
    sizes, steps = simulated(np.random.default_rng(2), scatter=0.02, alpha=2.5)

    with pytest.warns(UserWarning, match=r"^The steps bend more sharply than the law: an exponent"):
        fit = fit_tradeoff(sizes, steps)

    assert fit.sharpness == pytest.approx(2.5, rel=0.2)
    assert fit.p_value < 0.01
    assert len(fit.warnings) == 1


def test_scattered_steps_are_told() -> None:
    sizes, steps = simulated(np.random.default_rng(6), scatter=0.4)

    with pytest.warns(UserWarning, match=r"^The steps scatter by \d+ % around the law\."):
        fit_tradeoff(sizes, steps)


def test_exact_steps_leave_no_residuals_and_no_doubt() -> None:
    fit = fit_tradeoff(*simulated(np.random.default_rng(0), scatter=0))

    assert fit.min_steps == pytest.approx(200)
    assert fit.critical_batch_size == pytest.approx(100)
    assert fit.rms_log_residual < 1e-9
    assert math.isnan(fit.p_value)
    assert fit.warnings == ()


def test_two_batch_sizes_determine_the_law_to_within_the_usual_scatter() -> None:
    fit = fit_tradeoff([16, 512], [720, 100])

    assert [fit.steps(16), fit.steps(512)] == pytest.approx([720, 100])
    band = fit.critical_batch_size_band()
    assert band.value == fit.critical_batch_size
    profiled = profiled_critical_batch_size([16, 512], [720, 100], STEPS_SCATTER)
    assert (band.low, band.high) == (profiled.low, profiled.high)
    least = fit.bands()["min_steps"]
    assert 0 < least.low < fit.min_steps < least.high


@pytest.mark.parametrize("apart", [1.0, 1.02])
def test_repeated_runs_of_two_batch_sizes_are_no_surer_than_one_of_each(apart: float) -> None:
    fit = fit_tradeoff([16, 16, 512, 512], [720, 720 * apart, 100, 100 * apart])

    once = fit_tradeoff([16, 512], [720, 100]).bands()
    for name, band in fit.bands().items():
        assert [band.low, band.high] == pytest.approx([once[name].low, once[name].high], rel=0.03)
    assert all(math.isnan(error) for error in fit.relative_errors)


def test_an_open_interval_has_no_fewest_steps() -> None:
    bands = fit_tradeoff([16, 32], [720, 405]).bands()

    assert math.isinf(bands["critical_batch_size"].high)
    assert bands["min_steps"].low == 0
    assert bands["min_examples"].high < 720 * 32 * 1.3  # perfect scaling, and the scatter


def test_repeated_runs_of_a_batch_size_narrow_the_errors() -> None:
    rng = np.random.default_rng(3)
    once = fit_tradeoff(*simulated(rng, scatter=0.05))
    many = [simulated(rng, scatter=0.05) for _ in range(9)]

    nine = fit_tradeoff(*(np.concatenate(x) for x in zip(*many, strict=True)))

    ratio = once.relative_errors.critical_batch_size / nine.relative_errors.critical_batch_size
    assert 2 < ratio < 4.5  # √9, up to the scatter of a scatter from eight points


@pytest.mark.parametrize(
    ("sizes", "steps", "message"),
    [
        (
            [64, 64],
            [100, 110],
            "`batch_sizes` must have two values at least, got 1. Two determine the law, four and"
            " more can also contradict it.",
        ),
        (
            [1, 2, 4],
            [64, 32, 16],
            "`steps` must show both ends of the law, got perfect scaling at all batch sizes from 1"
            " to 4. Add larger batch sizes.",
        ),
        (
            [1, 2, 4],
            [5, 5, 5],
            "`steps` must show both ends of the law, got steps that no longer fall at all batch"
            " sizes from 1 to 4. Add smaller batch sizes.",
        ),
        (
            [1, 2],
            [5, math.inf],
            "`steps` must be positive and finite, got inf at position 1. Leave out runs that did"
            " not reach the goal.",
        ),
        (
            [0, 2],
            [5, 4],
            "`batch_sizes` must be positive and finite, got 0.0 at position 0. Leave out runs that"
            " did not reach the goal.",
        ),
        (
            [1, 2],
            [5],
            "`batch_sizes` and `steps` must be one-dimensional and equally long, got shapes (2,)"
            " and (1,). Give the steps to the goal for each batch size.",
        ),
    ],
)
def test_sweeps_that_determine_nothing_are_refused(
    sizes: list[float], steps: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit_tradeoff(sizes, steps)
