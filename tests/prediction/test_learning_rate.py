# SPDX-License-Identifier: Apache-2.0
"""The learning rate at the batch size that a prediction names."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import program
import pytest
from logged_runs import log_run
from reported_runs import history

from noisescale import History, Prediction, predict
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.learning_rate import learning_rate_at

SGD, ADAM, LION = OptimizerKind.SGD, OptimizerKind.ADAM, OptimizerKind.SIGN


def of(kind: OptimizerKind | None = None, **run: Any) -> Prediction:
    mix = None if kind is None else OptimizerMix(kind)
    return predict(History.from_columns(history(**run), optimizer=mix))


def line_of(p: Prediction) -> str | None:
    said = {one.label: one.sentence for one in p.document().answers}
    return said.get("Learning rate")


@pytest.mark.parametrize(
    ("kind", "noise_scale", "line"),
    [
        # (1 + 300/64)/(1 + 300/128) = 1.70
        (SGD, 300.0, "1.7 x yours at 128 (SGD, gain: 1.7 x off on held-out sweeps)"),
        # (1 + 3/64)/(1 + 3/16) = 0.88
        (SGD, 3.0, "0.88 x yours at 16 (SGD, gain)"),
        (ADAM, 300.0, "1.4 x yours at 128 (Adam and its variants, square root: 1.3 x off on"),
        (*(LION, 300.0, "1.0 to 2.0 x yours at 128, first 1.4 x (square root: no rule was"),),
        (None, 3.0, "0.25 to 1.0 x yours at 16, first 0.50 x (square root: the optimizer was not"),
        (SGD, 100.0, None),
    ],
)
def test_the_answer_has_the_learning_rate_where_it_names_a_batch_size(
    kind: OptimizerKind | None, noise_scale: float, line: str | None
) -> None:
    p = of(kind, noise_scale=noise_scale)

    found = line_of(p)

    assert found is None if line is None else (found or "").startswith(line)
    assert (p.learning_rate is None) == (line is None)


def test_rules_that_were_tried_are_not_said_to_be_untried() -> None:
    p = of(ADAM, noise_scale=math.nan, low=100.0, high=math.inf, devices=1)

    assert line_of(p) == (
        "1.0 to 2.0 x yours at 128, first 1.4 x (square root: the run does not say if its noise"
        " scale is larger)"
    )


def test_where_the_place_is_not_known_it_is_the_safe_range() -> None:
    """The upper end of the noise scale is open, and its lower end is below 128."""
    p = of(ADAM, noise_scale=math.nan, low=90.0, high=math.inf, devices=1)

    found = learning_rate_at(p, "larger", 128)

    assert found is not None
    assert not found.advice.swept
    assert (found.advice.factor.low, found.advice.factor.high) == (1.0, 2.0)


def test_of_a_lower_bound_alone_it_is_a_range() -> None:
    """(1 + 250/64)/(1 + 250/128) = 1.66; 2 if there was noise alone."""
    p = of(SGD, unresolved=40, noise_scale=math.nan, low=250.0, devices=1)

    found = p.learning_rate

    assert found is not None
    assert found.advice.swept
    low, high = (f"{x:.1f}" for x in (found.advice.factor.low, found.advice.factor.high))
    assert line_of(p) == f"{low} to {high} x yours at 128 (SGD, gain: 1.7 x off on held-out sweeps)"


def test_json_has_it_as_a_number_or_none() -> None:
    found = of(ADAM, noise_scale=300.0).to_dict()["learning_rate"]

    assert (found["batch_size"], found["rule"], found["swept"]) == (128, "square root", True)
    assert found["error"] == 1.33
    assert found["factor"] == pytest.approx(dict.fromkeys(("value", "low", "high"), math.sqrt(2)))
    assert of(ADAM, noise_scale=30.0).to_dict()["learning_rate"] is None


@pytest.mark.parametrize("monitor", ["", "wide"])
@pytest.mark.parametrize("kind", [SGD, ADAM, LION, None])
def test_the_printed_command_runs_and_says_the_same(
    monitor: str, kind: OptimizerKind | None, tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    log_run(folder, noise_scale=300.0, optimizer_kind=kind, monitor=monitor)
    p = predict(folder, calibration=1.0, monitor=monitor or None)
    (printed,) = [line for one in p.decision.next for line in one.split("\n") if "rescale" in line]

    program_name, *words = shlex.split(printed)
    found = json.loads(program.run(*words, "--json"))

    assert program_name == "noisescale"
    assert p.learning_rate is not None
    assert printed.strip() == p.learning_rate.command
    assert found["batch_size"] == p.recommended_batch_size
    assert found["recommended"] == p.learning_rate.advice.rule.name
    assert found["factor"]["value"] == pytest.approx(p.learning_rate.advice.factor.value, rel=1e-3)


def test_of_a_run_without_a_folder_the_command_gives_what_was_read() -> None:
    p = of(ADAM, noise_scale=300.0)

    words = shlex.split(p.decision.next[0].split("\n")[-1])[1:]

    assert "1.41 x" in program.run(*words)
