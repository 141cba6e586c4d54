# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest
from refused import refused

from noisescale.history.run_files import logs_of, only_run_in, runs_in

RECORD = "noise_scale.jsonl"


def made(file: Path, written: float = 0.0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    os.utime(file, (written, written))
    return file


def test_a_run_below_the_folder_is_found_if_it_is_the_only_one(tmp_path: Path) -> None:
    one = made(tmp_path / "lightning_logs/version_0" / RECORD).parent

    assert only_run_in(tmp_path) == only_run_in(one) == only_run_in(one / RECORD) == one

    made(tmp_path / "lightning_logs/version_1" / RECORD)
    with refused(f"{tmp_path}", requirement="one run") as two:
        only_run_in(tmp_path)
    assert two.value.got == "2: lightning_logs/version_0, lightning_logs/version_1"


def test_a_path_that_does_not_exist_is_refused_whatever_it_would_be(tmp_path: Path) -> None:
    for name in ("run", "last.ckpt"):
        with refused("run", got=f"{tmp_path / name}, which does not exist"):
            runs_in(tmp_path / name)


def test_runs_are_in_the_order_in_which_they_were_last_written(tmp_path: Path) -> None:
    for second, name in enumerate("bca"):
        made(tmp_path / name / RECORD, second)

    assert [run.name for run in runs_in(tmp_path)] == ["b", "c", "a"]


def test_the_files_of_a_logger_are_event_files_in_order_or_one_csv_file(tmp_path: Path) -> None:
    table = made(tmp_path / "metrics.csv")
    alone = logs_of(tmp_path)
    events = [made(tmp_path / f"events.out.tfevents.{k}") for k in (2, 1)]

    assert alone == logs_of(table) == [table]
    assert logs_of(tmp_path) == events[::-1]


@pytest.mark.parametrize("log", ["events.out.tfevents.1", "metrics.csv"])
def test_what_a_logger_wrote_is_refused_with_the_name_of_our_file(tmp_path: Path, log: str) -> None:
    file = made(tmp_path / "run" / log)

    for path in (tmp_path, file.parent, file):
        with refused(f"{path}", requirement=RECORD, remedy="copy it, too", word="unrecorded"):
            runs_in(path)
    made(file.parent / RECORD)
    with refused(f"{file}", remedy=f"Name {file.parent / RECORD}."):
        runs_in(file)


def test_what_is_nothing_or_nowhere_is_refused(tmp_path: Path) -> None:
    with refused(f"{tmp_path}", requirement="contain a run"):
        only_run_in(tmp_path)
    with refused("run", error=FileNotFoundError):
        runs_in(tmp_path / "missing")
    with refused(f"{tmp_path}", got="none"):
        logs_of(tmp_path)
