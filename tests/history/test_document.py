# SPDX-License-Identifier: Apache-2.0
"""A run's document: what a reader makes of one that is cut, mixed, empty or newer."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused import refused

from noisescale import History, predict, read_run
from noisescale.history.document import Document, document_of, restore, round_row
from noisescale.history.optimizers import OptimizerKind, OptimizerMix

RECORD = "noise_scale.jsonl"

NUMBER = st.one_of(st.floats(), st.integers(-(10**15), 10**15).map(float))


def made(*steps: float, **about: Any) -> History:
    history = History(**about)
    for step in steps:
        row = {"step": step, "examples": 32 * step, "batch_size": 32, "noise_scale": step / 3}
        history.append(**round_row({**row, "low": 1.0}))
    return history


def write(folder: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / RECORD).write_text("".join(f"{text}\n" for text in texts))
    return folder / RECORD


def read_back(history: History) -> History:
    (part,) = Document(json.loads(json.dumps(document_of(history)))).parts.values()
    return part.history()


def assert_same(found: History, own: History) -> None:
    assert [*found] == [*own]
    for name in own:
        np.testing.assert_array_equal(found[name], own[name], err_msg=name)


@given(rows=st.lists(st.fixed_dictionaries({}, optional={"devices": NUMBER, "low": NUMBER})))
def test_what_is_read_is_what_was_written(rows: list[dict[str, float]]) -> None:
    history = History()
    for step, row in enumerate(rows, start=1):
        history.append(**round_row({"step": step, **row}))

    found = read_back(history)

    for name in ("step", "high"):
        np.testing.assert_array_equal(found[name], history[name])
    for name in ("devices", "low"):  # what is not finite is null
        known = np.where(np.isfinite(history[name]), history[name], math.nan)
        np.testing.assert_array_equal(found[name], known)


def test_all_that_is_known_of_a_run_is_in_its_header() -> None:
    mix = OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 1 / 3)
    run = made(10, 20, unit="tokens", confidence=0.5, optimizer=mix, parameters=7.0)
    run.loop, run.way, run.prefix = "own", "Halves", "noise_scale/wide/optimizer_1/"
    run.attempt, run.why_nothing = 3, "nothing to compare"

    found = read_back(run)

    about = [name for name in vars(run) if name[0] != "_"]
    assert {name: vars(found)[name] for name in about} == {name: vars(run)[name] for name in about}
    run.withhold("rows are alike")
    assert read_back(run).withheld == "rows are alike"


def test_a_long_run_goes_on_as_one_that_was_never_saved() -> None:
    """Rows have been merged, and the last one is still to be."""
    whole, first, second = (History(4) for _ in range(3))
    steps = range(1, 12)
    rows = [round_row({"step": step, "increment_weight": step / 3, "low": 1.0}) for step in steps]
    for row in rows:
        whole.append(**row)
    for row in rows[:7]:
        first.append(**row)

    restore(second, json.loads(json.dumps(document_of(first))))
    for row in rows[7:]:
        second.append(**row)

    assert (second.run, second.attempt, second.last_step) == (first.run, 2, 11)
    assert len(whole) < 4
    assert_same(second, whole)
    with pytest.raises(ValueError, match="counts tokens, this run counts examples"):
        restore(History(), document_of(made(10, unit="tokens")))


def test_a_document_that_was_cut_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    lines = document_of(made(10, 20, 30, 40))
    file = write(tmp_path, *lines)
    file.write_text(file.read_text()[:-20])

    with pytest.warns(UserWarning, match=r"noise_scale.jsonl ends within line 5"):
        assert read_run(tmp_path)["step"].tolist() == [10, 20, 30]
    write(tmp_path, *lines[:2], *lines[4:])
    with pytest.warns(UserWarning, match="lacks the rows between the steps 10 and 30"):
        assert read_run(tmp_path)["step"].tolist() == [10, 40]
    for kept in ([], lines[:1]):
        write(tmp_path, *kept)
        with refused(f"{tmp_path}", word="empty"):
            read_run(tmp_path)


def test_damage_is_refused_with_its_line(tmp_path: Path) -> None:
    header, row, *_ = document_of(made(10, 20))
    who = {"of": header["of"], "run": header["run"]}
    rows = (["x"], [math.inf], [1] * 99, [math.nan], 1, [True], [5], [[]])
    of_no_row = [{**who, "after": 10, "row": each} for each in rows]
    cut = '{"of":"noise_scale/","run":"'
    of_none = ("", "[]", cut, "\x00", who, {"of": "noise_scale/"}, {**who, "row": [20]})
    other = {**row, "run": "another.1"}, {**row, "of": "noise_scale/wide/"}

    for line in (*of_none, *other, *of_no_row):
        file = write(tmp_path, header, row, line)
        with refused(f"{file}", at=(f"{file}", 3), requirement="a row of a history"):
            read_run(tmp_path)
    write(tmp_path, {**header, "confidence": "high"}, row)
    with refused(f"{tmp_path}", requirement="a whole header", word="damaged"):
        read_run(tmp_path)


def test_a_document_of_a_later_version_says_how_to_read_it(tmp_path: Path) -> None:
    header, *rows = document_of(made(10))
    write(tmp_path, {**header, "format": 2}, *rows)

    with refused("document", got="format 2", remedy="`pip install -U noisescale`"):
        read_run(tmp_path)


def test_runs_that_wrote_into_one_file_read_as_runs(tmp_path: Path) -> None:
    """One after another, and both at once."""
    first, second = (made(10, 20, 30), made(10, 50))
    both = [*document_of(first), *document_of(second)]
    write(tmp_path, *both)
    assert read_run(tmp_path)["step"].tolist() == [10, 50]

    more = {"of": "noise_scale/", "run": f"{first.run}.1", "after": 30, "row": [40, 1280]}
    write(tmp_path, *both, more)

    with pytest.warns(UserWarning, match="at the same time") as told:
        assert read_run(tmp_path)["step"].tolist() == [10, 50]
    (other,) = (word for word in str(told[0].message).split() if first.run in word)
    assert read_run(other.rstrip("."))["step"].tolist() == [10, 20, 30, 40]
    with refused("run", got="gone", remedy=f"{first.run}, {second.run}"):
        read_run(tmp_path / RECORD / "gone")


def test_each_monitor_and_optimizer_of_a_document_can_be_read(tmp_path: Path) -> None:
    wide, second = made(10, 20), made(10)
    wide.prefix, second.prefix = "noise_scale/wide/", "noise_scale/a b/optimizer_1/"
    write(tmp_path, *document_of(wide), *document_of(second))

    assert len(read_run(tmp_path, monitor="wide")) == 2
    assert len(read_run(tmp_path, monitor="a b", optimizer=1)) == 1
    with refused("monitor", got="'narrow'", remedy="'a b', 'wide'", word="absent"):
        read_run(tmp_path, monitor="narrow")
    with refused("optimizer", got="2", word="absent"):
        read_run(tmp_path, monitor="wide", optimizer=2)


def test_why_nothing_was_measured_is_read_from_the_document(tmp_path: Path) -> None:
    history = History()
    history.why_nothing = "One process trains. Accumulate."
    write(tmp_path, *document_of(history))

    with refused(f"{tmp_path}", remedy="Accumulate.", word="unmeasured"):
        predict(tmp_path)
