# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, by the fields of its document."""

import math

import pytest
from reported_runs import history

from noisescale import History
from noisescale.history.optimizers import OptimizerKind
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.predict import Prediction, predict
from noisescale.report.document import Statement


def priced() -> Prediction:
    columns = history(rows=400, noise_scale=900.0, batch_size=512.0, seconds=40.0)
    return predict(columns, price_per_device_hour=2.5, hour_worth=10.0)


def statements(p: Prediction) -> dict[str, Statement]:
    return {one.label: one for one in p.document().answers}


def test_the_first_statements_answer_what_how_sure_and_what_more_devices_buy() -> None:
    found = statements(predict(history(seconds=math.nan), [64, 128]))

    # (1 + 100/128)/(1 + 100/64) and, at the ends, with 80 and 125
    than_this = "0.70 (0.67 to 0.72) x the steps and 1.4 (1.3 to 1.4) x the examples of this run"
    assert [*found] == ["On these 2 devices", "More devices", "Critical batch size"]
    here, more, critical = found.values()
    both = "a batch of 128 examples (2 micro-batches of 32 on each device) is the best"
    assert here.sentence == f"{both}: {than_this}"
    four = "up to 4 pay off, with a batch of 128 examples (32 on each device)"
    assert more.sentence == f"{four}: {than_this}"
    assert critical.sentence == "100 examples (95 % interval 80.0 to 125)"
    assert [part.label for part in critical.parts] == ["theory"]


def test_a_statement_has_the_number_that_it_is_about_and_what_it_rests_on() -> None:
    p = predict(history(noise_scale=3.0))

    found = statements(p)

    critical = found["Critical batch size"]
    assert (critical.bounds, critical.basis) == (p.critical_batch_size, "measured")
    assert found["Twice the devices"].basis == "assumed"
    assert statements(predict(history(), [64], [2]))["On these 2 devices"].basis == "timed"


def test_the_headline_is_what_is_recommended() -> None:
    resolved, open_ended = predict(history(), [64, 128]), predict(history(unresolved=40))

    assert resolved.document().headline == "Batch size 64 is recommended for this run"
    assert open_ended.document().headline == "Batch size 64 or more is recommended for this run"


def test_twice_the_devices_have_a_line_where_no_other_line_is_theirs() -> None:
    found = statements(predict(history(noise_scale=3.0)))

    assert found["More devices"].sentence.startswith("do not pay off")
    twice = "4 devices, a batch of 128 examples (32 on each device): "
    assert found["Twice the devices"].sentence.startswith(twice)


def test_with_prices_the_first_lines_are_of_the_own_devices_and_then_of_the_cheapest() -> None:
    p = priced()

    found = statements(p)

    assert p.recommended.devices > p.own_devices
    own, best = p.best_for(p.own_devices), p.recommended
    assert [*found][:2] == ["On these 2 devices", "Cheapest with waiting"]
    here = found["On these 2 devices"].sentence
    assert here.startswith(f"a batch of {own.batch_size:,.0f} examples")
    cheapest = f"{best.devices} devices, a batch of {best.batch_size:,.0f} examples"
    assert found["Cheapest with waiting"].sentence.startswith(cheapest)


def test_what_is_not_resolved_recommends_no_smaller_batch_and_no_number_of_devices() -> None:
    """At least 20: at that bound 16 would be faster than 64."""
    p = predict(history(unresolved=40, noise_scale=25.0))

    found = statements(p)

    assert p.recommended.batch_size >= 64
    assert "examples" in found["On these 2 devices"].sentence
    if more := found.get("More devices"):
        assert "may or may not pay off" in more.sentence


def test_where_the_own_devices_cost_least_they_have_one_line() -> None:
    patient = predict(history(), [64, 128], price_per_device_hour=2.5, hour_worth=0.01)

    assert patient.recommended.devices == patient.own_devices
    cheapest = statements(patient)["Cheapest with waiting"]
    assert cheapest.sentence == "the same, on these 2 devices"


def test_what_is_not_resolved_has_its_bounds() -> None:
    p = predict(history(unresolved=40, seconds=math.nan))

    found, (sizes, *_) = statements(p), p.document().tables

    here = "a batch of 64 or more examples (32 on each device) is the best: as in this run"
    assert found["On these 2 devices"].sentence == here
    assert found["Critical batch size"].sentence == "at least 80.0 examples, not resolved"
    (own,) = [line for line in sizes.lines if line.marks]
    assert own.marks == ["this run", "recommended"]
    assert [cell.text for cell in own.cells] == ["64", "2,000", "128,000"]
    # At 128: S_min + E_min/128 from 80, and half of the run's steps from infinity.
    (double,) = [line for line in sizes.lines if line.cells[0].text == "128"]
    assert double.cells[1].text == "1,000–1,440"
    assert "nan" not in p.to_text(details=True).lower()


def test_tables_say_what_each_row_takes() -> None:
    sizes, devices = predict(history(), [64, 128], [2, 4]).document().tables

    assert sizes.title == "On the run's own 2 devices"
    # 2,000 steps of half a second on two devices.
    assert [cell.text for cell in sizes.lines[0].cells] == [
        "64",
        "2,000",
        "128,000",
        "16.7",
        "33.3",
    ]
    assert devices.title == "More devices, at the best batch size of each"
    assert devices.lines[1].cells[2].text.endswith("x 4")


def test_columns_without_data_are_left_out() -> None:
    untimed = predict(history(seconds=math.nan)).document().tables[0]

    assert untimed.headings == ["batch size", "steps", "examples"]
    assert "cost" in priced().document().tables[0].headings


def test_extrapolated_rows_are_starred_and_explained() -> None:
    far = predict(history(), [64, 1024]).document().tables[0]
    near = predict(history(), [64], [2]).document().tables[0]

    assert [line.cells[0].text for line in far.lines] == ["64", "1,024*"]
    assert far.notes[-1].startswith("* extrapolated: the batch size is far from the run's")
    assert not near.notes


def test_doubts_and_assumptions_are_those_of_the_record() -> None:
    p = predict(history(unresolved=40), calibration=Calibration.from_number(2.0))

    said = p.document()

    assert (said.doubts, said.assumptions) == (p.warnings, p.assumptions)
    assert any(doubt.startswith("The noise scale was not resolved") for doubt in said.doubts)


def test_answers_are_at_most_twelve_lines() -> None:
    adam = History.from_columns(dict(history()), optimizer=OptimizerKind.ADAM)

    assert predict(adam).to_text(100).count("\n") <= 12


@pytest.mark.parametrize("unit", ["[bold]tokens[/]", "\x1b[31m"])
def test_units_are_text(unit: str) -> None:
    text = predict(history(), unit=unit).to_text(120)

    assert f"64 {unit} (32 on each device)".replace("\x1b", "\\x1b") in text


def test_in_a_line_a_prediction_says_what_it_recommends() -> None:
    said = repr(predict(history(), [64, 128], [2]))

    assert said == (
        "<Prediction: recommended batch size 64, critical batch size 100 (80.0 to 125), 2 rows>"
    )
