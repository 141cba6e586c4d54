# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, by the fields of its document, and its first sentences in each case."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from reported_runs import history

from noisescale import History, Prediction, predict
from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.document import headline_of
from noisescale.prediction.position import Place, Position
from noisescale.prediction.statements import verdict_on
from noisescale.report.document import Statement
from noisescale.step_time import StepTiming, fit_step_time
from noisescale.step_time.device_times import LoaderTiming


def statements(p: Prediction) -> dict[str, Statement]:
    return {one.label: one for one in p.document().answers}


def timed(*timings: StepTiming, **run: float) -> dict[str, Statement]:
    """Of a run with these step times."""
    return statements(predict(history(**run), step_times=fit_step_time(timings)))


def test_the_statements_answer_time_devices_and_how_sure() -> None:
    p = predict(history(seconds=math.nan), [64, 128])

    found = statements(p)

    assert [*found] == [
        *("Time", "More devices", "Noise scale now", "Critical batch size", "How sure"),
        "Holds for",
    ]
    assert found["Time"].verdict == "unknown"
    critical, now = found["Critical batch size"], found["Noise scale now"]
    assert (critical.bounds, critical.basis) == (p.critical_batch_size, "measured")
    assert critical.sentence.startswith("100 examples (95 % interval 80.0 to 125)")
    assert now.sentence == "100 examples (95 % interval 80.0 to 125)"
    more = found["More devices"]
    assert (more.verdict, more.basis) == ("unknown", "assumed")
    # (1 + 100/128)/(1 + 100/64) and, at the ends, with 80 and 125
    assert more.sentence.startswith("4 devices with 32 each, a batch of 128: 0.70 (0.67 to 0.72) x")
    assert "1.4 (1.3 to 1.4) x the examples" in more.sentence


def test_no_verdict_that_its_bounds_deny() -> None:
    assert verdict_on(Bounded(0.65, 0.51, 0.9)) == "yes"
    assert verdict_on(Bounded(0.65, 0.51, 1.1)) == "probably"
    assert verdict_on(Bounded(1.02, 0.9, 1.1)) == "unknown"
    assert verdict_on(Bounded(math.nan, 0.5, 1.4)) == "unknown"


def test_the_fastest_of_the_timed_batch_sizes_is_named() -> None:
    """A run on one device, with times of so many seconds for an example, and a little more."""
    fast, slow = (
        timed(*(StepTiming(n, 1, 1, 1, 0.002 + each * n) for n in (32, 256)), devices=1)["Time"]
        for each in (1e-6, 1.0)
    )

    assert (fast.basis, fast.verdict) == ("timed", "yes")
    assert "256 is the fastest of" in fast.sentence
    assert "32 is" in slow.sentence


def test_more_devices_that_were_timed_have_their_time_and_a_verdict() -> None:
    more, slower = (
        timed(*(StepTiming(32, 1, n, 1, a + b * n) for n in (2, 4, 8, 16)), noise_scale=300.0)[
            "More devices"
        ]
        for a, b in ((0.5, 0.001), (0, 0.2))
    )

    assert (more.verdict, more.basis) == ("yes", "timed")
    assert more.sentence.startswith("8 devices with 32 each, a batch of 256: 0.")
    assert more.sentence.endswith("device-time, as timed")
    assert slower.verdict == "yes"
    assert "slower, 1.5 (1.4 to 1.7) x" in slower.sentence


def test_a_loader_that_bounds_the_training_is_the_first_answer() -> None:
    p = predict(history())

    first, without = (
        replace(p, hardware=replace(p.hardware, loader=LoaderTiming(64, seconds, 0.012, 2)))
        .document()
        .answers[0]
        for seconds in (0.031, 0.002)
    )

    assert (first.label, first.verdict, first.basis) == ("Data loader", "yes", "timed")
    for part in ("31.0 ms a batch", "12.0 ms a step", "`num_workers`, now 2"):
        assert part in first.sentence
    assert without.label == "Time"
    fits = replace(p, hardware=replace(p.hardware, largest_fitting=Bounded(180.0, 90.0, 400.0)))
    assert "180 (90 to 400) examples" in statements(fits)["Time"].sentence


@pytest.mark.parametrize(("noise_scale", "devices"), [(3.0, 4), (300.0, 8)])
def test_more_devices_go_up_to_the_critical_batch_size(noise_scale: float, devices: int) -> None:
    """On 2 devices of 32 each; B_crit = 300 lies between 8 and 16 devices."""
    found = statements(predict(history(noise_scale=noise_scale)))["More devices"]

    assert found.sentence.startswith(f"{devices} devices with 32 each")


def test_what_is_not_resolved_has_its_bounds() -> None:
    p = predict(history(unresolved=40, seconds=math.nan))

    said = p.document()

    found = statements(p)["Critical batch size"].sentence
    assert found.startswith("at least 80.0 examples, not resolved")
    assert said.summary is not None
    own, double, *_ = said.summary.lines
    assert own.marks == ["this run"]
    assert [cell.text for cell in own.cells] == ["64", "2,000", "128k", "not timed"]
    # Between perfect scaling and the ratio at 80.
    assert double.cells[1].text == "0.50–0.72 x"
    assert "nan" not in p.to_text(details=True).lower()
    # At least 20: at that bound 16 would take fewer examples than 64.
    assert predict(history(unresolved=40, noise_scale=25.0)).recommended.batch_size == 64


@pytest.mark.parametrize(
    ("noise_scale", "sizes"),
    [(3.0, "8 16 32 64 128"), (100.0, "32 64 128"), (300.0, "64 128 256"), (3000.0, "64 128 512")],
)
def test_the_summary_has_three_to_five_batch_sizes(noise_scale: float, sizes: str) -> None:
    summary = predict(history(noise_scale=noise_scale)).document().summary

    assert summary is not None
    assert " ".join(line.cells[0].text for line in summary.lines) == sizes


def test_tables_say_what_each_row_takes() -> None:
    p = predict(history(), [64, 128], [2, 4], price_per_device_hour=1.8)
    sizes, devices = p.document().tables

    assert sizes.title == "On the run's own 2 devices"
    # 2,000 steps of half a second on two devices.
    assert [cell.text for cell in sizes.lines[0].cells] == [
        *("64", "2,000", "128,000", "16.7", "33.3", "1.00", "timed")
    ]
    assert devices.title == "More devices, at the best batch size of each"
    assert devices.lines[1].cells[2].text.endswith("x 4")


def test_columns_without_data_are_left_out() -> None:
    """Own steps were timed, those of others not: without prices their hours are not shown."""
    untimed = predict(history(seconds=math.nan)).document().tables[0]
    untold = predict(history(), [64, 128]).document().tables[0]
    with_prices = predict(history(), [64, 128], [2], price_per_device_hour=1.0)

    assert untimed.headings == untold.headings == ["batch size", "steps", "examples"]
    table = with_prices.document().tables[0]
    assert "cost" in table.headings
    assert table.headings[-1] == "step time"
    best = [line.cells[0].text for line in table.lines if "recommended" in line.marks]
    assert best == [f"{with_prices.recommended_batch_size:.0f}"]
    far = predict(history(), [64, 1024]).document().tables[0]  # starred and explained
    assert [line.cells[0].text for line in far.lines] == ["64", "1,024*"]
    assert far.notes[-1].startswith("* extrapolated")
    near = predict(history(), [64, 128], [2]).document().tables[0]
    assert (near.lines[1].cells[0].text, near.notes) == ("128", [])  # its time is assumed


def test_doubts_and_assumptions_are_those_of_the_record() -> None:
    p = predict(history(unresolved=40), calibration=2.0)

    assert (p.document().doubts, p.document().assumptions) == (p.warnings, p.assumptions)


def test_answers_fit_a_screen_and_a_hybrid_is_named_with_both_its_kinds() -> None:
    mix = OptimizerMix(OptimizerKind.MOMENTUM, OptimizerKind.ADAM, 0.625)
    p = predict(History.from_columns(dict(history()), optimizer=mix))

    assert p.to_text(100).count("\n") <= 24
    assert "SGD with momentum on 62 %" in " ".join(p.to_text(details=True).split())
    run = p.to_dict()["run"]
    kinds = (run["optimizer"], run["optimizer_beside"], run["optimizer_share"])
    assert kinds == ("momentum", "adam", 0.625)


def test_in_a_line_a_prediction_says_where_its_batch_size_stands() -> None:
    said = repr(predict(history(), [64, 128], [2]))

    assert "batch size 64, near" in said
    assert "100 (80.0 to 125), 2 rows" in said


@pytest.mark.parametrize(("scatter", "verdict"), [(1.001, "yes"), (2.0, "probably")])
def test_the_runs_own_batch_size_is_the_fastest_as_surely_as_the_bounds_say(
    scatter: float, verdict: str
) -> None:
    factors = (scatter, 1 / scatter)
    timings = [StepTiming(n, 1, 1, 1, n * x / 1000) for n in (64, 256) for x in factors]

    found = timed(*timings, devices=1)["Time"]

    how = "is" if verdict == "yes" else "is probably"
    assert f"64, {how} the fast" in found.sentence
    assert found.verdict == verdict


def said(batch_size: float, *critical: float, at_end: bool = False, rough: bool = False) -> str:
    p = predict(history(batch_size=batch_size, devices=1, seconds=math.nan))
    where = Position(batch_size, Bounded(*critical), at_end, rough)
    with mock.patch.object(Prediction, "position", where):
        return headline_of(p)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("batch_size", "critical", "place", "parts"),
    [
        (20, (229, 94, 778), "below", ["Up to about 70 (43 to 180)", "about 230 (94 to 780)"]),
        (20, (60, 12, 300), "probably below", ["60 (12 to 300)", "about 36 (26 to 84)"]),
        (300, (340, 190, 590), "near", ["300, near", "23 % (17 to 31 %)", "27 % (19 to 33 %)"]),
        (300, (340, 140, 700), "near", []),  # bounds on both sides, the value close by
        (2048, (340, 190, 700), "above", ["batch of 680", "0.43 (0.39 to 0.50)", "1.3 (1.2 to"]),
        (600, (340, 140, 700), "probably above", ["340 (140 to 700)", "batch of 480"]),
        (64, (0, 0, 20), "above", ["64. A larger batch saves no steps"]),
        (64, (0, 0, 80), "probably above", ["probably saves no"]),
        (20, (229, 94, INF), "below", ["20. Larger batches save steps"]),  # no range without an end
        (20, (NAN, 102, INF), "below", ["at least up to 44", "cannot say", "at least 100"]),
        (64, (INF, 80, INF), "below", []),
        (128, (NAN, 102, INF), "unknown", []),
        (20, (NAN, 12, INF), "unknown", ["20. This run cannot say whether", "at least 12"]),
        (20, (NAN, 0, INF), "unknown", ["20. This run cannot say whether", "not resolved"]),
        (20, (NAN, 30, 300), "below", ["is 30 to 300, not resolved"]),
        (64, (NAN, 30, 300), "unknown", []),
    ],
)
def test_a_place_is_only_probable_where_the_bounds_deny_it_and_has_its_sentence(
    batch_size: float, critical: tuple[float, float, float], place: Place, parts: list[str]
) -> None:
    found = said(batch_size, *critical)

    assert Position(batch_size, Bounded(*critical), at_end=False, rough=False).place == place
    assert found.startswith(f"You train at batch size {batch_size:,}")
    assert [part for part in parts if part not in found] == []
    assert "unbounded" not in found


def test_resolved_at_the_end_alone_or_within_a_rough_range() -> None:
    below = said(20, 229, 94, 778, at_end=True)
    above = said(2048, 340, 190, 700, at_end=True)
    rough = said(64, 400, 80, 3000, rough=True)

    assert "At the end of this run, up to about 70" in below
    assert "340 (190 to 700) at the end" in above
    assert "A rough range: somewhere between 80 and 3,000" in rough


def test_an_untried_optimizer_has_a_rough_range_and_the_next_step_a_second_run() -> None:
    other = OptimizerMix(OptimizerKind.OTHER)
    document = predict(History.from_columns(history(high=160), optimizer=other)).document()

    assert "A rough range" in document.headline
    assert "--second-run" in document.next[0]


def test_batch_sizes_and_devices_of_the_run_are_named() -> None:
    sizes = np.repeat([16.0, 112.0], 20)
    changed = history(devices=1, batch_size=sizes, examples=np.cumsum(50 * sizes))

    of_changed = predict(changed).document().headline
    on_four = predict(history(devices=4)).document().headline
    asked = predict(history(devices=1), [512])  # for another one than its own

    assert of_changed.startswith("You trained at batch sizes from 16 to 112 (64 on average)")
    assert on_four.startswith("You train at batch size 64 on 4 devices")
    assert asked.document().headline.startswith("You train at batch size 64, ")
    assert asked.to_dict()["run"]["batch_size"] == 64


def test_a_batch_size_that_is_surely_faster_is_named_in_the_end() -> None:
    p = predict(history(devices=1), [64, 128, 256], [1])

    def timed(*seconds: float) -> str:
        rows = tuple(
            replace(row, basis="timed", seconds_per_step=Bounded(took, took, took))
            for row, took in zip(p.rows, seconds, strict=True)
        )
        return replace(p, rows=rows).document().headline

    # (1 + c/256)/(1 + c/64) x 0.56/0.5 at c = 100, 125 and 80
    assert timed(0.5, 0.52, 0.56).endswith(
        "256 is the fastest timed: 0.61 (0.56 to 0.65) x the time."
    )
    assert "fastest" not in timed(0.5, 1.0, 2.0)


def test_the_title_and_the_notebook_begin_with_it_and_a_run_under_way_says_so_first() -> None:
    p = predict(history())

    document, of_now = p.document(), replace(p, under_way=True).document()

    assert of_now.headline.startswith("After 2,000 steps, so far: You train at")
    assert of_now.status == "under way"
    assert document.title == "Batch size 64: what other batch sizes would save"
    assert p.to_text(400).startswith(document.headline)
    assert p._repr_html_().startswith(f"<p><b>{document.headline}</b></p>")
