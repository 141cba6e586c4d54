# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, by the fields of its document, and its first sentences in each case."""

import math
from dataclasses import replace

import pytest
from reported_runs import history

from noisescale import History, Prediction, predict
from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.statements import verdict_on
from noisescale.report.document import Statement
from noisescale.step_time import StepTiming, fit_step_time
from noisescale.step_time.device_times import LoaderTiming


def statements(p: Prediction) -> dict[str, Statement]:
    return {one.label: one for one in p.document().answers}


@pytest.mark.parametrize(("low", "high", "far"), [(0.5, 5e3, False), (900.0, math.inf, True)])
def test_a_lower_bound_far_below_the_batch_size_is_not_called_a_size(
    low: float, high: float, far: bool
) -> None:
    p = predict(history(noise_scale=math.nan, low=low, high=high), [64])

    assert not p.resolved
    assert any("size, at least 900 examples, is more than 8 times" in s for s in p.warnings) == far
    assert far or not any("8 times" in warning for warning in p.warnings)


def timed(*timings: StepTiming, **run: float) -> dict[str, Statement]:
    """Of a run with these step times."""
    return statements(predict(history(**run), step_times=fit_step_time(timings)))


def test_the_statements_answer_time_devices_and_how_sure() -> None:
    p = predict(history(seconds=math.nan), [64, 128])

    found = statements(p)

    assert [*found] == [
        *("Time", "More devices", "Noise scale now", "Critical batch size", "How sure"),
        "Valid for",
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
    assert found.startswith("at least 80.0 examples, only a lower bound yet")
    assert said.summary is not None
    half, own, double = said.summary.lines
    assert own.marks == ["this run"]
    assert [cell.text for cell in own.cells] == ["64", "2,000", "128k", "not timed"]
    # Between perfect scaling and the ratio at 80.
    assert double.cells[1].text == "0.50 to 0.72 x"
    assert half.cells[2].text == "0.78 to 1.0 x"
    assert "nan" not in p.to_text(details=True).lower()


@pytest.mark.parametrize(
    ("noise_scale", "sizes"),
    [(3.0, "16 32 64 128"), (100.0, "32 64 128"), (300.0, "64 128 256"), (3000.0, "64 128 512")],
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

    assert p.to_text(100).count("\n") <= 31  # with a next step, and the line for a model card
    assert "SGD with momentum on 62 %" in " ".join(p.to_text(details=True).split())
    run = p.to_dict()["run"]
    kinds = (run["optimizer"], run["optimizer_beside"], run["optimizer_share"])
    assert kinds == ("momentum", "adam", 0.625)


def test_in_a_line_a_prediction_says_where_its_batch_size_stands() -> None:
    said = repr(predict(history(), [64, 128], [2]))

    assert "batch size 64, keep; " in said
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


def test_steps_and_batch_sizes_are_whole_numbers() -> None:
    """A run to a goal ends between two rows; a batch of tokens is a mean."""
    steps = {"rows": 40, "every": 2.405, "measured_steps": 10.4, "measuring_cost": 1.0}
    p = predict(history(**steps, batch_size=66.35, noise_scale=600.4))

    assert p.decision.headline.startswith("So far, after 96 steps")
    assert "; 10 of 96 steps were measured" in statements(p)["Noise scale now"].sentence
    table = p.document().summary
    assert table is not None
    assert [line.cells[0].text for line in table.lines] == ["66", "132", "265"]
    assert table.lines[0].cells[1].text == "96"
    detail = [line.cells[1] for line in p.document().tables[0].lines]
    assert not [cell for cell in detail if "." in cell.text + cell.bounds]
    (far,) = (doubt for doubt in p.warnings if doubt.startswith("The critical batch size"))
    assert "The critical batch size, 600 examples, is" in far


def test_the_page_the_text_and_the_notebook_begin_with_the_decision() -> None:
    p = predict(history(noise_scale=300.0))
    document, decision = p.document(), p.decision

    assert document.headline == decision.headline == "Larger saves steps: up to 128 at little cost."
    assert (document.lead, document.next) == (decision.reason, decision.next)
    assert document.title == "Larger saves steps: up to 128 at little cost - noisescale"
    assert p.to_text(400).splitlines()[:2] == [document.headline, document.lead]
    assert p._repr_html_().startswith(f"<p><b>{document.headline}</b></p>")
    assert document.summary is not None
    suggested = [line for line in document.summary.lines if "suggested" in line.marks]
    assert [line.cells[0].text for line in suggested] == ["128"]
    assert replace(p, under_way=True).document().status == "under way"
