# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reported_runs
from refused import refused

from noisescale import History, predict
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.lab.branch.answer import Branches
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.prediction.calibration import Calibration

START, END, BATCH_SIZE, CRITICAL = 1000.0, 2000.0, 32.0, 200.0
LEAST = (END - START) / (1 + CRITICAL / BATCH_SIZE)


def branch(batch_size: float, *, order: int = 0, slower: float = 1.0, **changed: Any) -> Branch:
    """By the law: its loss falls from 3 at the start to 2 at its own s = s_min + e_min/B."""
    steps = slower * LEAST * (1 + CRITICAL / batch_size)
    at = np.linspace(0, 1.2 * steps, 200)
    course = {"steps": tuple(at), "losses": tuple(3 - at / steps)}
    about = {"batch_size": batch_size, "order": order, "learning_rate_factor": 2.0, "seconds": 1.0}
    return Branch(**{**about, **course, **changed})


def branched(*branches: Branch, half: float | None = 2.5) -> BranchedRun:
    middle = [((START + END) / 2, half)] if half else []
    course = ((START, 3.0), *middle, (END, 2.0))
    return BranchedRun(BATCH_SIZE, course, 256, "sqrt", branches)


def history(noise_scale: float = 50.0) -> History:
    """At B_simple = 50 throughout, a quarter of the truth."""
    about = {"rows": 20, "every": 100, "batch_size": BATCH_SIZE, "devices": 1}
    columns = reported_runs.history(noise_scale=noise_scale, seconds=math.nan, **about)
    return History.from_columns(columns)


def ratio_of(run: BranchedRun) -> float:
    """By how much more steps it takes at its own batch size than at 512."""
    found = run.critical_batch_size().value
    return (1 + found / BATCH_SIZE) / (1 + found / 512)


def calibrated(run: History, found: BranchedRun | None = None) -> Calibration:
    return Calibration.from_branched_run(run, found or branched(branch(512)))


def of_parts(*parts: tuple[float, float]) -> tuple[float, float]:
    """The least steps and examples of steps at noise scales, by the law."""
    least = [steps / (1 + b / BATCH_SIZE) for steps, b in parts]
    return sum(least), sum(s * b for s, (_, b) in zip(least, parts, strict=True))


def test_branches_by_the_law_say_what_it_is_as_surely_as_their_orders_agree() -> None:
    run = branched(branch(128), branch(512))
    calm, wild = (
        branched(*(branch(512, order=k, slower=x**k) for k in (-1, 0, 1))) for x in (1, 0.7)
    )

    assert run.critical_batch_size().value == pytest.approx(CRITICAL, rel=1e-3)
    assert run.critical_batch_size(run.half_way).value == pytest.approx(CRITICAL, rel=1e-3)
    assert run.doubts == ()
    (one, other) = (x.critical_batch_size() for x in (calm, wild))
    assert one.value == pytest.approx(other.value, rel=1e-3)
    assert other.high / other.low > 1.3 * one.high / one.low


def test_a_transient_is_told() -> None:
    """Slow at first: at half of the loss they have taken as many steps as the run itself."""
    half, late = LEAST * (1 + CRITICAL / BATCH_SIZE) / 2, []
    for size in (256, 512, 1024):
        whole = LEAST * (1 + CRITICAL / size)
        steps = (0.0, half, half + whole / 2, half + 1.4 * whole / 2)
        late.append(replace(branch(size), steps=steps, losses=(3.0, 2.5, 2.0, 1.9)))

    told = branched(*late).doubts, branched(branch(512), half=None).doubts

    for (doubt,), part in zip(told, ("still affects", "near the middle"), strict=True):
        assert part in doubt


def test_losses_of_the_run_that_do_not_fall_are_averaged() -> None:
    """The last is high by chance, the one before it low: the run had their mean between them."""
    course = ((1000.0, 3.0), (1500.0, 2.5), (2000.0, 1.9), (2100.0, 2.1))
    run = replace(branched(branch(512)), course=course)

    assert run.falling == ((1000.0, 3.0), (1500.0, 2.5), (2050.0, 2.0))
    assert (run.end, run.goal, run.until) == (2050.0, 2.0, 2100.0)
    assert run.half_way == (1500.0, 2.5)
    ratio = (1 + CRITICAL / BATCH_SIZE) / (1 + CRITICAL / 512) * 1.05
    assert ratio_of(run) == pytest.approx(ratio, rel=1e-3)
    assert not replace(run, course=((1000.0, 3.0), (1500.0, 3.1), (2000.0, 2.95))).half_way
    assert not replace(run, course=((1000.0, 3.0), (2000.0, 3.0))).falls


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"branches": (branch(32, slower=0.5), branch(512))}, "took 500 steps"),
        ({"branches": (branch(512, slower=0.1),)}, "perfect scaling"),
        ({"branches": (branch(512, diverged_at=(16.0, 4.0)),)}, "diverged with 16 times"),
        ({"learning_rate_change": 0.1}, "a factor of 0.1"),
        ({"of_a_stream": True}, "a stream"),
    ],
)
def test_what_makes_branches_another_training_than_the_run_is_told(
    changed: dict[str, Any], said: str
) -> None:
    run = replace(branched(branch(512)), **changed)

    assert said in " ".join(run.doubts)


def test_branches_of_another_run_are_refused() -> None:
    run, other = branched(branch(512)), history()

    known = History.from_columns({**other}, parameters=1000.0)

    for of_run, branches, got in (
        (other, replace(run, batch_size=64.0), "batch size of 64"),
        (known, replace(run, parameters=2000.0), "parameters of 2,000"),
    ):
        with refused("branches", requirement="of this run") as found:
            calibrated(of_run, branches)
        assert got in found.value.got


def test_branches_that_diverge_are_left_out_and_named() -> None:
    lost = branch(512, order=1, losses=(3.0, math.nan), steps=(0.0, 5.0), diverged=True)
    short = branch(512, losses=(3.0, 2.6), steps=(0.0, 5.0))
    run = branched(branch(512), lost)

    assert run.critical_batch_size().value == pytest.approx(CRITICAL, rel=1e-3)
    assert "512 (order 2) diverged" in run.doubts[0]
    for none, fate in ((lost, "512 (order 2) diverged"), (short, "2.6 after 5 steps")):
        with refused("branches") as found:
            branched(none).critical_batch_size()
        assert fate in found.value.got


def test_the_branch_at_the_runs_own_batch_size_counts_beside_the_run() -> None:
    run = branched(branch(512), branch(32, slower=1.21))

    own = 1.1 * (END - START)  # the geometric mean of both
    assert ratio_of(run) == pytest.approx(own / (LEAST * (1 + CRITICAL / 512)), rel=1e-3)


def test_the_noise_scale_is_compared_over_the_same_steps() -> None:
    columns = {name: values.copy() for name, values in history().items()}
    for name in ("noise_scale", "low", "high"):  # ten times smaller up to the checkpoint
        columns[name][columns["step"] <= START] /= 10

    kappa = calibrated(History.from_columns(columns)).kappa

    assert kappa.value == pytest.approx(4, rel=0.01)
    assert kappa.low < 4 < kappa.high


@pytest.mark.parametrize(
    ("falls_from", "kappa"),
    [(END, 1.6), (START, 1.6), (0.0, 1.0)],  # never; after the checkpoint; all along
)
def test_the_part_before_the_checkpoint_goes_by_its_own_learning_rate(
    falls_from: float, kappa: float
) -> None:
    of_run = history()
    step = of_run["step"]
    rate = np.interp(step, [0, falls_from, max(falls_from, START) + 1, END + 2], [1, 1, 0.4, 0.1])
    columns = {**of_run, "learning_rate": np.where(step <= falls_from, 1.0, rate)}
    run = History.from_columns(columns, optimizer=OptimizerMix(OptimizerKind.ADAM))

    p = predict(run, calibration=calibrated(run))

    least, examples = of_parts((START, kappa * 50.0), (END - START, CRITICAL))
    assert p.critical_batch_size.value == pytest.approx(examples / least, rel=1e-3)


def test_a_calibrated_run_predicts_by_it() -> None:
    run = history()

    p = predict(run, [512], [1], calibration=calibrated(run))

    # By the noise scale up to the checkpoint, by the branches from there on.
    least, examples = of_parts((START, 50.0), (END - START, CRITICAL))
    assert p.critical_batch_size.value == pytest.approx(examples / least, rel=1e-3)
    (row,) = p.rows
    assert row.steps.value == pytest.approx(least + examples / 512, rel=1e-3)
    assert row.steps.low < row.steps.value < row.steps.high
    assert "branches at 512 give 200" in p.assumptions[1]


def test_predict_takes_what_branch_returns_and_its_file(tmp_path: Path) -> None:
    run, found = history(), branched(branch(512))
    answer = Branches(found, found.by_noise_scale(run), str(tmp_path / "branches.json"))
    found.to_file(answer.output)

    expected = predict(run, calibration=calibrated(run, found)).to_dict()

    for given in (answer, found, answer.output):
        assert predict(run, branches=given).to_dict() == expected


def test_without_a_noise_scale_or_steps_before_them_the_branches_are_taken_for_the_run() -> None:
    run, unresolved = history(), history(math.inf)
    early = replace(branched(branch(512)), course=((0.0, 3.0), (1000.0, 2.0)))

    whole = predict(run, calibration=calibrated(run, early))
    without = predict(unresolved, calibration=calibrated(unresolved))

    assert whole.critical_batch_size.value == pytest.approx(CRITICAL, rel=1e-3)
    assert without.critical_batch_size.value == pytest.approx(CRITICAL, rel=0.01)
    assert without.to_dict()["calibration"]["kappa"]["value"] is None


def test_a_file_gives_back_what_was_written_and_another_file_is_refused(tmp_path: Path) -> None:
    run, path = branched(branch(128), branch(512, order=1)), tmp_path / "branches.json"

    run.to_file(path)

    assert BranchedRun.from_file(path) == run
    assert [*tmp_path.iterdir()] == [path]
    for text in ("", "[]", '{"format": "other"}', '{"format": "noisescale branches 2"}'):
        path.write_text(text)
        with refused(str(path), requirement="`noisescale branch`"):
            BranchedRun.from_file(path)
