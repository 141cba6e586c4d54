# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reported_runs
from refused import refused

from noisescale import Calibration, History, Tradeoff, fit_tradeoff, predict
from noisescale.bounded import Bounded
from noisescale.prediction.calibrating import calibration_from

RESOLVED = Bounded(50.0, 40.0, 80.0)
STEP = np.arange(20.0, 1001, 20)
NOISE_SCALE = 20 + 0.1 * STEP


def run(noise_scale: np.ndarray = NOISE_SCALE, **changed: Any) -> dict[str, np.ndarray]:
    ends = {"low": 0.8 * noise_scale, "high": 1.3 * noise_scale} | changed
    return {"step": STEP, "examples": 64 * STEP, "noise_scale": noise_scale, **ends}


def law(noise_scale: np.ndarray) -> Tradeoff:
    return Tradeoff.from_run(noise_scale, np.full(50, 64), np.full(50, 20))


def test_a_sweep_gives_back_the_factor_it_was_made_with() -> None:
    truth = law(2.7 * NOISE_SCALE)
    sizes = np.array([8.0, 32, 128, 512, 2048])
    scatter = np.exp(np.random.default_rng(0).normal(0, 0.02, 5))

    calibration = Calibration.from_sweep(run(), fit_tradeoff(sizes, truth.steps(sizes) * scatter))

    kappa = calibration.kappa
    assert kappa.value == pytest.approx(2.7, rel=0.1)
    assert kappa.low < 2.7 < kappa.high < 3 * kappa.low
    assert "5 batch sizes" in calibration.source


def test_a_sweeps_doubts_and_bounds_are_those_of_the_factor() -> None:
    sizes = np.repeat([8.0, 32, 128, 512, 2048], 2)
    steps = 200 * (1 + 100 / sizes) * np.exp(np.tile([0.3, -0.3], 5))
    with pytest.warns(UserWarning, match="scatter"):
        fit = fit_tradeoff(sizes, steps)

    found = Calibration.from_sweep(run(), fit)

    (doubt,) = fit.warnings
    assert [one.endswith(doubt) for one in found.doubts] == [True]
    critical = law(found.kappa.high * NOISE_SCALE).critical_batch_size
    assert critical == pytest.approx(fit.critical_batch_size_band(0.95).high)


def test_the_factor_is_not_the_plain_ratio_where_the_noise_scale_changes() -> None:
    """The larger kappa·b/B, the more do the large noise scales at the end count."""
    truth, plain = law(50 * NOISE_SCALE), law(NOISE_SCALE)
    fit = fit_tradeoff([8, 2048], truth.steps(np.array([8.0, 2048])))

    assert Calibration.from_sweep(run(), fit).kappa.value == pytest.approx(50)
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
        RESOLVED,
        batch_sizes=[64, 128, 256, 512, 1024],
        losses=[2.500, 2.501, 2.509, 2.530, 2.560],
        scatter=0.002,
    )

    assert "a tolerance of 0.01, 256" in calibration.source


@pytest.mark.parametrize(
    ("noise_scale", "sizes", "losses", "argument", "got"),
    [
        (RESOLVED, [64, 128, 256], [2.5] * 3, ("losses",), "of 0 to inf"),
        (Bounded(math.nan, 40, math.inf), [64, 128, 256], [2.5, 2.6, 2.7], ("noise_scale",), "nan"),
        (RESOLVED, [64, 128], [2.5, 2.6], ("batch_sizes", "losses"), "(2,) and (2,)"),
        (RESOLVED, [64, 128, 256], [2.5, 2.5, math.nan], ("losses", "batch_sizes"), "nan]"),
    ],
)
def test_losses_that_calibrate_nothing_are_refused(
    noise_scale: Bounded, sizes: Any, losses: Any, argument: tuple[str, ...], got: str
) -> None:
    with refused(*argument) as found:
        Calibration.from_branches(noise_scale, sizes, losses)

    assert got in found.value.got


def test_a_number_or_a_run_that_calibrates_nothing_is_refused() -> None:
    with refused("kappa", got="0.0"):
        Calibration(Bounded(0.0, 0.0, 0.0), "given")
    with refused("history", requirement="resolved"):
        Calibration.from_sweep(run(high=np.full(50, math.inf)), fit_tradeoff([8, 32], [100, 30]))


def test_a_sweep_calibrates_a_run_whose_noise_scale_is_0_at_first() -> None:
    noise_scale = np.where(STEP <= 200, 0.0, NOISE_SCALE)
    sizes = np.array([8.0, 2048.0])
    fit = fit_tradeoff(sizes, law(0.7 * noise_scale).steps(sizes))

    calibration = Calibration.from_sweep(run(noise_scale), fit)

    assert calibration.kappa.value == pytest.approx(0.7)


def test_a_run_whose_noise_scale_is_0_is_not_calibrated() -> None:
    nothing, half = (
        run(np.zeros(50), high=np.ones(50)),
        run(np.where(STEP <= 500, 0.0, NOISE_SCALE)),
    )

    with refused("history", requirement="above 0"):
        Calibration.from_sweep(nothing, fit_tradeoff([8, 2048], [1000.0, 100.0]))
    with refused("history", requirement="critical batch size") as of_half:
        Calibration.from_sweep(half, fit_tradeoff([8, 2048], [1000.0, 8.0]))
    assert "0 in 50%" in of_half.value.got


def test_branches_are_compared_with_the_noise_scale_of_their_own_step(tmp_path: Path) -> None:
    branches = tmp_path / "branches.csv"
    losses = [f"{size},{2 + size / (size + 256)}" for size in (64, 256, 1024)]
    branches.write_text("batch_size,loss\n" + "\n".join(losses))
    history = History()
    for step in (10, 20, 30):
        history.append(step=step, examples=8 * step, noise_scale=step, low=step / 2, high=2 * step)

    found = calibration_from(history, None, None, branches, branch_step=20)
    over_more = calibration_from(history, None, None, branches, branch_step=10, branch_examples=160)

    assert isinstance(found, Calibration)
    assert found.kappa.value == pytest.approx(256 / 20, rel=1e-3)
    # Ten steps at 20 and ten at 30, of 8 examples each: E_min over S_min.
    least = [10 / (1 + b / 8) for b in (20, 30)]
    span = (20 * least[0] + 30 * least[1]) / sum(least)
    assert isinstance(over_more, Calibration)
    assert over_more.kappa.value == pytest.approx(256 / span, rel=1e-3)


def test_doubts_of_a_sweep_are_in_the_prediction_alone(tmp_path: Path) -> None:
    """Warnings are errors in these tests."""
    sweep = tmp_path / "sweep.csv"
    sweep.write_text("batch_size,steps\n16,3000\n64,450\n256,380\n1024,90\n4096,130\n")
    history = History.from_columns(reported_runs.history())

    found = calibration_from(history, None, sweep, None)

    assert "scatter" in predict(history, calibration=found).warnings[0]
