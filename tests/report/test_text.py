# SPDX-License-Identifier: Apache-2.0
import io
import math
import re

import pytest
from reported_runs import history
from rich.console import Console

from noisescale import History
from noisescale.history.optimizers import OptimizerKind
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.predict import Prediction, predict
from noisescale.report.document import headline
from noisescale.report.numbers import bounds, number
from noisescale.report.text import as_text, fit_as_text, listed, print_report
from noisescale.tradeoff.fit import fit_tradeoff


def priced() -> Prediction:
    """Everything that widens a table: money, large numbers, bounds, marks."""
    columns = history(rows=400, noise_scale=900.0, batch_size=512.0, seconds=40.0)
    return predict(columns, price_per_device_hour=2.5, hour_worth=10.0)


def test_the_first_lines_answer_what_how_sure_and_what_twice_the_devices_buy() -> None:
    lines = as_text(predict(history(seconds=math.nan), [64, 128]), 120).splitlines()

    # (1 + 100/128)/(1 + 100/64) and, at the ends, with 80 and 125
    than_this = "0.70 (0.67 to 0.72) x the steps and 1.4 (1.3 to 1.4) x the examples of this run"
    both = "a batch of 128 examples (2 micro-batches of 32 on each device) is the best"
    said = " ".join(" ".join(lines[: lines.index("")]).split())
    assert said == " ".join(
        [
            f"On these 2 devices {both}: {than_this}",
            "More devices up to 4 pay off, with a batch of 128 examples (32 on each device):",
            than_this,
            "Critical batch size 100 examples (95 % interval 80.0 to 125)",
            "theory has an error that depends on the optimizer, which was not recorded",
        ]
    )


def test_twice_the_devices_have_a_line_where_no_other_line_is_theirs() -> None:
    lines = dict(headline(predict(history(noise_scale=3.0))))

    assert lines["More devices"].startswith("do not pay off")
    twice = "4 devices, a batch of 128 examples (32 on each device): "
    assert lines["Twice the devices"].startswith(twice)


def test_without_details_the_answers_and_the_warnings_are_left() -> None:
    p = predict(history(unresolved=40))

    short, whole = as_text(p, 100, details=False), as_text(p, 100)

    answers = whole.split("\n\n")[0]
    assert short.startswith(answers)
    assert short.removeprefix(answers).startswith("\n\nWarnings\n ! ")
    for warning in p.warnings:
        assert warning in " ".join(short.split())
    assert "Assumptions" not in short
    assert "On the run's own" not in short


def test_the_text_is_returned_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = as_text(priced())

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)

    assert as_text(priced()) == expected


def test_answers_are_at_most_ten_lines() -> None:
    columns = history()
    adam = History.from_columns(dict(columns), optimizer=OptimizerKind.ADAM)

    assert as_text(predict(adam), 100, details=False).count("\n") <= 10


def test_who_reads_the_answers_is_shown_the_way_to_the_details() -> None:
    file = io.StringIO()
    p = predict(history())

    print_report(p, Console(file=file, width=100), details=False, more="add --details")

    *_, last = file.getvalue().splitlines()
    many = len(p.assumptions)
    assert last.rstrip() == f"Tables of batch sizes and devices, {many} assumptions: add --details"


def test_what_is_not_resolved_is_told_by_its_bounds() -> None:
    text = as_text(predict(history(unresolved=40, seconds=math.nan)), 120)

    assert "a batch of 64 or more examples (32 on each device) is the best: as in this run" in text
    assert "at least 80.0 examples, not resolved" in text
    assert "0.50 to 0.72 x the steps" in text
    # At 128: S_min + E_min/128 from 80, and half of the run's steps from infinity.
    assert "1,000–1,440" in text
    assert re.search(r"64 +2,000 +128,000\n +this run\n *recommended\n", text)
    assert "nan" not in text.lower()
    assert "inf" not in text.lower()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "p",
    [priced(), predict(history()), predict(history(unresolved=40))],
    ids=["priced", "timed", "open"],
)
def test_no_number_is_cut_off(p: Prediction, width: int) -> None:
    text = as_text(p, width)

    wide = as_text(p, 400)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    # Bounds may stand on two lines, numbers never.
    numbers = set(re.findall(r"\d[\d,.]*[kMBT]?", wide))
    assert set(re.findall(r"\d[\d,.]*[kMBT]?", text)) == numbers


def test_tables_say_what_each_row_takes() -> None:
    text = as_text(predict(history(), [64, 128], [2, 4]), 120)

    # 2,000 steps of half a second on two devices.
    assert re.search(r"\n +64 +2,000 +128,000 +16\.7 +33\.3\n *this run", text)
    assert "On the run's own 2 devices" in text
    assert "More devices, at the best batch size of each" in text
    assert "32 x 1 x 4" in text


def test_columns_without_data_are_left_out() -> None:
    text = as_text(predict(history(seconds=math.nan)), 120)

    assert not re.search("hours|minutes|cost", text.split("Assumptions")[0])
    assert "cost" in as_text(priced(), 120)


def test_extrapolated_rows_are_starred_and_explained() -> None:
    text = as_text(predict(history(), [64, 1024]), 100)

    assert re.search(r"\n +1,024\* ", text)
    assert "* extrapolated: the batch size is far from the run's" in text
    assert "*" not in as_text(predict(history(), [64, 128], [2]), 100)


def test_warnings_and_assumptions_follow() -> None:
    p = predict(history(unresolved=40), calibration=Calibration.given(2.0))

    text = " ".join(as_text(p, 100).split())

    for sentence in (*p.warnings, *p.assumptions):
        assert " ".join(sentence.split()) in text
    assert " ! The noise scale was not resolved" in text


def test_units_are_shown_as_they_are_written() -> None:
    text = as_text(predict(history(), unit="[bold]tokens[/]"), 120)

    assert "64 [bold]tokens[/] (32 on each device)" in text


def test_a_terminal_gets_the_same_words() -> None:
    file = io.StringIO()
    p = predict(history())

    print_report(p, Console(file=file, width=100, force_terminal=True, color_system="standard"))

    plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    assert [line.rstrip() for line in plain.splitlines()] == as_text(p, 100).splitlines()
    assert "\x1b[1m" in file.getvalue()


def test_a_width_that_holds_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`width` must be at least 40, got 20\. Pass 80\.$"):
        as_text(predict(history()), 20)


def test_a_fit_is_told_with_intervals_and_residuals() -> None:
    fit = fit_tradeoff([16, 32, 64, 128, 256], [720, 405, 242, 168, 131])

    text = fit_as_text(fit, "sweep.csv", 100, optimal_batch_size=16)

    for name, title, unit in (
        ("critical_batch_size", "Critical batch size  ", " examples"),
        ("min_steps", "Fewest steps         ", " steps"),
        ("min_examples", "Fewest examples      ", " examples"),
        ("sharpness", "Exponent of the law  ", ""),
    ):
        band = getattr(fit.regimes(), name)
        said = f"{number(band.value)}{unit} (95 % interval {bounds(band)})"
        assert title + said in text
    overhead = number(fit.overhead_batch_size(0.2, 16))
    assert f"{overhead} examples (relative to perfect scaling from 16, Zhang et al. 2024)" in text
    assert "Steps to the goal, sweep.csv" in text
    assert re.search(rf"\n +64 +242 +{fit.steps(64.0):.0f} +-1\.\d %\n", text)


def test_a_fit_of_two_points_says_what_is_open() -> None:
    text = fit_as_text(fit_tradeoff([16, 32], [720, 405]), "", 80)

    said = " ".join(text.split())
    assert "Critical batch size 112 examples (95 % interval at least " in said


def test_another_bend_than_the_theorys_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="bend more sharply"):
        fit = fit_tradeoff([16, 32, 64, 128, 256, 512, 1024], [1000, 510, 260, 220, 219, 218, 218])

    text = fit_as_text(fit, "", 80)

    assert " ! The steps bend more sharply than the law" in text


def test_with_prices_the_first_lines_are_of_the_own_devices_and_then_of_the_cheapest() -> None:
    p = priced()

    lines = dict(headline(p))

    assert p.recommended.devices > p.own_devices
    own = p.best_for(p.own_devices)
    assert list(lines)[:2] == ["On these 2 devices", "Cheapest with waiting"]
    assert lines["On these 2 devices"].startswith(f"a batch of {own.batch_size:,.0f} examples")
    best = p.recommended
    cheapest = f"{best.devices} devices, a batch of {best.batch_size:,.0f} examples"
    assert lines["Cheapest with waiting"].startswith(cheapest)


def test_what_is_not_resolved_recommends_no_smaller_batch_and_no_number_of_devices() -> None:
    """At least 20: at that bound 16 would be faster than 64."""
    p = predict(history(unresolved=40, noise_scale=25.0))

    lines = dict(headline(p))

    assert p.recommended.batch_size >= 64
    assert "examples" in lines["On these 2 devices"]
    assert "may or may not pay off" in lines.get("More devices", "may or may not pay off")


def test_where_the_own_devices_cost_least_they_are_not_told_twice() -> None:
    patient = predict(history(), [64, 128], price_per_device_hour=2.5, hour_worth=0.01)

    assert patient.recommended.devices == patient.own_devices
    assert dict(headline(patient))["Cheapest with waiting"] == "the same, on these 2 devices"


def test_a_path_longer_than_a_line_is_not_cut_off() -> None:
    path = "/trials/" + "learning_rate=0.1," * 8 + "output.txt"
    console = Console(width=40, file=io.StringIO())

    console.print(*listed("Warnings", [f"Failed: see {path}"], "! "))

    text = console.file.getvalue()  # type: ignore[attr-defined]  # of StringIO
    assert path in "".join(line.strip() for line in text.splitlines())
