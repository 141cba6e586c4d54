# SPDX-License-Identifier: Apache-2.0
"""The first sentences of a prediction, in each of their cases."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reported_runs import history

from noisescale import History, predict
from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.headline import headline_of
from noisescale.prediction.position import Position
from noisescale.prediction.predict import Prediction


def said(batch_size: float, *critical: float, at_end: bool = False, rough: bool = False) -> str:
    p = predict(history(batch_size=batch_size, devices=1, seconds=math.nan))
    return headline_of(p, Position(batch_size, Bounded(*critical), at_end, rough))


def test_below_the_critical_batch_size() -> None:
    assert said(20, 229, 94, 778) == (
        "You train at batch size 20. Up to about 70 (43 to 180), a larger batch saves steps at"
        " little cost. Beyond about 230 (94 to 780), each doubling saves less than a quarter of"
        " the steps."
    )


def test_probably_below() -> None:
    assert said(20, 60, 12, 300) == (
        "You train at batch size 20, probably below the critical batch size, 60 (12 to 300)."
        " Up to about 36 (26 to 84), a larger batch probably saves steps at little cost."
    )


def test_near() -> None:
    assert said(300, 340, 190, 590) == (
        "You train at batch size 300, near the critical batch size, 340 (190 to 590): halving it"
        " saves 23 % (17 to 31 %) of the examples, doubling it saves 27 % (19 to 33 %) of the"
        " steps."
    )


def test_above() -> None:
    assert said(2048, 340, 190, 700) == (
        "You train at batch size 2,048, about 6.0 times the critical batch size, 340 (190 to 700)."
        " A batch of 680 would reach the result with 0.43 (0.39 to 0.50) x the examples in 1.3"
        " (1.2 to 1.5) x the steps."
    )


def test_probably_above() -> None:
    assert said(600, 340, 140, 700).startswith(
        "You train at batch size 600, probably above the critical batch size, 340 (140 to 700)."
        " A batch of 480 would reach"
    )


def test_no_gain_at_all() -> None:
    assert said(64, 0, 0, 20) == (
        "You train at batch size 64. A larger batch saves no steps: a smaller one needs fewer"
        " examples."
    )
    assert "A larger batch probably saves no steps" in said(64, 0, 0, 80)


def test_a_value_without_an_upper_bound_is_no_range() -> None:
    """The interval of a ratio may be open upwards though the ratio has a value."""
    found = said(20, 229, 94, math.inf)

    assert found.startswith(
        "You train at batch size 20. Larger batches save steps at little cost at"
    )
    assert "unbounded" not in found


@pytest.mark.parametrize(
    ("low", "high", "rest"),
    [
        (
            102,
            math.inf,
            "Larger batches save steps at little cost at least up to 44. How far beyond, this run"
            " cannot say: the critical batch size is at least 100.",
        ),
        (
            12,
            math.inf,
            "This run cannot say whether a larger batch would save steps: the critical batch size"
            " is at least 12.",
        ),
        (
            0,
            math.inf,
            "This run cannot say whether a larger batch would save steps: its noise scale is not"
            " resolved.",
        ),
        (30, 300, "The critical batch size is 30 to 300, not resolved further."),
    ],
)
def test_not_resolved(low: float, high: float, rest: str) -> None:
    assert said(20, math.nan, low, high) == f"You train at batch size 20. {rest}"


def test_resolved_at_the_end_alone() -> None:
    assert said(20, 229, 94, 778, at_end=True).startswith(
        "You train at batch size 20. At the end of this run, up to about 70 (43 to 180), a larger"
    )
    assert "340 (190 to 700) at the end of this run. A batch of" in said(
        2048, 340, 190, 700, at_end=True
    )


def test_a_rough_range_is_called_one() -> None:
    assert said(64, 400, 80, 3000, rough=True) == (
        "You train at batch size 64. A rough range: somewhere between 80 and 3,000, a larger batch"
        " stops paying. A second run settles it."
    )


def test_an_untried_optimizer_has_a_rough_range_and_the_next_step_a_second_run() -> None:
    columns = history() | {"high": np.full(40, 160.0)}
    p = predict(History.from_columns(columns, optimizer=OptimizerMix(OptimizerKind.OTHER)))

    document = p.document()

    assert "A rough range: somewhere between" in document.headline
    assert "--second-run" in document.next[0]


def test_a_run_that_is_still_written_says_so_first() -> None:
    p = replace(predict(history()), under_way=True)

    document = p.document()

    assert document.headline.startswith("After 2,000 steps, so far: You train at")
    assert document.status == "under way"


def test_a_batch_size_that_changed_has_its_range() -> None:
    columns = history(devices=1)
    columns["batch_size"] = np.where(np.arange(40) < 20, 16.0, 112.0)
    columns["examples"] = np.cumsum(50 * columns["batch_size"])

    assert (
        predict(columns)
        .document()
        .headline.startswith("You trained at batch sizes from 16 to 112 (64 on average)")
    )


def test_the_run_s_own_batch_size_is_known_where_others_are_asked_for() -> None:
    p = predict(history(devices=1), [512])

    assert p.document().headline.startswith("You train at batch size 64, ")
    assert p.to_dict()["run"]["batch_size"] == 64


def test_several_devices_are_named() -> None:
    assert (
        predict(history(devices=4))
        .document()
        .headline.startswith("You train at batch size 64 on 4 devices")
    )


def timed(*seconds: float) -> Prediction:
    """Device batches of 64, 128 and 256 that take so many seconds."""
    p = predict(history(devices=1), [64, 128, 256], [1])
    each: Any = zip(p.rows, seconds, strict=True)
    rows = tuple(
        replace(row, basis="timed", seconds_per_step=Bounded(took, took, took))
        for row, took in each
    )
    return replace(p, rows=rows)


def test_a_batch_size_that_is_surely_faster_is_named_in_the_end() -> None:
    faster, slower = timed(0.5, 0.52, 0.56), timed(0.5, 1.0, 2.0)

    # (1 + c/256)/(1 + c/64) x 0.56/0.5 at c = 100, 125 and 80
    ratio = "0.61 (0.56 to 0.65)"
    said = faster.document().headline
    assert said.endswith(f" On this device, 256 is the fastest timed: {ratio} x the time.")
    assert "fastest" not in slower.document().headline


def test_the_title_and_the_notebook_begin_with_it() -> None:
    p = predict(history())

    document = p.document()

    assert document.title == "Batch size 64: what other batch sizes would save"
    assert p.to_text(400).startswith(document.headline)
    assert p._repr_html_().startswith(f"<p><b>{document.headline}</b></p>")
