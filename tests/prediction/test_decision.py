# SPDX-License-Identifier: Apache-2.0
"""The decision that a prediction ends in, in each case."""

import math
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from logged_runs import log_run
from reported_runs import history

from noisescale import History, Prediction, predict
from noisescale.bounded import Bounded
from noisescale.history.looks import Look
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.record import Recorder
from noisescale.prediction.decision import Decision, short_verdict
from noisescale.prediction.position import Position
from noisescale.prediction.statements import time_here
from noisescale.prediction.tables import summary_of

NAN, INF = math.nan, math.inf


def decision(batch_size: float, *critical: float, **run: float) -> Decision:
    p = predict(history(**{"batch_size": batch_size, "devices": 1, "seconds": NAN} | run))
    where = Position(batch_size, Bounded(*critical), scatter=0.5)
    with mock.patch.object(Prediction, "position", where):
        return p.decision


@pytest.mark.parametrize(
    ("batch_size", "critical", "suggested", "headline", "reason"),
    [
        (
            *(20, (229, 94, 778), 80, "Larger saves steps: up to 80 at little cost."),
            # (1 + c/80)/(1 + c/20) at the likely ends, 171 and 342
            "At 80 this result likely takes 0.29 to 0.33 of the steps, for 1.2 to 1.3 x the"
            " examples. Time was not measured.",
        ),
        (
            *(300, (340, 190, 590), 300, "Keep 300."),
            "Halving it likely saves 21 to 26 % of the examples, doubling it likely saves 24 to 29"
            " % of the steps.",
        ),
        (
            *(2048, (340, 190, 700), 1024, "Smaller is cheaper: 1,024 instead of 2,048."),
            "This result then likely takes 0.56 to 0.59 x the examples, in 1.1 to 1.2 x the steps.",
        ),
        (
            *(64, (180, 30, 3000), 64, "Not too large: 64 is no waste."),
            # (1 + c/128)/(1 + c/64) at the likely ends, 100 and 452
            "At 128 this result likely takes 0.56 to 0.69 of the steps, for 1.1 to 1.4 x the"
            " examples: this run cannot say if that pays.",
        ),
        (
            *(64, (21, 3, 120), 64),
            "Not too small: doubling 64 likely saves 7 to 18 % of the steps.",
            "Whether 32 is cheaper, this run cannot say.",
        ),
        (
            *(128, (NAN, 21, INF), None),
            "Not known yet: the critical batch size is at least 21 (you train at 128).",
            "Whether another batch size than 128 is better, this run cannot say.",
        ),
        (
            *(64, (64, 0.01, 4e5), None),
            "Not known yet: the critical batch size lies between 0.010 and 400,000.",
            "",
        ),
        (64, (NAN, 0, INF), None, "Not known yet: the critical batch size has no bound", ""),
    ],
)
def test_a_verdict_has_its_sentence_and_its_batch_size(
    batch_size: float,
    critical: tuple[float, float, float],
    suggested: int | None,
    headline: str,
    reason: str,
) -> None:
    found = decision(batch_size, *critical)

    assert found.batch_size == suggested
    assert found.headline.startswith(headline)
    assert found.reason.startswith(f"You train at batch size {batch_size:,}. {reason}")


def test_the_recommended_batch_size_is_that_of_the_decision_or_the_runs_own() -> None:
    larger, unknown = predict(history(noise_scale=300.0)), predict(history(unresolved=40, low=5.0))

    assert (larger.recommended_batch_size, larger.decision.batch_size) == (128, 128)
    assert larger.recommended.batch_size == 128
    assert (unknown.decision.verdict, unknown.decision.batch_size) == ("unknown", None)
    assert (unknown.recommended_batch_size, unknown.recommended.batch_size) == (64, 64)
    assert short_verdict(larger.decision) == "larger: 128"
    assert short_verdict(unknown.decision) == "unknown"
    shown = larger.to_dict()["decision"]
    assert (shown["verdict"], shown["batch_size"]) == ("larger", 128)
    assert shown["critical"]["high"] == pytest.approx(375.0)


def test_a_batch_of_one_example_each_is_kept_and_fractions_become_whole_ones() -> None:
    on_four = predict(history(batch_size=4.0, devices=4, noise_scale=0.1)).decision
    on_three = predict(history(batch_size=9.0, devices=3, noise_scale=0.1)).decision

    assert (on_four.verdict, on_four.headline) == ("keep", "Keep 4: each device has one example.")
    assert "doubling it likely saves" in on_four.reason.lower()
    assert (on_three.verdict, on_three.batch_size) == ("smaller", 3)


def timed(*seconds: float | None, noise_scale: float = 1000.0) -> Prediction:
    """Of a run at 64 whose critical batch size is 1,000, timed at 64, 128, 256, ... unless None."""
    sizes = [64 << k for k in range(len(seconds))]
    p = predict(history(devices=1, noise_scale=noise_scale), sizes, [1])
    rows = tuple(
        row
        if took is None
        else replace(row, basis="timed", seconds_per_step=Bounded(took, took, took))
        for row, took in zip(p.rows, seconds, strict=True)
    )

    def row_at(_: Prediction, batch_size: float, __: int) -> object:
        return next(row for row in rows if row.batch_size == batch_size)

    found = replace(p, rows=rows)
    with mock.patch.object(Prediction, "row_at", row_at):
        assert found.decision
    return found


def test_larger_pays_where_it_was_timed_and_is_kept_where_no_time_is_saved() -> None:
    seconds = (0.5, 0.52, 0.56), (0.5, 0.6, 1.3), (0.5, 1.0, 2.0), (0.5, 0.937, 3.0)
    pays, middle, slower, probably = (timed(*took).decision for took in seconds)

    # (1 + 1000/256)/(1 + 1000/64)·0.56/0.5 at 1000, 800 and 1250
    assert pays.headline.startswith(
        "Larger pays: 256 likely takes 0.32 to 0.34 x the time (timed), 1.2 x"
    )
    assert "not measured" not in pays.reason
    assert (pays.batch_size, middle.batch_size, slower.batch_size) == (256, 128, 64)
    # 0.530·0.937/0.5 = 0.993, and 1.006 at the end
    assert probably.headline.startswith("Larger probably pays: 128 likely takes 0.99")
    assert slower.verdict == "keep"
    assert (
        slower.headline
        == "Keep 64: a larger batch saves steps, but no time on this device, as timed."
    )


def test_the_suggested_batch_size_never_costs_more_examples_for_time() -> None:
    """512 costs 1.4 x the examples, and is the fastest: *Time* says so, the verdict does not."""
    p = timed(0.5, 0.5, 0.5, 0.5)
    other_side = timed(0.5, 0.5, noise_scale=10.0)

    assert p.decision.batch_size == 256
    assert "512 is the fastest of 64, 128, 256, 512, as timed" in time_here(p).sentence
    assert other_side.position.verdict == "smaller"
    assert other_side.decision.headline.startswith("Smaller is cheaper: ")


def test_what_was_timed_beyond_the_suggested_batch_size_keeps_no_run_at_its_own() -> None:
    found = timed(0.5, None, None, 0.9).decision

    assert (found.verdict, found.batch_size) == ("larger", 256)
    assert found.headline == "Larger saves steps: up to 256 at little cost."
    assert found.reason.endswith("the examples. Its time was not measured.")


def test_the_runs_own_time_is_known_where_only_other_devices_are_asked_for() -> None:
    said = [time_here(predict(history(seconds=took), devices=[8])) for took in (0.5, math.nan)]

    assert "only 64 was timed." in said[0].sentence
    assert "no step was timed." in said[1].sentence


def test_a_suggested_batch_size_that_is_no_doubling_is_in_the_table() -> None:
    p = timed(0.5, 0.5, 0.5)
    object.__setattr__(p, "decision", replace(p.decision, batch_size=300))

    lines = summary_of(p).lines

    assert [line.cells[0].text for line in lines] == ["64", "128", "300", "512"]
    assert lines[2].marks == ["suggested"]


def test_young_runs_and_runs_under_way_say_so_first() -> None:
    young = predict(history(rows=3, noise_scale=1.0)).decision
    warm_up = history(noise_scale=1.0, learning_rate=np.linspace(0.0, 1.0, 40))
    after = history(noise_scale=1.0, learning_rate=np.minimum(np.linspace(0.0, 4.0, 40), 1.0))
    planned, long = (History.from_columns(history(noise_scale=1.0)) for _ in range(2))
    planned.planned_steps, long.planned_steps = 25_000, 15_000
    now = replace(predict(history()), under_way=True).decision

    assert young.verdict == "keep_or_smaller"
    assert young.headline.startswith("So far, after 150 steps: not too small")
    rising, begun = predict(warm_up).decision, predict(planned).decision
    assert rising.headline.startswith("So far, after 2,000 steps (in warm-up): not too small")
    assert begun.headline.startswith("So far, after 2,000 steps (of 25,000): not too small")
    assert predict(after).decision.verdict == predict(long).decision.verdict == "smaller"
    assert now.headline == "So far, after 2,000 steps: keep 64."


def test_batch_sizes_and_devices_of_the_run_are_named() -> None:
    sizes = np.repeat([16.0, 112.0], 20)
    changed = predict(history(devices=1, batch_size=sizes, examples=np.cumsum(50 * sizes)))
    fell = history(noise_scale=300.0, learning_rate=np.linspace(1.0, 0.0, 40))

    reason = changed.decision.reason
    assert reason.startswith("You trained at batch sizes from 16 to 112, last at 112. ")
    assert changed.recommended_batch_size == 112
    sizes[-1] = 40.0  # the last batch of an epoch
    rest = predict(history(devices=1, batch_size=sizes, examples=np.cumsum(50 * sizes)))
    assert rest.recommended_batch_size == 112
    assert "at batch size 64 on 4 devices." in predict(history(devices=4)).decision.reason
    assert (
        "measured over steps 50 to 2,000, while the learning rate fell."
        in predict(fell).decision.reason
    )


def test_what_resolves_it_is_the_next_step(tmp_path: Path) -> None:
    """A checkpoint in the run's folder is measured; without one a second run is trained."""
    p = predict(history(unresolved=40))
    p.history.source = tmp_path
    second = p.decision.next
    assert second[0].endswith(f"noisescale predict {tmp_path} --second-run RUN2")
    assert second[1].endswith(f"noisescale profile train.py:make --run {tmp_path}")

    (tmp_path / "checkpoints").mkdir()
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint.touch()
    first = replace(p).decision.next[0]

    # a hundred batches for each of the noise scale's, at 80 and 64, of half a second
    assert "(about 60 s)" in first
    assert first.endswith(f"noisescale measure train.py:make --checkpoint {checkpoint}")


@pytest.mark.parametrize("logs", ["", "runs/a"])
def test_a_checkpoint_of_the_trainer_is_measured_if_it_has_all_weights(
    logs: str, tmp_path: Path
) -> None:
    """The record is beside the checkpoints, or in TensorBoard's folder."""
    p = predict(history(unresolved=40))
    p.history.source = tmp_path / logs
    for step, weights in enumerate(("model-00001-of-00002.safetensors", "adapter_model.bin")):
        (folder := tmp_path / f"checkpoint-{step}").mkdir()
        (folder / "trainer_state.json").touch()
        (folder / weights).touch()
        os.utime(folder, (step, step))

    command = f"noisescale measure train.py:make --checkpoint {tmp_path / 'checkpoint-0'}"
    into = f" --run {tmp_path / logs}" if logs else ""
    assert p.decision.next[0].endswith(command + into)
    p.history.source = tmp_path / "checkpoint-0"
    assert replace(p).decision.next[0].endswith(command)


@pytest.mark.parametrize("why", ["fell", "one-sided", "measured"])
def test_a_checkpoint_that_would_not_decide_is_not_measured(why: str, tmp_path: Path) -> None:
    rate = np.linspace(1.0, 0.0 if why == "fell" else 1.0, 40)
    columns = {} if why == "one-sided" else {"unresolved": 40}
    p = predict(history(high=900, noise_scale=200.0, learning_rate=rate, **columns))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    p.history.source = tmp_path
    if why == "measured":  # from 0.4 to 4,000
        p.history.looks = (Look(20.0, 40.0, 0.4, 4e3, 0.95, "examples", 30, "a.ckpt", 7, 1.0),)

    found = p.decision

    assert found.verdict in ("unknown", "keep_or_larger")
    assert found.next[0].endswith(f"noisescale predict {tmp_path} --second-run RUN2")


@pytest.mark.parametrize(("noise_scale", "size"), [(300.0, 128), (3.0, 16)])
def test_a_new_batch_size_has_its_learning_rate_next(noise_scale: float, size: int) -> None:
    found = predict(history(noise_scale=noise_scale)).decision.next

    of = f"--batch-size {size} --from-batch-size 64 --noise-scale {noise_scale:g}"
    assert found[0].endswith(f"noisescale rescale {of}")


def test_an_untried_optimizer_is_told_by_a_second_run() -> None:
    other = OptimizerMix(OptimizerKind.OTHER)
    found = predict(History.from_columns(history(high=900, noise_scale=200.0), optimizer=other))

    assert found.decision.verdict == "keep_or_larger"
    assert "--second-run" in found.decision.next[0]


def test_of_several_optimizers_the_one_that_allows_least_comes_first(tmp_path: Path) -> None:
    """As of a GAN. Of a third one nothing was measured."""
    log_run(tmp_path, noise_scale=300.0)
    log_run(tmp_path, noise_scale=30.0, optimizer=1)

    p = predict(tmp_path, batch_sizes=iter([64, 128]))

    assert [*p.decisions] == [0, 1]
    assert p.decision.headline.startswith("Optimizer 1 allows least. ")
    others = {one.label: one.sentence for one in p.document().answers}
    assert others["Optimizer 0"] == predict(tmp_path, optimizer=0).decision.headline
    assert [*p.to_dict()["decisions"]] == ["0", "1"]
    assert predict(tmp_path, optimizer=1).decision.headline == (
        p.decision.headline.removeprefix("Optimizer 1 allows least. ")
    )
    alone = predict(history())
    assert alone.decisions == {0: alone.decision}


def test_an_optimizer_that_is_withheld_does_not_hide_the_other(tmp_path: Path) -> None:
    withheld = History.from_columns(history())
    withheld.withhold("Rows are alike.")
    Recorder(tmp_path).end(withheld)
    log_run(tmp_path, noise_scale=300.0, optimizer=1)

    p = predict(tmp_path)

    assert "Rows are alike." in str(p.decisions[0])
    assert p.decision.headline.startswith("Optimizer 1 allows least. ")
    assert p.document().answers[0].label == "Optimizer 0"
