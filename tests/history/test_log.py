# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from noisescale.history.log import Log

NAMES = {"noise_scale/a": "a", "train/noise_scale/b": "b", "noise_scale/x/a": "x/a"}
TAGS = (*NAMES, "loss", "train/loss")

WRITTEN = st.lists(st.tuples(st.sampled_from(TAGS), st.integers(0, 2), st.integers(0, 1)))
"""Names, steps and parts, in the order of writing."""


def of_no_file() -> Log:
    """Numbers are added by hand."""
    made: Log = type("OfNoFile", (Log,), dict.fromkeys(Log.__abstractmethods__))()
    return made


def rows_by_hand(written: list[tuple[str, int, int]]) -> list[dict[str, float]]:
    """A row ends where the step or the part changes, and where a name comes again."""
    rows: list[dict[str, float]] = []
    before = None
    for number, (tag, *now) in enumerate(written):
        name = NAMES.get(tag)
        if name is None:
            continue
        if now != before or name in rows[-1]:
            rows.append({})
        rows[-1][name] = float(number)
        before = now
    return rows


@given(WRITTEN)
def test_what_was_written_at_once_is_a_row(written: list[tuple[str, int, int]]) -> None:
    log = of_no_file()
    for number, (tag, step, part) in enumerate(written):
        log.add(tag, number, "", step=step, seconds=0.0, part=part)

    columns = log.rows("noise_scale/")

    expected = rows_by_hand(written)
    assert set(columns) == {NAMES[tag] for tag, *_ in written if tag in NAMES}
    for name, values in columns.items():
        np.testing.assert_array_equal(values, [row.get(name, math.nan) for row in expected])


def test_a_metric_keeps_the_order_of_writing() -> None:
    log = of_no_file()
    for step, value in ((3, 0.5), (1, 0.25), (2, math.nan)):
        log.add("loss", value, "", step=step, seconds=10.0 * step, part=0)

    steps, values, seconds = log.metric("loss")

    assert steps.tolist() == [3, 1, 2]
    assert values.tolist()[:2] == [0.5, 0.25]
    assert seconds.tolist() == [30, 10, 20]
    assert log.metrics == ["loss"]
    assert len(log.metric("accuracy").steps) == 0
