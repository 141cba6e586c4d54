# SPDX-License-Identifier: Apache-2.0
"""The first sentences of a prediction, in each of their cases."""

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
