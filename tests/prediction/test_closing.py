# SPDX-License-Identifier: Apache-2.0
"""What a training ends with."""

from pathlib import Path

from reported_runs import history

from noisescale import History
from noisescale.prediction.closing import closing_lines


def test_the_verdict_stands_before_the_command_that_runs_as_pasted() -> None:
    run = History.from_columns(history(noise_scale=300.0))

    assert closing_lines([run], Path("my logs")).splitlines() == [
        "Larger saves steps: up to 128 at little cost.",
        "Next: noisescale predict 'my logs'",
    ]


def test_of_several_optimizers_each_has_a_line_and_what_is_not_known_has_its_reason() -> None:
    kept, withheld, refused = (History.from_columns(history()) for _ in range(3))
    withheld.withhold("Rows are alike.")
    refused.why_nothing = "BatchNorm couples the rows."

    first, second, third, fourth, _ = closing_lines(
        [kept, withheld, refused, History()], Path("a")
    ).splitlines()

    assert first == "Optimizer 0: Keep 64."
    assert second == "Optimizer 1: Not known. Rows are alike."
    assert third == "Optimizer 2: Not measured. BatchNorm couples the rows."
    assert fourth.startswith("Optimizer 3: Not known. ")


def test_without_a_record_the_callback_itself_is_asked() -> None:
    run = History.from_columns(history())

    said = closing_lines([run], None, host="NoiseScaleMonitor")

    assert said.splitlines() == [
        "Keep 64.",
        "Next: print(noisescale.predict(x).to_text()), where x is this NoiseScaleMonitor: no logger"
        " kept a record",
    ]


def test_where_no_answer_is_known_no_command_is_named_that_would_fail() -> None:
    refused = History()
    refused.why_nothing = "BatchNorm couples the rows. Accumulate."

    said = closing_lines([refused], Path("a"))

    assert said == "Not measured. BatchNorm couples the rows. Accumulate."
    assert not closing_lines([History()], None)
