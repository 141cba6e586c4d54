# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, by the fields of its document."""

import math
from dataclasses import replace

import pytest
from reported_runs import history

from noisescale import History
from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.predict import Prediction, predict
from noisescale.prediction.statements import verdict_on
from noisescale.report.document import Statement
from noisescale.step_time import StepTiming, fit_step_time
from noisescale.step_time.device_times import LoaderTiming


def priced() -> Prediction:
    columns = history(rows=400, noise_scale=900.0, batch_size=512.0, seconds=40.0)
    return predict(columns, price_per_device_hour=2.5, hour_worth=10.0)


def statements(p: Prediction) -> dict[str, Statement]:
    return {one.label: one for one in p.document().answers}


def test_the_statements_answer_time_devices_and_how_sure() -> None:
    found = statements(predict(history(seconds=math.nan), [64, 128]))

    assert [*found] == [
        *("Time", "More devices", "Noise scale now", "Critical batch size", "How sure"),
        "Holds for",
    ]
    assert found["Time"].sentence.startswith("unknown at other batch sizes: no step was timed")
    # (1 + 100/128)/(1 + 100/64) and, at the ends, with 80 and 125
    assert found["More devices"].sentence == (
        "4 devices with 32 each, a batch of 128: 0.70 (0.67 to 0.72) x the steps and"
        " 1.4 (1.3 to 1.4) x the examples. The time is unknown: no step on so many devices was"
        " timed"
    )
    critical = found["Critical batch size"].sentence
    assert critical == "100 examples (95 % interval 80.0 to 125), of the whole run"
    assert found["Noise scale now"].sentence == "100 examples (95 % interval 80.0 to 125)"


def test_a_statement_has_its_number_a_verdict_and_what_it_rests_on() -> None:
    p = predict(history(noise_scale=3.0))

    found = statements(p)

    critical = found["Critical batch size"]
    assert (critical.bounds, critical.basis) == (p.critical_batch_size, "measured")
    more = found["More devices"]
    assert (more.verdict, more.basis) == ("unknown", "assumed")
    assert found["Time"].verdict == "unknown"


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Bounded(0.65, 0.51, 0.9), "yes"),
        (Bounded(0.65, 0.51, 1.1), "probably"),
        (Bounded(1.02, 0.9, 1.1), "unknown"),
        (Bounded(math.nan, 0.5, 1.4), "unknown"),
    ],
)
def test_no_verdict_that_its_bounds_deny(ratio: Bounded, verdict: str) -> None:
    assert verdict_on(ratio) == verdict


def timed_at(*sizes: int, each: float) -> Prediction:
    """A run on one device, with times of so many seconds for an example, and a little more."""
    timings = [StepTiming(size, 1, 1, 1, 0.002 + each * size) for size in sizes]
    return predict(history(devices=1), step_times=fit_step_time(timings))


def test_the_fastest_of_the_timed_batch_sizes_is_named() -> None:
    found = statements(timed_at(32, 64, 128, 256, each=1e-6))["Time"]

    assert found.basis == "timed"
    assert found.verdict == "yes"
    assert found.sentence.startswith("on this device 256 is the fastest of 32, 64, 128, 256")
    own = statements(timed_at(32, 64, 128, 256, each=1.0))["Time"]
    assert own.sentence.startswith("on this device 32 is")


def test_more_devices_that_were_timed_have_their_time_and_a_verdict() -> None:
    timings = [StepTiming(32, 1, n, 1, 0.5 + n / 1000) for n in (2, 4, 8, 16)]
    slow = [StepTiming(32, 1, n, 1, 0.2 * n) for n in (2, 4, 8, 16)]

    fast, dear = (
        statements(predict(history(noise_scale=300.0), step_times=fit_step_time(times)))
        for times in (timings, slow)
    )

    more = fast["More devices"]
    assert (more.verdict, more.basis) == ("yes", "timed")
    assert more.sentence.startswith("8 devices with 32 each, a batch of 256: 0.")
    assert more.sentence.endswith(" x the device-time, as timed")
    assert dear["More devices"].verdict == "yes"
    assert ": slower, 1.5 (1.4 to 1.7) x the time" in dear["More devices"].sentence


def test_a_loader_that_bounds_the_training_is_the_first_answer() -> None:
    p = predict(history())
    slow, fast = (LoaderTiming(64, seconds, 0.012, 2) for seconds in (0.031, 0.002))

    first, without = (
        replace(p, hardware=replace(p.hardware, loader=loader)).document().answers[0]
        for loader in (slow, fast)
    )

    assert (first.label, first.verdict, first.basis) == ("Data loader", "yes", "timed")
    assert first.sentence == (
        "bounds this training: 31.0 ms a batch, 12.0 ms a step without waiting. A larger batch"
        " saves no time until the loader is faster (`num_workers`, now 2)"
    )
    assert without.label == "Time"


def test_what_fits_in_memory_is_said_where_it_was_recorded() -> None:
    p = predict(history())
    fits = replace(p, hardware=replace(p.hardware, largest_fitting=Bounded(180.0, 90.0, 400.0)))

    assert "a device takes about 180 (90 to 400) examples" in statements(fits)["Time"].sentence


def test_more_devices_go_up_to_the_critical_batch_size() -> None:
    """On 2 devices of 32 each; B_crit = 300 lies between 8 and 16 devices."""
    few, many = (statements(predict(history(noise_scale=b))) for b in (3.0, 300.0))

    assert few["More devices"].sentence.startswith("4 devices with 32 each, a batch of 128:")
    assert many["More devices"].sentence.startswith("8 devices with 32 each, a batch of 256:")


def test_with_prices_the_cheapest_row_has_a_line() -> None:
    p = priced()

    found = statements(p)["Cheapest with waiting"]

    best = p.recommended
    assert best.devices > p.own_devices
    where = f"{best.batch_size:,.0f} on {best.devices} devices: "
    assert found.sentence.startswith(where)
    assert found.sentence.endswith(" of this run. The step time is assumed")
    assert (found.verdict, found.basis) == ("unknown", "assumed")


def test_what_is_not_resolved_recommends_no_smaller_batch() -> None:
    """At least 20: at that bound 16 would take fewer examples than 64."""
    p = predict(history(unresolved=40, noise_scale=25.0))

    assert p.recommended.batch_size == 64
    assert "This run cannot say whether a larger batch" in p.document().headline


def test_what_is_not_resolved_has_its_bounds() -> None:
    p = predict(history(unresolved=40, seconds=math.nan))

    said = p.document()

    found = statements(p)["Critical batch size"].sentence
    assert found == "at least 80.0 examples, not resolved, of the whole run"
    assert said.summary is not None
    own, double, *_ = said.summary.lines
    assert own.marks == ["this run"]
    assert [cell.text for cell in own.cells] == ["64", "2,000", "128k", "not timed"]
    # Between perfect scaling and the ratio at 80.
    assert double.cells[1].text == "0.50–0.72 x"
    assert "nan" not in p.to_text(details=True).lower()


@pytest.mark.parametrize(
    ("noise_scale", "sizes"),
    [
        (3.0, ["8", "16", "32", "64", "128"]),
        (100.0, ["32", "64", "128"]),
        (300.0, ["64", "128", "256"]),
        (3000.0, ["64", "128", "512"]),
    ],
)
def test_the_summary_has_three_to_five_batch_sizes(noise_scale: float, sizes: list[str]) -> None:
    summary = predict(history(noise_scale=noise_scale)).document().summary

    assert summary is not None
    assert [line.cells[0].text for line in summary.lines] == sizes


def test_tables_say_what_each_row_takes() -> None:
    p = predict(history(), [64, 128], [2, 4], price_per_device_hour=1.8)
    sizes, devices = p.document().tables

    assert sizes.title == "On the run's own 2 devices"
    # 2,000 steps of half a second on two devices.
    assert [cell.text for cell in sizes.lines[0].cells] == [
        *("64", "2,000", "128,000", "16.7", "33.3", "1.00", "timed"),
    ]
    assert devices.title == "More devices, at the best batch size of each"
    assert devices.lines[1].cells[2].text.endswith("x 4")


def test_columns_without_data_are_left_out() -> None:
    untimed = predict(history(seconds=math.nan)).document().tables[0]

    assert untimed.headings == ["batch size", "steps", "examples"]
    assert "cost" in priced().document().tables[0].headings


def test_rows_far_off_are_starred_and_explained() -> None:
    far = predict(history(), [64, 1024]).document().tables[0]
    near = predict(history(), [64], [2]).document().tables[0]

    assert [line.cells[0].text for line in far.lines] == ["64", "1,024*"]
    assert far.notes[-1] == "* extrapolated: the batch size is far from the run's."
    assert not near.notes


def test_hours_that_were_not_timed_are_called_assumed() -> None:
    """Own steps were timed. Without prices no others are shown."""
    untold = predict(history(), [64, 128]).document().tables[0]
    priced = predict(history(), [64, 128], [2], price_per_device_hour=1.0).document().tables[0]

    assert untold.headings == ["batch size", "steps", "examples"]
    assert priced.headings[-1] == "step time"


def test_doubts_and_assumptions_are_those_of_the_record() -> None:
    p = predict(history(unresolved=40), calibration=Calibration.from_number(2.0))

    said = p.document()

    assert (said.doubts, said.assumptions) == (p.warnings, p.assumptions)
    assert said.doubts[0].startswith("The critical batch size of the whole run is not resolved")
    assert not any("train longer" in doubt.lower() for doubt in said.doubts)


def test_answers_fit_a_screen() -> None:
    adam = History.from_columns(dict(history()), optimizer=OptimizerMix(OptimizerKind.ADAM))

    assert predict(adam).to_text(100).count("\n") <= 24


def test_a_hybrid_is_named_with_both_its_kinds() -> None:
    mix = OptimizerMix(OptimizerKind.MOMENTUM, OptimizerKind.ADAM, 0.625)
    p = predict(History.from_columns(dict(history()), optimizer=mix))

    said = " ".join(p.to_text(details=True).split())

    assert "SGD with momentum on 62 % of the parameters and Adam and its variants on others" in said
    assert "by 21 runs of 3 models and 27 runs of 5 models" in said
    run = p.to_dict()["run"]
    assert (run["optimizer"], run["optimizer_beside"], run["optimizer_share"]) == (
        "momentum",
        "adam",
        0.625,
    )


@pytest.mark.parametrize("unit", ["[bold]tokens[/]", "\x1b[31m"])
def test_units_are_text(unit: str) -> None:
    text = predict(history(), unit=unit).to_text(120)

    assert f"100 {unit} (95 % interval".replace("\x1b", "\\x1b") in text


def test_in_a_line_a_prediction_says_where_its_batch_size_stands() -> None:
    said = repr(predict(history(), [64, 128], [2]))

    assert said == (
        "<Prediction: batch size 64, near the critical batch size 100 (80.0 to 125), 2 rows>"
    )


@pytest.mark.parametrize(("scatter", "verdict"), [(1.001, "yes"), (2.0, "probably")])
def test_the_runs_own_batch_size_is_the_fastest_as_surely_as_the_bounds_say(
    scatter: float, verdict: str
) -> None:
    timings = [
        StepTiming(size, 1, 1, 1, size * factor / 1000)
        for size in (64, 128, 256)
        for factor in (scatter, 1 / scatter)
    ]

    found = statements(predict(history(devices=1), step_times=fit_step_time(timings)))["Time"]

    how = "is" if verdict == "yes" else "is probably"
    assert found.sentence.startswith(f"on this device the run's own batch size, 64, {how} the fast")
    assert found.verdict == verdict
