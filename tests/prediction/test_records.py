# SPDX-License-Identifier: Apache-2.0
import json
import math
from typing import Any

import numpy as np
import pytest
from reported_runs import history

import noisescale
from noisescale import History
from noisescale.prediction.figures.noise_along_runs import noise_scale_figure
from noisescale.prediction.predict import predict


def strictly(text: str) -> Any:
    """Parse as RFC 8259 has it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("unresolved", [0, 10, 40])
def test_json_says_what_the_record_says(unresolved: int) -> None:
    p = predict(history(unresolved=unresolved, seconds=math.nan if unresolved else 0.5))

    record = strictly(p.to_json())
    said = record.pop("answer")
    assert record == p.to_dict()
    assert said == p.document().to_dict()


def test_keys_are_those_that_are_documented() -> None:
    record = predict(history(), [64, 128], price_per_device_hour=2.0).to_dict()

    assert list(record) == [
        *("version", "unit", "confidence", "resolved", "critical_batch_size"),
        *("critical_batch_size_by_noise_scale", "best_batch_size", "noise_scale_now"),
        *("levels", "decision", "decisions", "learning_rate", "recommended", "on_more_devices"),
        *("twice_the_devices", "rows", "tradeoff", "calibration", "second_run", "run"),
        *("step_time", "same_batch", "ramp", "model_card", "warnings", "assumptions"),
    ]
    assert list(record["rows"][0]) == [
        *("batch_size", "devices", "device_batch_size", "accumulation", "steps", "examples"),
        *("hours", "device_hours", "cost", "basis", "extrapolated"),
    ]
    assert record["version"] == noisescale.__version__
    assert record["critical_batch_size"] == pytest.approx({"value": 100, "low": 80, "high": 125})
    assert record["recommended"]["batch_size"] == record["decision"]["batch_size"] == 64
    assert record["run"] == pytest.approx(
        {"steps": 2000, "examples": 128_000, "batch_size": 64, "devices": 2, "hours": 1000 / 3600}
        | {"measured_steps": None, "measuring_share": None}
        | {"optimizer": None, "parameters": None}
    )
    least = 2000 / (1 + 100 / 64)
    assert record["tradeoff"] == pytest.approx(
        {"min_steps": least, "min_examples": 100 * least, "gamma": 1}
    )
    assert record["calibration"]["kappa"] == {"value": 1, "low": 1, "high": 1}


def test_time_is_never_steps_by_another_name() -> None:
    """Steps by the law at 64 and 128; a step's time on four devices is not known without times."""
    timed, untimed = (predict(history(seconds=seconds)).to_dict() for seconds in (0.5, math.nan))

    ratio = (1 + 100 / 128) / (1 + 100 / 64)
    for record, basis in ((timed, "assumed"), (untimed, None)):
        assert record["twice_the_devices"]["steps"]["value"] == pytest.approx(ratio)
        assert record["twice_the_devices"]["basis"] == basis
    assert untimed["twice_the_devices"]["time"] == {"value": None, "low": None, "high": None}
    assert timed["twice_the_devices"]["time"]["high"] > ratio
    assert (timed["step_time"]["known"], untimed["step_time"]["known"]) == (True, False)


def test_what_measuring_took_is_told() -> None:
    columns = history(measured_steps=np.arange(1.0, 41), measuring_cost=50)

    prediction = predict(History.from_columns(columns))

    run = prediction.to_dict()["run"]
    assert (run["measured_steps"], run["measuring_share"]) == (40, 50 / 2050)
    assert "40 of 2,000 steps were measured (about 2.4 %" in " ".join(prediction.to_text().split())
    assert "% of the time" not in predict(history()).to_text()


def test_unknown_and_unbounded_are_null() -> None:
    record = strictly(predict(history(unresolved=40, seconds=math.nan)).to_json())

    unknown = {"value": None, "low": None, "high": None}
    assert record["resolved"] is False
    assert record["critical_batch_size"] == unknown | {"low": pytest.approx(80)}
    assert record["rows"][0]["hours"] == unknown
    assert record["run"]["hours"] is None
    assert record["tradeoff"] == {"min_steps": None, "min_examples": None, "gamma": None}
    own = next(row for row in record["rows"] if row["batch_size"] == 64)
    assert own["steps"]["value"] == pytest.approx(2000)  # known all the same


def test_the_steps_that_the_noise_scale_now_is_of_are_named() -> None:
    prediction = predict(History.from_columns(history(first_step=1201.0)))

    assert "of steps 1,201 to 2,000" in " ".join(prediction.to_text().split())
    title = noise_scale_figure(prediction).layout.title.text
    assert "Noise scale of steps 1,201 to 2,000: " in title
    assert "of steps" not in predict(history()).to_text()
