# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import reported_runs

from noisescale import Calibration, History, predict
from noisescale.prediction.calibrating import calibration_from


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
