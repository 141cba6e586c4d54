# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import Collection

import numpy as np
import pytest
from refused import refused

from noisescale import GradientMoments, History
from noisescale.bounded import Bounded
from noisescale.history.history import COLUMNS
from noisescale.history.increments import INCREMENTS, Increments
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Segments
from noisescale.tradeoff.run_sums import Sums


def law_of(history: History) -> Sums:
    return RunLaw.of(Segments.of(history), Bounded(1.0, 1.0, 1.0)).middle


def filled(rows: int, most_rows: int = 4096) -> History:
    history = History(most_rows)
    for i in range(1, rows + 1):
        history.append(step=10 * i, examples=320 * i, noise_scale=20.0 + i, high=100.0)
    return history


def test_columns_are_arrays_of_one_length_which_is_the_number_of_rows() -> None:
    empty, one, history = (filled(rows) for rows in (0, 1, 3))

    assert list(history) == list(COLUMNS)
    assert history["step"].tolist() == [10, 20, 30]
    assert np.isnan(history["low"]).all()
    assert {len(values) for values in history.values()} == {3}
    assert [(len(x), bool(x)) for x in (empty, one, history)] == [(0, False), (1, True), (3, True)]
    said = ("0 rows", "1 row up to step 10", "3 rows up to step 30")
    assert [repr(x) for x in (empty, one, history)] == [f"History({x})" for x in said]


def test_memory_is_bounded_spacing_even_and_the_cost_of_the_run_kept() -> None:
    for most_rows in (8, 9):
        steps = filled(1000, most_rows)["step"]
        assert most_rows / 2 - 1 <= len(steps) <= most_rows
        assert len(set(np.diff(steps, prepend=0))) == 1
    full, thinned = law_of(filled(1000)), law_of(filled(1000, 128))
    assert thinned.critical_batch_size == pytest.approx(full.critical_batch_size, rel=0.05)
    assert full.steps(32) == pytest.approx(10_000)


def test_sums_use_the_mean_batch_size_between_rows() -> None:
    history = History()
    history.append(step=10, examples=10 * 16, noise_scale=20.0, high=30.0, batch_size=16)
    history.append(step=20, examples=10 * 16 + 10 * 48, noise_scale=20.0, high=30.0, batch_size=999)
    expected = 10 / (1 + 20 / 16) + 10 / (1 + 20 / 48)

    assert law_of(history).min_steps == pytest.approx(expected)


@pytest.mark.parametrize(("rows", "every"), [(8, 1), (9, 3), (64, 7)])
def test_increments_of_dropped_rows_are_those_of_the_rows_that_stay(rows: int, every: int) -> None:
    """As if the rows that stay had been the only ones."""
    rng = np.random.default_rng(0)
    drawn = [GradientMoments(rng.normal(1.0, 0.3), rng.normal(50.0, 9.0)) for _ in range(401)]

    def recorded(ends: Collection[float], most_rows: int) -> History:
        increments, history = Increments(), History(most_rows)
        for step, moments in enumerate(drawn, start=1):
            increments.add(moments, 32.0, loss=1 / step)
            if step in ends:
                history.append(step=step, examples=32 * step, **increments.take())
        return history

    thinned = recorded({*range(every, 401, every), 401}, rows)

    at_once = recorded(thinned["step"].tolist(), 4096)
    assert 2 < len(thinned) <= rows
    for column in INCREMENTS:
        kept, expected = (x[column] for x in (thinned, at_once))
        np.testing.assert_allclose(kept, expected, rtol=1e-9, err_msg=column)


def test_unknown_columns_and_too_few_rows_are_refused() -> None:
    with refused("row", got="['loss']"):
        History().append(loss=1.0)
    with refused("most_rows", got="1"):
        History(1)


def test_pandas_gets_the_rows_by_step_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(extra_columns=["group/norm"])
    history.append(step=50, noise_scale=19.0, **{"group/norm": 7.0})
    history.append(step=100, noise_scale=21.0)

    frame = history.to_pandas()

    assert (frame.index.name, frame.loc[50.0, "group/norm"]) == ("step", 7.0)
    assert frame["noise_scale"].tolist() == [19.0, 21.0]
    back = History.from_columns({name: x.to_numpy() for name, x in frame.reset_index().items()})
    assert set(back) == set(history)
    for name in history:
        np.testing.assert_array_equal(back[name], history[name])
    # Without pandas the remedy is named.
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'pip install "noisescale\[pandas\]"'):
        History().to_pandas()
