# SPDX-License-Identifier: Apache-2.0
import math
import re

import numpy as np
import pytest

from noisescale import Calibration, Tradeoff, fit_tradeoff
from noisescale.bounded import Bounded

STEP = np.arange(20.0, 1001, 20)
NOISE_SCALE = 20 + 0.1 * STEP
HISTORY = {
    "step": STEP,
    "examples": 64 * STEP,
    "noise_scale": NOISE_SCALE,
    "low": 0.8 * NOISE_SCALE,
    "high": 1.3 * NOISE_SCALE,
}


def test_a_sweep_gives_back_the_factor_it_was_made_with() -> None:
    truth = Tradeoff.from_run(2.7 * NOISE_SCALE, np.full(50, 64), np.full(50, 20))
    sizes = np.array([8.0, 32, 128, 512, 2048])
    scatter = np.exp(np.random.default_rng(0).normal(0, 0.02, 5))

    calibration = Calibration.from_sweep(HISTORY, fit_tradeoff(sizes, truth.steps(sizes) * scatter))

    kappa = calibration.kappa
    assert kappa.value == pytest.approx(2.7, rel=0.1)
    assert kappa.low < 2.7 < kappa.high < 3 * kappa.low
    assert calibration.source.startswith("fitted to a sweep of 5 batch sizes with B_crit = ")


def test_a_sweeps_doubts_and_confidence_are_those_of_the_factor() -> None:
    sizes = np.repeat([8.0, 32, 128, 512, 2048], 2)
    steps = 200 * (1 + 100 / sizes) * np.exp(np.tile([0.3, -0.3], 5))
    with pytest.warns(UserWarning, match="The steps scatter by"):
        fit = fit_tradeoff(sizes, steps)

    wide, narrow = (Calibration.from_sweep(HISTORY, fit, c) for c in (0.95, 0.5))

    (doubt,) = fit.warnings
    assert wide.doubts == (f"About the sweep that kappa was fitted to: {doubt}",)
    assert wide.source.startswith("fitted to a sweep of 5 batch sizes")
    assert wide.kappa.low < narrow.kappa.low < narrow.kappa.high < wide.kappa.high
    scaled = narrow.kappa.high * NOISE_SCALE
    critical = Tradeoff.from_run(scaled, np.full(50, 64), np.full(50, 20)).critical_batch_size
    assert critical == pytest.approx(fit.critical_batch_size_band(0.5).high)


def test_the_factor_is_not_the_plain_ratio_where_the_noise_scale_changes() -> None:
    """The larger kappa·b/B, the more do the large noise scales at the end count."""
    truth = Tradeoff.from_run(50 * NOISE_SCALE, np.full(50, 64), np.full(50, 20))
    plain = Tradeoff.from_run(NOISE_SCALE, np.full(50, 64), np.full(50, 20))

    kappa = Calibration.from_sweep(
        HISTORY, fit_tradeoff([8, 2048], truth.steps(np.array([8.0, 2048])))
    ).kappa

    assert kappa.value == pytest.approx(50)
    assert truth.critical_batch_size / plain.critical_batch_size != pytest.approx(50, rel=0.02)


def test_losses_by_the_law_have_its_critical_batch_size_whatever_the_drop() -> None:
    """Merrill et al.'s threshold would read from 22.6 to 0.35 times that, as the drop grows."""
    sizes = [64, 256, 1024, 4096]
    for drop in (0.012, 0.02, 0.05, 0.5):
        calibration = Calibration.from_branches(
            Bounded(500.0, 400.0, 800.0),
            sizes,
            [2.5 + drop * b / (b + 500) for b in sizes],
            scatter=drop / 100,
        )

        assert calibration.kappa.value == pytest.approx(1, rel=1e-3)
        assert 0.3 < calibration.kappa.low < 1 < calibration.kappa.high < 3


def test_merrills_batch_size_is_told_beside_it() -> None:
    """4 is within 0.01 of the best of 1 and 2; 8 is not, whatever 16 is."""
    calibration = Calibration.from_branches(
        Bounded(50.0, 40.0, 80.0),
        batch_sizes=[64, 128, 256, 512, 1024],
        losses=[2.500, 2.501, 2.509, 2.530, 2.560],
        scatter=0.002,
    )

    assert (
        "with a tolerance of 0.01, 256 is the largest batch size that keeps up"
        in calibration.source
    )


def test_what_calibrates_nothing_is_refused() -> None:
    resolved = Bounded(50.0, 40.0, 80.0)
    for arguments, message in (
        (
            (resolved, [64, 128, 256], [2.5, 2.5, 2.5]),
            "`losses` must show up to which batch size branches keep up and from which they fall"
            " behind, got a critical batch size of 0 to inf, within their scatter of 0.01. Branch"
            " at smaller and at larger batch sizes, in several orders of the data.",
        ),
        (
            (Bounded(math.nan, 40.0, math.inf), [64, 128, 256], [2.5, 2.6, 2.7]),
            "`noise_scale` must be resolved, got Bounded(value=nan, low=40.0, high=inf). Branch"
            " later in the run.",
        ),
        (
            (resolved, [64, 128], [2.5, 2.6]),
            "`batch_sizes` and `losses` must be equally long and have three batch sizes or"
            " more, got shapes (2,) and (2,). Give the final loss of each branch.",
        ),
        (
            (resolved, [64, 128, 256], [2.5, 2.5, math.nan]),
            "`losses` and `batch_sizes` must be finite, and batch sizes positive, got [2.5, 2.5,"
            " nan] at [64, 128, 256]. Leave out branches that diverged.",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Calibration.from_branches(*arguments)
    with pytest.raises(ValueError, match=r"^`kappa` must be from 1e-06 to 1e\+06, got 0"):
        Calibration.from_number(0)
    unresolved = {**HISTORY, "high": np.full(50, math.inf)}
    with pytest.raises(ValueError, match=r"^`history` must have a resolved noise scale to be cal"):
        Calibration.from_sweep(unresolved, fit_tradeoff([8, 32], [100, 30]))


def test_a_sweep_calibrates_a_run_whose_noise_scale_is_0_at_first() -> None:
    noise_scale = np.where(STEP <= 200, 0.0, NOISE_SCALE)
    history = {**HISTORY, "noise_scale": noise_scale, "low": 0.8 * noise_scale}
    history["high"] = 1.3 * noise_scale
    truth = Tradeoff.from_run(0.7 * noise_scale, np.full(50, 64), np.full(50, 20))
    sizes = np.array([8.0, 2048.0])

    calibration = Calibration.from_sweep(history, fit_tradeoff(sizes, truth.steps(sizes)))

    assert calibration.kappa.value == pytest.approx(0.7)


def test_a_run_whose_noise_scale_is_0_is_not_calibrated() -> None:
    zero = np.zeros(50)
    fit = fit_tradeoff([8, 2048], [1000.0, 100.0])
    nothing = {**HISTORY, "noise_scale": zero, "low": zero, "high": zero + 1}
    half = {**HISTORY, "noise_scale": np.where(STEP <= 500, 0.0, NOISE_SCALE), "low": zero}
    critical = fit_tradeoff([8, 2048], [1000.0, 8.0])

    with pytest.raises(ValueError, match="`history` must have a noise scale above 0") as error:
        Calibration.from_sweep(nothing, fit)
    assert "Check that the batches of the run differ, or train longer." in str(error.value)
    with pytest.raises(ValueError, match="got a noise scale of 0 in 50% of its steps"):
        Calibration.from_sweep(half, critical)
