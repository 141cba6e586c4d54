# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

from refused import refused

from noisescale.history.run_files import files_of, only_run_in, runs_in


def made(file: Path, written: float = 0.0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    os.utime(file, (written, written))
    return file


def test_a_run_below_the_folder_is_found_if_it_is_the_only_one(tmp_path: Path) -> None:
    one = made(tmp_path / "lightning_logs/version_0/metrics.csv").parent

    assert only_run_in(tmp_path) == only_run_in(one) == one

    made(tmp_path / "lightning_logs/version_1/events.out.tfevents.1")
    with refused(f"{tmp_path}", requirement="one run") as two:
        only_run_in(tmp_path)
    assert two.value.got == "2: lightning_logs/version_0, lightning_logs/version_1"


def test_runs_are_in_the_order_in_which_they_were_last_written(tmp_path: Path) -> None:
    files = "b/events.out.tfevents.1", "c/metrics.csv", "a/metrics.csv", "b/events.out.tfevents.2"
    for second, file in enumerate(files):
        made(tmp_path / file, second)

    assert [run.name for run in runs_in(tmp_path)] == ["c", "a", "b"]


def test_the_files_of_a_run_are_its_event_files_in_order_or_one_csv_file(tmp_path: Path) -> None:
    table = made(tmp_path / "metrics.csv")
    alone = files_of(tmp_path)
    events = [made(tmp_path / f"events.out.tfevents.{k}") for k in (2, 1)]

    assert alone == files_of(table) == [table]
    assert files_of(tmp_path) == events[::-1]
