# SPDX-License-Identifier: Apache-2.0
import logging
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from logged_runs import ours, write_events
from refused import refused
from tiers import slow_but

from noisescale.history.event_log import EventLog
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_run
from noisescale.history.run_files import files_of

ROW = {"batch_size": 32.0, "lower_bound": 10.0, "simple": 14.0, "simple_high": 20.0}

STORED = ("plain", "grown", "transformers", "with_pictures", "two_monitors")


def write(folder: Path, steps: range, *, suffix: str = "", **changed: Any) -> Path:
    """Log rows as the monitor does, with another metric between them; return the file.

    Files of one second are ordered by a number of their writer, and as texts: 10 comes before 9.
    So each has a time of its own.
    """
    rows = (ours({"step": k, "examples": 32.0 * k, **ROW, **changed}) for k in steps)
    written = [(k - 1, row | {"loss": 1 / k}) for k, row in zip(steps, rows, strict=True)]
    write_events(folder, written, suffix)
    files = list(folder.glob("events*"))
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    return newest.rename(folder / f"events.out.tfevents.{1_700_000_000 + len(files)}.host{suffix}")


def write_csv(folder: Path, names: Iterable[str], *rows: str, before: str = "noise_scale/") -> Path:
    path = folder / "metrics.csv"
    path.write_text("\n".join([",".join(f"{before}{name}" for name in names), *rows, ""]))
    return path


def test_what_the_optimizer_is_is_read_from_a_logger_s_files(tmp_path: Path) -> None:
    mix = OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 0.625)
    write(tmp_path / "board", range(5, 25, 5), optimizer_kind=4.0)
    write(tmp_path / "board", range(25, 50, 5), suffix=".2", **mix.numbers)
    lines = [[k, 32 * k, *ROW.values(), *mix.numbers.values()] for k in (5, 10)]
    names = ("step", "examples", *ROW, *mix.numbers)
    table = write_csv(tmp_path, names, *(",".join(map(str, line)) for line in lines))

    assert read_run(str(tmp_path / "board")).optimizer == read_run(table).optimizer == mix


def test_what_a_trainer_puts_before_the_names_is_no_part_of_them(tmp_path: Path) -> None:
    names = ("step", "examples", "batch_size", "lower_bound")
    write_csv(tmp_path, names, "1,32,32,5.5", ",,,", before="train/noise_scale/")

    read = read_run(tmp_path)

    assert (read["examples"].tolist(), read["low"].tolist()) == ([32], [5.5])


def test_a_row_without_a_newly_measured_step_does_not_hide_what_the_one_before_it_added(
    tmp_path: Path,
) -> None:
    """Steps are measured ever more rarely: what was measured at 11 is logged again at 20."""
    names = ("step", "examples", "batch_size", "lower_bound", "increment_measured_steps")
    write_csv(tmp_path, names, "1,32,32,5,1", "11,352,32,6,2", "11,352,32,6,", "21,672,32,7,1")

    read = read_run(tmp_path)

    assert read["step"].tolist() == [1, 11, 21]
    assert read["increment_measured_steps"].tolist() == [1, 2, 1]


def test_rows_are_told_apart_whatever_each_of_them_lacks(tmp_path: Path) -> None:
    """Tags in the monitor's order: what is not resolved is left out at the front of a row."""
    always = {"lower_bound": 10.0, "batch_size": 32.0}
    resolved = {"simple": 14.0, "simple_high": 20.0}
    # Step 3 was trained twice, into one file.
    rows = [(1, always), (2, resolved | always), (3, resolved | always), (3, always)]
    written = [(k - 1, ours(row | {"step": k, "examples": 32.0 * k})) for k, row in rows]
    write_events(tmp_path, written)

    read = read_run(tmp_path)

    assert read["step"].tolist() == [1, 2, 3]
    assert read["noise_scale"] == pytest.approx([math.nan, 14, math.nan], nan_ok=True)
    assert read["high"].tolist() == [math.inf, 20, math.inf]
    assert read["low"].tolist() == [10, 10, 10]


def test_scalars_that_were_written_as_tensors_are_read_without_a_word(tmp_path: Path) -> None:
    """As TensorFlow's writers and TensorBoard's newer ones do it."""
    write_events(tmp_path, [(0, ours({"step": 1, "examples": 32.0, **ROW}))], new_style=True)

    with TestCase().assertNoLogs("tensorboard", logging.INFO):
        read = read_run(tmp_path)
        assert logging.getLogger("tensorboard").level == logging.INFO

    assert (read["step"].tolist(), read["noise_scale"].tolist()) == ([1], [14])


@pytest.mark.parametrize("logged", ["tensorboard", "csv"])
def test_each_monitor_and_optimizer_of_a_run_can_be_read(tmp_path: Path, logged: str) -> None:
    row = {"step": 1, "examples": 32.0, "batch_size": 8.0, "lower_bound": 3.0}
    places = ("wide", "a b/optimizer_1", *(["optimizer_1"] if logged == "tensorboard" else []))
    named = {f"{place}/{key}": value for place in places for key, value in row.items()}
    if logged == "csv":
        write_csv(tmp_path, named, ",".join(map(str, named.values())))
    else:
        write(tmp_path, range(1, 4), **named)

    assert read_run(tmp_path, monitor="wide")["low"].tolist() == [3]
    assert read_run(tmp_path, monitor="a b", optimizer=1)["low"].tolist() == [3]
    with refused("monitor", got="'narrow'", remedy="'wide'"):
        read_run(tmp_path, monitor="narrow")
    with refused("optimizer", got="2"):
        read_run(tmp_path, monitor="wide", optimizer=2)
    if logged == "csv":
        with refused("monitor", got="None"):
            read_run(tmp_path)
    else:
        assert read_run(tmp_path)["low"].tolist() == [10, 10, 10]
        assert read_run(tmp_path, optimizer=1)["low"].tolist() == [3]  # of one step, the last
        with refused("optimizer", got="2", word="absent"):
            read_run(tmp_path, optimizer=2)


def test_a_truncated_file_is_told_and_read_on_request(tmp_path: Path) -> None:
    file = write(tmp_path, range(1, 41))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    with refused(str(file), requirement="a whole record") as told:
        read_run(tmp_path)
    steps = read_run(tmp_path, allow_truncated=True)["step"].tolist()

    (step,) = re.findall(r"\(step (\d+)\)", str(told.value))
    assert int(step) in (len(steps) - 1, len(steps))  # Lightning's begin with 0
    assert steps == [*range(1, len(steps) + 1)]
    assert 15 < len(steps) < 25


@pytest.mark.parametrize(
    ("name", "place", "told"),
    [
        (b"noise_scale/examples", -5, True),  # the last byte of the content, within the number
        (b"loss", -5, True),  # may hide one of ours
        (b"picture", -100, False),
        (b"picture", 0, True),
    ],
)
def test_a_flipped_bit_matters_wherever_it_may_hide_a_number(
    tmp_path: Path, name: bytes, place: int, told: bool
) -> None:
    """TensorBoard's own readers stop there without a word."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in (1, 2):
            for tag, value in {"step": step, "examples": 32.0 * step, "batch_size": 32}.items():
                writer.add_scalar(f"noise_scale/{tag}", value, step)
            writer.add_scalar("loss", 1.0, step)
            writer.add_image("picture", torch.rand(3, 32, 32), step)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    begin, end = next(frame for frame in frames(content) if name in content[slice(*frame)])
    content[begin if place == 0 else end + place] ^= 1
    file.write_bytes(content)

    for allowed in (False, True):
        if told:
            with refused(str(file), requirement="have whole events"):
                read_run(tmp_path, allow_truncated=allowed)
        else:
            assert read_run(tmp_path, allow_truncated=allowed)["step"].tolist() == [1, 2]


def frames(content: bytes) -> Iterator[tuple[int, int]]:
    """Where each record begins, with its length and the checksum of it, and where it ends."""
    begin = 0
    while begin < len(content):
        end = begin + 16 + int.from_bytes(content[begin : begin + 8], "little")
        yield begin, end
        begin = end


def test_event_files_that_are_no_run_are_refused(tmp_path: Path) -> None:
    empty, other, nothing = (tmp_path / name for name in ("empty", "other", "nothing"))
    for folder in (empty, nothing):
        folder.mkdir()
    (empty / "events.out.tfevents.1").touch()
    write_events(other, [(0, {"loss": 1.0})])
    broken = write(tmp_path / "nan", range(1, 4), batch_size=math.nan)

    with refused(f"{empty}/events.out.tfevents.1", requirement="contain events"):
        read_run(empty)
    with refused(f"{empty}", got="a log without metrics", word="empty"):
        read_run(empty, allow_truncated=True)
    with refused(f"{other}", remedy="`NoiseScaleMonitor()`", word="unmeasured") as unmeasured:
        read_run(other)
    assert "loss" in unmeasured.value.got
    with refused("noise_scale/batch_size", requirement="be finite") as infinite:
        read_run(tmp_path / "nan")
    assert f"{broken}" in infinite.value.got
    with refused(f"{nothing}", requirement="contain a run"):
        read_run(nothing)
    with refused("run", error=FileNotFoundError):
        read_run(tmp_path / "missing")


@pytest.mark.parametrize(
    ("content", "argument", "got"),
    [
        ("epoch,loss\n0,1.0\n", "", "epoch, loss"),
        ("step,noise_scale/step\n0,1,2\n", "", "3"),
        ("step,noise_scale/step\n0,nan\n", "noise_scale/step", "nan"),
    ],
)
def test_csv_files_that_are_no_run_are_refused(
    tmp_path: Path, content: str, argument: str, got: str
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(content)

    with refused(argument or f"{path}") as found:
        read_run(path)

    assert got in found.value.got
    assert found.value.at is None or found.value.at == (str(path), 2)


@pytest.mark.parametrize("run", slow_but(STORED, "two_monitors"))
def test_every_number_is_the_one_that_tensorboard_reads(run: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path(__file__).parents[1] / "goldens" / "inputs" / run
    theirs = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()

    log = EventLog(folder, every=True)
    log.read(files_of(folder))

    tags = theirs.Tags()["scalars"]
    assert len(tags) > 20
    assert set(tags) == set(log.metrics)
    for tag in tags:
        expected = [(event.step, event.value) for event in theirs.Scalars(tag)]
        found = log.metric(tag)
        assert list(zip(found.steps.tolist(), found.values.tolist(), strict=True)) == expected


def test_half_a_last_line_is_left_out_with_a_word(tmp_path: Path) -> None:
    """A killed run leaves it."""
    path = write_csv(tmp_path, ("step", "examples", "batch_size"), "1,32,32", "2,64,32", "3,96,3")
    path.write_text(path.read_text()[:-1])

    with pytest.warns(UserWarning, match=r"metrics\.csv ends within line 4"):
        read = read_run(tmp_path)

    assert read["step"].tolist() == [1, 2]
