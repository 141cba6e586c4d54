# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from noisescale.history.metrics import Goal
from noisescale.history.reading import read_metric


def test_a_goal_is_reached_between_two_values() -> None:
    steps, losses = np.array([10.0, 20.0, 30.0]), np.array([3.0, 2.0, 1.0])

    assert Goal("loss", 1.5).first_step(steps, losses) == pytest.approx(25)
    assert Goal("loss", 0.5).first_step(steps, losses) is None
    assert Goal("accuracy", 1.5).first_step(steps, losses[::-1].copy()) == pytest.approx(15)


def test_a_single_low_value_does_not_reach_it() -> None:
    """Isotonic means: 3, 2.5, then (0.5 + 2.5)/2 twice, then 1."""
    steps, losses = np.arange(1.0, 6.0), np.array([3.0, 2.5, 0.5, 2.5, 1.0])

    assert Goal("loss", 1.4).first_step(steps, losses) == pytest.approx(4.2)


def test_a_goal_that_the_run_begins_at_is_reached_there() -> None:
    assert Goal("loss", 3.0).first_step(np.array([5.0, 9.0]), np.array([3.0, 2.0])) == 5


def test_a_loss_that_rises_again_had_reached_it() -> None:
    steps, losses = np.arange(1.0, 9.0), np.array([3.0, 2.0, 1.5, 1.2, 1.25, 1.2, 2.5, 3.0])

    assert Goal("loss", 1.3).first_step(steps, losses) == pytest.approx(3.72, abs=0.02)
    assert Goal("loss", 1.0).first_step(steps, losses) is None


def test_the_side_may_be_given() -> None:
    steps, losses = np.array([10.0, 20.0, 30.0]), np.array([0.2, 0.3, 0.1])

    assert Goal.read("loss<=0.15").first_step(steps, losses) == pytest.approx(27.5, abs=3)
    assert str(Goal.read("accuracy >= 0.9")) == "accuracy >= 0.9"
    assert Goal.read("a=b=1") == Goal("a=b", 1.0)


@pytest.mark.parametrize("text", ["loss", "=3", "loss=", "loss=low", "loss=inf", ""])
def test_what_is_no_goal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"`goal` must be a metric's name and its value, got"):
        Goal.read(text)


@pytest.mark.parametrize("behind", [0, 1])
def test_another_metric_is_read_at_the_steps_it_was_logged_at(tmp_path: Path, behind: int) -> None:
    """Lightning logs under the number of the step before, the Trainer of transformers does not."""
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (10, 20, 30):
            writer.add_scalar("loss", 3.0 / step, step - behind)
            if step > 10:
                writer.add_scalar("noise_scale/step", step, step - behind)
        writer.add_scalar("loss", float("nan"), 40 - behind)

    steps, values = read_metric(tmp_path, "loss")

    assert steps.tolist() == [10, 20, 30]
    assert values.tolist() == pytest.approx([0.3, 0.15, 0.1])
    with pytest.raises(ValueError, match=r"`goal` must name a metric of .*, got 'los'. Its met"):
        read_metric(tmp_path, "los")


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("loss<=2", [True, True, False, False]),
        ("loss<2", [True, False, False, False]),
        ("loss>=2", [False, True, True, False]),
        ("loss>2", [False, False, True, False]),
    ],
)
def test_a_strict_goal_is_not_reached_by_its_own_value(text: str, reached: list[bool]) -> None:
    goal = Goal.read(text)

    assert goal.is_reached_by(np.array([1, 2, 3, np.nan])).tolist() == reached
    assert str(goal) == re.sub(r"([<>]=?)", r" \1 ", text)


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_a_metric_of_a_run_without_a_monitor_is_refused_as_its_steps_are_not_known(
    tmp_path: Path, logger: str
) -> None:
    if logger == "csv":
        (tmp_path / "metrics.csv").write_text("step,loss\n9,0.3\n")
    else:
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("loss", 0.3, 9)

    with pytest.raises(ValueError, match="must be a run with NoiseScaleMonitor, got no metrics of"):
        read_metric(tmp_path, "loss")
