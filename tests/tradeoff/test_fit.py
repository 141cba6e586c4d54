# SPDX-License-Identifier: Apache-2.0
import csv
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import refused
from scipy.optimize import minimize

from noisescale import fit_tradeoff
from noisescale.bounded import Bounded

DATA = Path(os.environ.get("NOISESCALE_DATA", Path(__file__).parents[2] / "data"))


def within(band: Bounded, truth: float) -> bool:
    return band.low <= truth <= band.high


def test_published_sweeps_bend_as_theirs_authors_took_them_to() -> None:
    """S_min and E_min of their fit, with α = 1, are within the bounds, as α = 1 is."""
    folder = DATA / "critical_batch_size"
    if not folder.exists():
        pytest.skip(f"There is no {folder}: set NOISESCALE_DATA to where the published sweeps are.")
    runs = list(csv.DictReader((folder / "steps_to_target.csv").read_text().splitlines()))
    published = list(csv.DictReader((folder / "reference_fits.csv").read_text().splitlines()))

    for row in published:
        of_it = [run for run in runs if run["model"] == row["model"]]
        sweep = (
            [float(run["batch_size_sequences"]) for run in of_it],
            [float(run["steps_in_fit"]) for run in of_it],
        )
        fit, theirs = fit_tradeoff(*sweep), fit_tradeoff(*sweep, exponent=1)
        assert theirs.min_steps == pytest.approx(float(row["published_S_min"]), rel=1e-5)
        assert theirs.min_examples == pytest.approx(float(row["published_E_min"]), rel=1e-5)
        assert theirs.regimes().sharpness == Bounded(1, 1, 1)
        band = theirs.critical_batch_size_band()
        assert band.value == pytest.approx(theirs.critical_batch_size)
        found = fit.regimes()
        assert within(found.min_steps, float(row["published_S_min"]))
        assert within(found.min_examples, float(row["published_E_min"]))
        assert within(found.critical_batch_size, float(row["B_crit_sequences"]))
        assert within(found.sharpness, 1.0)
        overhead = float(row["published_cbs_20pct_overhead"])
        assert fit.overhead_batch_size(0.2, 256) == pytest.approx(overhead, rel=0.15)
    assert len(published) == 3


def simulated(
    rng: np.random.Generator, *, scatter: float, alpha: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Steps of S_min 200 and B_crit 100 with a bend of sharpness alpha."""
    sizes = np.array([8.0, 16, 32, 64, 128, 256, 512, 1024])
    steps = 200 * (1 + (100 / sizes) ** alpha) ** (1 / alpha)
    return sizes, steps * np.exp(rng.normal(0, scatter, len(sizes)))


@pytest.mark.parametrize("exponent", [0, 11, "1", math.nan])
def test_an_exponent_that_is_none_is_refused(exponent: Any) -> None:
    with refused("exponent", got=repr(exponent)):
        fit_tradeoff([8, 64], [100, 30], exponent=exponent)


def test_the_fit_is_the_least_of_residuals_and_of_a_normal_distribution_of_log_alpha() -> None:
    sizes, steps = simulated(np.random.default_rng(9), scatter=0.05)

    fit = fit_tradeoff(sizes, steps)

    scatter = fit.regimes().scatter

    def squares(values: np.ndarray) -> float:
        least, critical, alpha = np.exp(values)
        left = np.log(steps / least) - np.log(1 + (critical / sizes) ** alpha) / alpha
        return float(((left / scatter) ** 2).sum() + (values[2] / 0.35) ** 2)

    best = np.exp(minimize(squares, np.log([200, 100, 1]), method="BFGS").x)
    found = [fit.min_steps, fit.critical_batch_size, fit.sharpness]
    assert found == pytest.approx(best, rel=1e-3)
    assert fit.steps(64.0) == pytest.approx(steps[3] / math.exp(fit.log_residuals[3]))


@pytest.mark.parametrize(
    ("scatter", "alpha", "told"),
    [(0.10, 1.0, ""), (0.20, 1.0, "scatter"), (0.01, 0.4, "gently"), (0.01, 2.5, "sharply")],
)
def test_scatter_beyond_15_percent_and_another_bend_than_the_theorys_are_told(
    scatter: float, alpha: float, told: str
) -> None:
    sizes, steps = simulated(np.random.default_rng(0), scatter=0, alpha=alpha)
    signs = np.array([1, -1, -1, 1, 1, -1, -1, 1])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = fit_tradeoff(sizes, steps * np.exp(scatter * signs))

    assert [told in str(one.message) for one in caught] == [True] * bool(told)
    assert all(warning.filename == __file__ for warning in caught)  # where the user's call is
    assert [*fit.warnings] == [str(one.message) for one in caught]
    assert (fit.sharpness > 1.1, fit.sharpness < 0.9) == (alpha > 1, alpha < 1)


def test_exact_steps_leave_no_residuals_and_no_doubt() -> None:
    fit = fit_tradeoff(*simulated(np.random.default_rng(0), scatter=0))

    assert fit.min_steps == pytest.approx(200)
    assert fit.critical_batch_size == pytest.approx(100)
    assert fit.rms_log_residual < 1e-9
    assert fit.sharpness == pytest.approx(1)
    assert fit.warnings == ()


def test_two_batch_sizes_have_the_law_of_the_theory_as_nothing_contradicts_it() -> None:
    fit = fit_tradeoff([16, 512], [720, 100])
    near = fit_tradeoff([16, 32], [720, 405]).regimes()

    assert [fit.steps(16), fit.steps(512)] == pytest.approx([720, 100])
    assert fit.sharpness == pytest.approx(1)
    least = fit.regimes().min_steps
    assert 0 < least.low < fit.min_steps < least.high
    assert math.isinf(near.critical_batch_size.high)
    assert near.min_steps.low == 0
    assert near.min_examples.high < 720 * 32 * 1.5  # perfect scaling, and the scatter


def test_sweeps_that_show_one_end_alone_are_refused() -> None:
    with refused("steps", remedy="larger") as raised:
        fit_tradeoff([1, 2, 4], [64, 32, 16])
    assert raised.value.got.startswith("perfect scaling")
    with refused("steps", remedy="smaller"):
        fit_tradeoff([1, 2, 4], [5, 5, 5])
