# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import time
from pathlib import Path

import pytest
from logged_runs import log_run, write_events
from refused import refused

from noisescale.history.following import FollowedRun
from noisescale.history.history import History
from noisescale.history.record import Recorder

RECORD = "noise_scale.jsonl"


def whole(folder: Path) -> bytes:
    log_run(folder, rows=4)
    return (folder / RECORD).read_bytes()


def steps_of(run: FollowedRun) -> list[float]:
    return [] if run.history is None else run.history["step"].tolist()


def test_a_record_is_followed_as_it_grows_and_left_as_it_is(tmp_path: Path) -> None:
    """Also where half a line is written."""
    content = whole(tmp_path / "made")
    ends = [place + 1 for place, byte in enumerate(content) if byte == 10]
    (tmp_path / "run").mkdir()
    run = FollowedRun(tmp_path / "run")
    found = []
    for end in (10, ends[0], ends[0] + 9, ends[1], ends[3] - 1, ends[4], len(content)):
        (tmp_path / "run" / RECORD).write_bytes(content[:end])
        assert run.read()
        found.append(steps_of(run))

    assert found == [[], [], [], [10], [10, 20], [10, 20, 30, 40], [10, 20, 30, 40]]
    assert run.read() is False
    assert run.last_row_at == pytest.approx(time.time(), abs=60)
    assert (tmp_path / "run" / RECORD).read_bytes() == content


def test_a_logger_s_files_are_waited_with_for_the_record(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    assert (run.read(), run.run) == (False, None)
    write_events(tmp_path, [(9, {"loss": 32.0})])
    assert (run.read(), run.run) == (False, None)

    log_run(tmp_path, rows=2)

    assert run.read()
    assert steps_of(run) == [10, 20]


def test_why_nothing_is_measured_is_known(tmp_path: Path) -> None:
    history = History()
    history.why_nothing = "One process trains. Accumulate."
    Recorder(tmp_path).note(history)
    run = FollowedRun(tmp_path)

    assert run.read()
    assert (run.history, run.why_nothing) == (None, "One process trains. Accumulate.")


def test_of_a_folder_of_runs_the_newest_is_followed_and_then_one_that_begins(
    tmp_path: Path,
) -> None:
    run = FollowedRun(tmp_path)
    for age, name in ((100, "b"), (50, "a")):
        log_run(tmp_path / name, rows=2)
        os.utime(tmp_path / name / RECORD, 2 * (time.time() - age,))
    run.read()
    assert (run.run, run.of_runs, run.read()) == (tmp_path / "a", 2, False)

    log_run(tmp_path / "c", rows=5)

    assert run.read()
    assert run.run == tmp_path / "c"
    assert steps_of(run) == [10, 20, 30, 40, 50]


def test_what_is_gone_or_was_never_there_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log_run(folder, rows=2)
    run = FollowedRun(folder)
    run.read()

    with refused("monitor", word="absent"):
        FollowedRun(folder, monitor="wide").read()
    with refused("optimizer", word="absent"):
        FollowedRun(folder, optimizer=3).read()
    (folder / RECORD).write_text("[]\n")
    with refused(f"{folder / RECORD}", at=(str(folder / RECORD), 1)):
        run.read()
    shutil.rmtree(folder)
    with refused(f"{folder}", error=FileNotFoundError, requirement="watched"):
        run.read()
    with refused("run", error=FileNotFoundError):
        FollowedRun(folder)
