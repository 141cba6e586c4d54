# SPDX-License-Identifier: Apache-2.0
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reported_runs
from logged_runs import record
from refused import refused

from noisescale import History, predict
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.second_run import SecondRun, advice_on, informative_batch_size

LEAST, CRITICAL = 50.0, 200.0


def run(batch_size: float, steps: float | None = None, **about: Any) -> History:
    """Ten rows of a run by the law, with a noise scale that says a quarter of the truth."""
    count = steps or LEAST * (1 + CRITICAL / batch_size)
    step = np.linspace(count / 10, count, 10)
    names = ("step", "examples", "batch_size", "noise_scale", "low", "high")
    known = (step, batch_size * step, batch_size, CRITICAL / 4, CRITICAL / 5, CRITICAL / 3)
    columns = {name: x * np.ones(10) for name, x in zip(names, known, strict=True)}
    return History.from_columns(columns, **about)


def test_two_runs_by_the_law_say_what_it_is_whatever_the_noise_scale_says() -> None:
    first, second = run(32, parameters=7.0), run(512, parameters=7.0)

    p = predict(first, [32, 128, 512], [1], second_run=second)

    critical = p.critical_batch_size
    assert critical.value == pytest.approx(CRITICAL)
    assert critical.low < CRITICAL < critical.high
    assert [row.steps.value for row in p.rows] == pytest.approx(
        [LEAST * (1 + CRITICAL / size) for size in (32, 128, 512)]
    )
    assert p.critical_batch_size_by_noise_scale.value == pytest.approx(CRITICAL / 4)
    assert p.calibration.kappa.value == pytest.approx(4)
    assert p.resolved
    own, last = p.rows[0].steps.value, p.rows[-1].steps
    ends = sorted(own * (1 + c / 512) / (1 + c / 32) for c in (critical.low, critical.high))
    assert [last.low, last.high] == pytest.approx(ends)


def test_a_noise_scale_that_is_not_resolved_is_not_needed() -> None:
    unknown = {"noise_scale": np.full(10, math.nan), "low": np.zeros(10)}
    unmeasured = History.from_columns({**run(32), **unknown, "high": np.full(10, math.inf)})

    p = predict(unmeasured, [512], [1], second_run=run(512))

    assert p.critical_batch_size.value == pytest.approx(CRITICAL)
    assert p.rows[0].steps.value == pytest.approx(LEAST * (1 + CRITICAL / 512))
    assert p.to_dict()["calibration"]["kappa"]["value"] is None


def test_what_both_far_below_leave_open_is_told_and_steps_that_do_not_fall_bound_it() -> None:
    far, p = predict(run(4), second_run=run(8)), predict(run(512, 60.0), second_run=run(2048, 60.0))

    assert math.isinf(far.critical_batch_size.high)
    assert re.search(r"interval is open.*A second run at [\d,]+ to", " ".join(far.warnings))
    assert p.critical_batch_size.value == 0
    assert 0 < p.critical_batch_size.high < 512
    assert p.decision.verdict == "keep_or_smaller"
    assert not p.decision.headline.startswith("So far")


@pytest.mark.parametrize(
    ("second", "options", "arguments", "requirement"),
    [
        (run(32), {}, ("second_run",), "another batch size"),
        (run(512, parameters=11.0), {}, ("second_run",), "the same model"),
        (run(512), {"goal": "loss=2"}, ("goal",), "run folders"),
        (run(512), {"goal": "loss"}, ("goal",), "name"),
        (run(512), {"calibration": 2.0}, ("second_run", "calibration"), "not be combined"),
        (run(512), {"steps_scatter": -1}, ("steps_scatter",), "positive"),
        (None, {"goal": "loss=2"}, ("goal",), "`second_run`"),
        (None, {"steps_scatter": 0.2}, ("steps_scatter",), "`second_run`"),
        (run(512, parameters=10.0, unit="tokens"), {}, ("second_run",), "in examples"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    second: History | None, options: dict[str, Any], arguments: tuple[str, ...], requirement: str
) -> None:
    with refused(*arguments, requirement=requirement):
        predict(run(32, parameters=10.0), second_run=second, **options)
    if second is not None and second.unit == "tokens":
        assert predict(run(32), second_run=second, unit="windows").unit == "windows"


def test_steps_are_counted_up_to_a_goal_that_both_reached(tmp_path: Path) -> None:
    """Losses that fall from 1.5 to 0.5 on a line are at 1 after half of the steps."""
    for name, size in (("one", 32), ("two", 512)):
        logged(tmp_path / name, run(size))

    p = predict(tmp_path / "one", [32], [1], second_run=tmp_path / "two", goal="loss=1")

    assert p.second_run is not None
    assert p.second_run.result == "loss = 1"
    counts = [LEAST * (1 + CRITICAL / size) / 2 for size in (32, 512)]
    assert p.second_run.steps == pytest.approx(counts, rel=0.02)
    for goal, requirement in (
        ("loss=0.1", "have reached loss = 0.1"),
        ("loss<=2", "reach loss <= 2 after"),  # the loss begins below, and falls
        ("loss=2", "reach loss = 2 after"),
    ):
        with refused("run", requirement=requirement):
            predict(tmp_path / "one", second_run=tmp_path / "two", goal=goal)


def logged(folder: Path, history: History) -> None:
    """With a CSVLogger's file of a loss that falls from 1.5 to 0.5 on a line."""
    steps = history["step"].round()
    record(folder, **{**history, "step": steps, "behind": np.ones_like(steps)})
    lines = [f"{step - 1},{1.5 - step / steps[-1]}" for step in steps]
    (folder / "metrics.csv").write_text("\n".join(["step,loss", *lines, ""]))


@pytest.mark.parametrize(("size", "critical"), [(32, 200.0), (8, 1000.0), (1024, 100.0)])
def test_the_advice_tells_nearly_all_that_any_second_run_could(
    size: float, critical: float
) -> None:
    def told(other: float) -> float:
        return abs(critical / (size + critical) - critical / (other + critical))

    best = informative_batch_size(size, critical)

    assert size / 16 <= best <= 16 * size
    assert told(best) >= min(0.8 * max(told(1e-9), told(1e12)), told(16 * size), told(size / 16))
    nearer = best / 2 if best > size else best * 2
    assert told(nearer) < 0.8 * max(told(1e-9), told(1e12))
    if "gives" in (said := advice_on(size, critical)) and "too far" not in said:
        assert f"{best:,.4g}" in said


def test_a_batch_size_may_change_along_either_run() -> None:
    """Steps by the law, at 8 and then at 32, and at 64 and then at 512."""

    def changing(*sizes: float) -> History:
        size = np.repeat(sizes, 2)
        steps = 125 * (1 + CRITICAL / size)  # each row makes as much progress
        course = {"step": steps.cumsum(), "examples": (steps * size).cumsum(), "batch_size": size}
        return History.from_columns(reported_runs.history(rows=4, **course))

    found = SecondRun.of(changing(8, 32), changing(64, 512))

    assert found.critical_batch_size.value == pytest.approx(CRITICAL, rel=1e-3)


@pytest.mark.parametrize("factor", [0.02, 20.0])
def test_steps_that_no_critical_batch_size_explains_say_nothing(factor: float) -> None:
    """At 16 times the batch fewer steps than a sixteenth, or more than before."""
    second = run(512)
    scaled = {name: factor * second[name] for name in ("step", "examples")}

    found = SecondRun.of(run(32), History.from_columns({**second, **scaled}))

    assert (found.critical_batch_size.low, found.critical_batch_size.high) == (0, math.inf)
    assert "explains" in found.doubts[0]


def test_the_advice_is_a_whole_number_of_examples_and_foretells_the_interval() -> None:
    assert informative_batch_size(300, 170) == 19  # 300/16
    assert informative_batch_size(1, 0.3) == 8  # there is none below
    assert "too far from 4,096" in advice_on(4096, 0.01)
    best = informative_batch_size(32, CRITICAL)
    factor = float(re.findall(r"factor of about ([\d.]+)\.", advice_on(32, CRITICAL))[0])

    found = SecondRun.of(run(32), run(best)).critical_batch_size

    assert math.sqrt(found.high / found.low) == pytest.approx(factor, rel=0.2)


def test_the_band_of_the_optimizer_widens_the_bounds_and_not_those_of_the_measurement() -> None:
    of_adam = run(32, optimizer=OptimizerMix(OptimizerKind.ADAM))

    plain, adam = predict(run(32)), predict(of_adam)

    assert adam.critical_batch_size_by_noise_scale == plain.critical_batch_size
    # The run has one noise scale: B_crit is 1.6 times as large.
    ratio = adam.critical_batch_size.value / plain.critical_batch_size.value
    assert ratio == pytest.approx(1.6)
    assert adam.critical_batch_size.high > 3 * plain.critical_batch_size.high
    assert "optimizer was not recorded" in " ".join(plain.assumptions)
    assert predict(of_adam, calibration=1).critical_batch_size == plain.critical_batch_size
