# SPDX-License-Identifier: Apache-2.0
import codecs
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logged_runs import write_events
from refused import refused

from noisescale.history import following
from noisescale.history.following import FollowedRun
from noisescale.history.reading import read_run

ROW = {"batch_size": 32.0, "lower_bound": 10.0, "simple": 14.0, "simple_high": 20.0}
HEADER = "loss," + ",".join(f"noise_scale/{name}" for name in ("step", "examples", *ROW)) + "\n"


def writer_in(folder: Path, suffix: str = "") -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), filename_suffix=suffix)


def add(writer: Any, steps: range, **changed: float) -> None:
    """Log rows as the monitor does, with another metric between them, to the file."""
    for step in steps:
        for name, value in {"step": step, "examples": 32.0 * step, **ROW, **changed}.items():
            writer.add_scalar(f"noise_scale/{name}", value, step - 1)
        writer.add_scalar("loss", 1 / step, step - 1)
    writer.flush()


def csv_rows(steps: range) -> str:
    values = ",".join(f"{value:g}" for value in ROW.values())
    return "".join(f"0.5,{step},{32 * step},{values}\n" for step in steps)


def followed_csv(folder: Path, last: int = 3) -> tuple[Path, FollowedRun]:
    """A file with rows up to this step, and its run, which has read it."""
    file = folder / "metrics.csv"
    file.write_text(HEADER + csv_rows(range(1, last + 1)))
    run = FollowedRun(folder)
    run.read()
    return file, run


def steps_of(run: FollowedRun) -> list[float]:
    return [] if run.history is None else run.history["step"].tolist()


def test_event_files_are_followed_as_they_grow_and_left_as_they_are(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        run = FollowedRun(tmp_path)
        run.read()
        assert steps_of(run) == []
        add(writer, range(1, 4))
        assert (run.read(), steps_of(run)) == (True, [1, 2, 3])
        add(writer, range(4, 7))
        (file,) = tmp_path.iterdir()
        unread = file.read_bytes(), file.stat().st_mtime_ns
        assert (run.read(), steps_of(run)) == (True, [1, 2, 3, 4, 5, 6])
        assert run.read() is False

    assert run.history is not None
    expected = read_run(tmp_path)
    for name in expected:
        np.testing.assert_array_equal(run.history[name], expected[name])
    assert run.last_row_at == pytest.approx(time.time(), abs=60)
    assert [*tmp_path.iterdir()] == [file]
    assert (file.read_bytes(), file.stat().st_mtime_ns) == unread


def test_a_csv_file_is_followed_as_it_grows_and_half_a_line_is_left_for_later(
    tmp_path: Path,
) -> None:
    run = FollowedRun(tmp_path)
    file = tmp_path / "metrics.csv"
    mark = codecs.BOM_UTF8  # as a spreadsheet writes it
    whole = mark + (HEADER + csv_rows(range(1, 4))).encode()
    found = []
    # Within the names of the columns, within a number, at a line's end.
    for end in (10, len(mark + HEADER.encode()) + 7, len(whole) - 3, len(whole)):
        with file.open("ab") as opened:
            opened.write(whole[file.stat().st_size : end])
        run.read()
        found.append((steps_of(run), run.unread > 0))

    assert found == [([], True), ([], True), ([1, 2], True), ([1, 2, 3], False)]
    assert run.others == ["loss"]


def test_half_a_record_is_left_for_later(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        add(writer, range(1, 3))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(b"")
    followed, found = FollowedRun(tmp_path), []
    for end in (*range(0, len(content), 15), len(content)):
        with file.open("ab") as opened:
            opened.write(content[opened.tell() : end])
        followed.read()
        found.append(len(steps_of(followed)))

    assert found == sorted(found)
    assert steps_of(followed) == [1, 2]
    assert followed.unread == 0


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_what_was_read_is_not_read_again(tmp_path: Path, logger: str) -> None:
    """Damage to what was read already is not seen."""
    if logger == "csv":
        file, run = followed_csv(tmp_path)
        content = file.read_text().replace("0.5,1,32", "0.5,x,yy") + csv_rows(range(4, 5))
        with file.open("r+") as opened:  # the same file, which is not replaced
            opened.write(content)
    else:
        with writer_in(tmp_path) as writer:
            add(writer, range(1, 4))
            (file,), run = tmp_path.iterdir(), FollowedRun(tmp_path)
            run.read()
            with file.open("r+b") as opened:
                opened.seek(100)
                opened.write(b"damaged")
            add(writer, range(4, 5))
    run.read()

    assert steps_of(run) == [1, 2, 3, 4]


def test_a_run_that_is_resumed_in_its_folder_counts_steps_once(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    with writer_in(tmp_path, ".0") as writer:
        add(writer, range(1, 11))
    run.read()
    with writer_in(tmp_path, ".1") as writer:
        add(writer, range(7, 9), batch_size=64.0)
    run.read()

    for history in (run.history, read_run(tmp_path)):
        assert history is not None
        assert history["step"].tolist() == list(range(1, 9))
        assert history["batch_size"].tolist() == [32] * 6 + [64] * 2


@pytest.mark.parametrize("looked_between", [True, False])
@pytest.mark.parametrize("last", [7, 30])
def test_a_csv_file_that_was_deleted_and_begun_anew_is_read_from_its_beginning(
    tmp_path: Path, last: int, looked_between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CSVLogger does in a folder that holds one already; the new one may be larger."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # it is not needed for a CSV file
    file, run = followed_csv(tmp_path, 10)
    os.link(file, tmp_path / "kept.csv")  # so that the new file cannot have its number
    file.unlink()
    if looked_between:
        assert run.read() is False
    file.write_text(HEADER + csv_rows(range(5, last)))
    run.read()

    assert steps_of(run) == [*range(5, last)]


def test_a_csv_file_that_is_deleted_during_a_reading_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = followed_csv(tmp_path)

    def deleted(folder: Path) -> list[Path]:
        file.unlink()
        return [file]

    with monkeypatch.context() as patch:
        patch.setattr(following, "files_of_rows", deleted)
        assert run.read() is False
    file.write_text(HEADER + csv_rows(range(1, 6)))
    run.read()

    assert steps_of(run) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_csv_file_that_gets_new_columns_is_read_anew(tmp_path: Path, place: str) -> None:
    """A CSVLogger writes all of the file again when a metric is logged for the first time."""
    file, run = followed_csv(tmp_path)
    lines = (HEADER + csv_rows(range(1, 6))).splitlines()
    rows = zip(["accuracy", *[""] * 5], lines, strict=True)
    ordered = rows if place == "first" else [(line, cell) for cell, line in rows]
    file.write_text("".join(",".join(row) + "\n" for row in ordered))
    run.read()

    assert steps_of(run) == [1, 2, 3, 4, 5]
    assert "accuracy" in run.others


def test_of_a_folder_of_runs_the_newest_is_followed_and_then_one_that_begins(
    tmp_path: Path,
) -> None:
    run = FollowedRun(tmp_path)
    empty = run.read(), run.run
    for age, name in ((100, "b"), (50, "a")):
        with writer_in(tmp_path / name) as writer:
            add(writer, range(1, 3))
        (file,) = (tmp_path / name).iterdir()
        os.utime(file, 2 * (time.time() - age,))
    run.read()
    assert empty == (False, None)
    assert (run.run, run.of_runs) == (tmp_path / "a", 2)
    write_events(tmp_path / "a/val", [(0, {"loss": 1.0})])
    run.read()
    assert run.run == tmp_path / "a"
    with writer_in(tmp_path / "c") as writer:
        writer.add_scalar("loss", 1.0, 0)
        writer.flush()
        run.read()
        assert (run.history, run.others) == (None, ["loss"])
        add(writer, range(1, 6))
    run.read()

    assert run.run == tmp_path / "c"
    assert steps_of(run) == [1, 2, 3, 4, 5]


def test_what_is_gone_or_was_never_there_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with writer_in(folder) as writer:
        add(writer, range(1, 3))
    run = FollowedRun(folder)
    run.read()

    for asked in ({"monitor": "wide"}, {"optimizer": 3}):
        with refused(*asked, word="absent"):
            FollowedRun(folder, **asked).read()
    shutil.rmtree(folder)
    with refused(f"{folder}", error=FileNotFoundError, requirement="watched"):
        run.read()
    with refused("run", error=FileNotFoundError):
        FollowedRun(folder)
