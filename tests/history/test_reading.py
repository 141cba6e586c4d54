# SPDX-License-Identifier: Apache-2.0
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from noisescale import predict
from noisescale.history.event_log import EventLog
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_run
from noisescale.history.run_files import files_of
from noisescale.refusal import Refusal

ROW = {
    "batch_size": 32.0,
    "lower_bound": 10.0,
    "simple": 14.0,
    "simple_low": 10.0,
    "simple_high": 20.0,
}

HYBRID = OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 0.625)


def write(folder: Path, steps: range, *, suffix: str = "", **changed: Any) -> Path:
    """Log rows as the monitor does, with another metric between them; return the file.

    Files of one second are ordered by a number of their writer, and as texts: 10 comes before 9.
    So each has a time of its own.
    """
    with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
        for step in steps:
            row = {"step": step, "examples": 32.0 * step, **ROW, **changed}
            for name, value in row.items():
                if value is not None:
                    writer.add_scalar(f"noise_scale/{name}", value, step - 1)
            writer.add_scalar("loss", 1 / step, step - 1)
    files = list(folder.glob("events*"))
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    return newest.rename(folder / f"events.out.tfevents.{1_700_000_000 + len(files)}.host{suffix}")


@pytest.mark.parametrize("mix", [OptimizerMix(OptimizerKind.SIGN), HYBRID])
def test_what_the_optimizer_is_is_read_from_a_logger_s_files(
    tmp_path: Path, mix: OptimizerMix
) -> None:
    write(tmp_path / "board", range(5, 25, 5), optimizer_kind=4.0)
    write(tmp_path / "board", range(25, 50, 5), suffix=".2", **mix.numbers)
    names = ["step", "examples", *ROW, *mix.numbers]
    lines = [[k, 32 * k, *ROW.values(), *mix.numbers.values()] for k in (5, 10)]
    header = ",".join(f"noise_scale/{name}" for name in names)
    rows = [",".join(map(str, line)) for line in lines]
    (tmp_path / "metrics.csv").write_text("\n".join([header, *rows, ""]))

    assert read_run(tmp_path / "board").optimizer == mix
    assert read_run(tmp_path / "metrics.csv").optimizer == mix


@pytest.mark.parametrize("before", ["", "train/"])
def test_what_a_trainer_puts_before_the_names_is_no_part_of_them(
    tmp_path: Path, before: str
) -> None:
    names = [f"{before}noise_scale/{name}" for name in ("step", "examples", "batch_size")]
    (tmp_path / "metrics.csv").write_text(
        ",".join(["loss", *names, f"{before}noise_scale/lower_bound"]) + "\n,1,32,32,5.5\n0.5,,,,\n"
    )

    read = read_run(tmp_path)

    assert (read["examples"].tolist(), read["low"].tolist()) == ([32], [5.5])


def test_rows_that_are_not_resolved_have_their_lower_bound(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), simple=None, simple_low=None, simple_high=None)

    read = read_run(tmp_path)

    assert np.isnan(read["noise_scale"]).all()
    assert read["low"].tolist() == [10, 10, 10]
    assert np.isinf(read["high"]).all()


def test_of_steps_trained_again_after_a_restart_the_last_count(tmp_path: Path) -> None:
    """Steps 1 to 100, then from a checkpoint 61 to 120: TensorBoard itself keeps all 160."""
    write(tmp_path, range(1, 101), suffix=".0")
    write(tmp_path, range(61, 121), suffix=".1", batch_size=64.0)

    read = read_run(tmp_path)

    assert read["step"].tolist() == list(range(1, 121))
    assert read["batch_size"].tolist() == [32] * 60 + [64] * 60


def test_a_row_without_a_newly_measured_step_does_not_hide_what_the_one_before_it_added(
    tmp_path: Path,
) -> None:
    """Steps are measured ever more rarely: what was measured at 11 is logged again at 20."""
    rows = ["1,32,32,5,1", "11,352,32,6,2", "11,352,32,6,", "21,672,32,7,1"]
    names = ("step", "examples", "batch_size", "lower_bound", "increment_measured_steps")
    header = ",".join(f"noise_scale/{name}" for name in names)
    (tmp_path / "metrics.csv").write_text("\n".join([header, *rows, ""]))

    read = read_run(tmp_path)

    assert read["step"].tolist() == [1, 11, 21]
    assert read["increment_measured_steps"].tolist() == [1, 2, 1]


def test_rows_are_told_apart_whatever_each_of_them_lacks(tmp_path: Path) -> None:
    """Tags in the monitor's order: what is not resolved is left out at the front of a row."""
    always = {"lower_bound": 10.0, "batch_size": 32.0}
    resolved = {"simple": 14.0, "simple_high": 20.0}
    # Step 3 was trained twice, into one file.
    rows = [(1, always), (2, resolved | always), (3, resolved | always), (3, always)]
    with SummaryWriter(str(tmp_path)) as writer:
        for step, row in rows:
            for name, value in (row | {"step": step, "examples": 32.0 * step}).items():
                writer.add_scalar(f"noise_scale/{name}", value, step - 1)

    read = read_run(tmp_path)

    assert read["step"].tolist() == [1, 2, 3]
    assert read["noise_scale"] == pytest.approx([math.nan, 14, math.nan], nan_ok=True)
    assert read["high"].tolist() == [math.inf, 20, math.inf]


def test_scalars_that_were_written_as_tensors_are_read_without_a_word(tmp_path: Path) -> None:
    """As TensorFlow's writers and TensorBoard's newer ones do it."""
    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in {"step": 1, "examples": 32.0, **ROW}.items():
            writer.add_scalar(f"noise_scale/{name}", value, 0, new_style=True)

    with TestCase().assertNoLogs("tensorboard", logging.INFO):
        read = read_run(tmp_path)
        assert logging.getLogger("tensorboard").level == logging.INFO

    assert (read["step"].tolist(), read["noise_scale"].tolist()) == ([1], [14])


def test_each_optimizer_of_a_run_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), **{"optimizer_1/step": 1, "optimizer_1/examples": 32.0,
          "optimizer_1/batch_size": 8.0, "optimizer_1/lower_bound": 3.0})  # fmt: skip

    assert read_run(tmp_path)["low"].tolist() == [10, 10, 10]
    assert read_run(tmp_path, optimizer=1)["low"].tolist() == [3]  # of one step, the last
    message = (
        f"`optimizer` must be the number of an optimizer that was measured in {tmp_path}, got 2."
        " Leave it out for the first optimizer."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_run(tmp_path, optimizer=2)


@pytest.mark.parametrize("logged", ["tensorboard", "csv"])
def test_each_monitor_of_a_run_can_be_read(tmp_path: Path, logged: str) -> None:
    row = {"step": 1, "examples": 32.0, "batch_size": 8.0, "lower_bound": 3.0}
    named = {f"{name}/{key}": value for name in ("wide", "a b/optimizer_1")
             for key, value in row.items()}  # fmt: skip
    if logged == "csv":
        header, cells = zip(*named.items(), strict=True)
        lines = [",".join(f"noise_scale/{key}" for key in header), ",".join(map(str, cells))]
        (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    else:
        write(tmp_path, range(1, 4), **named)

    assert read_run(tmp_path, monitor="wide")["low"].tolist() == [3]
    assert read_run(tmp_path, monitor="a b", optimizer=1)["low"].tolist() == [3]
    message = (
        f"`monitor` must be the name of a monitor in {tmp_path}, got 'narrow'. Its monitors: 'a b',"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)} 'wide'"):
        read_run(tmp_path, monitor="narrow")
    with pytest.raises(ValueError, match="`optimizer` must be the number of an optimizer that was"):
        read_run(tmp_path, monitor="wide", optimizer=2)
    if logged == "csv":
        with pytest.raises(
            ValueError, match=r"must be the name of a monitor in .*, got None\. Its monitors: "
        ):
            read_run(tmp_path)


def test_a_truncated_file_is_told_and_read_on_request(tmp_path: Path) -> None:
    file = write(tmp_path, range(1, 101))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ValueError, match=r"must end with a whole record, got \d+ bytes") as told:
        read_run(tmp_path)
    read = read_run(tmp_path, allow_truncated=True)

    (step,) = re.findall(r"\(step (\d+)\)", str(told.value))
    assert int(step) in (len(read["step"]) - 1, len(read["step"]))  # Lightning's begin with 0

    assert 40 < len(read["step"]) < 60
    assert read["step"].tolist() == list(range(1, len(read["step"]) + 1))


def test_a_flipped_bit_is_told(tmp_path: Path) -> None:
    """TensorBoard's own readers stop there without a word."""
    file = write(tmp_path, range(1, 101))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    silent = EventAccumulator(str(tmp_path)).Reload().Scalars("noise_scale/step")

    for allowed in (False, True):
        with pytest.raises(ValueError, match=r"must have whole events, got a damaged one after "):
            read_run(tmp_path, allow_truncated=allowed)

    assert len(silent) < 60


@pytest.mark.parametrize(
    ("name", "place", "told"),
    [
        (b"noise_scale/examples", -5, True),  # the last byte of the content, within the number
        (b"noise_scale/examples", 0, True),  # of the length
        (b"loss", -5, True),  # may hide one of ours
        (b"picture", -100, False),
        (b"picture", 0, True),
    ],
)
def test_a_flipped_bit_matters_wherever_it_may_hide_a_number(
    tmp_path: Path, name: bytes, place: int, told: bool
) -> None:
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

    if told:
        with pytest.raises(ValueError, match=r"must have whole events, got a damaged one after "):
            read_run(tmp_path)
    else:
        assert read_run(tmp_path)["step"].tolist() == [1, 2]


def frames(content: bytes) -> Iterator[tuple[int, int]]:
    """Where each record begins, with its length and the checksum of it, and where it ends."""
    begin = 0
    while begin < len(content):
        end = begin + 16 + int.from_bytes(content[begin : begin + 8], "little")
        yield begin, end
        begin = end


def test_runs_that_hold_nothing_are_refused_with_the_remedy(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "events.out.tfevents.1").touch()
    other = tmp_path / "other"
    with SummaryWriter(str(other)) as writer:
        writer.add_scalar("loss", 1.0, 0)
    broken = write(tmp_path / "nan", range(1, 4), batch_size=math.nan)
    (tmp_path / "nothing").mkdir()
    for path, message in (
        (
            empty,
            f"`{empty}/events.out.tfevents.1` must contain events, got 0 bytes without a whole"
            " event. Name the folder of a run that was logged.",
        ),
        (
            other,
            f"`{other}` must be a run with NoiseScaleMonitor, got no metric noise_scale/step (other"
            " metrics are loss). Add `NoiseScaleMonitor()` to the callbacks of the Trainer.",
        ),
        (
            broken,
            f"`noise_scale/batch_size` must be finite, got nan at step 0 of {broken}."
            " NoiseScaleMonitor only logs finite values: correct the program that wrote the file.",
        ),
        (
            tmp_path / "nothing",
            f"`{tmp_path}/nothing` must contain a run, got no noise_scale.jsonl, no event"
            " file of TensorBoard and no metrics.csv. Name the folder that the logger wrote to, for"
            " example lightning_logs/version_0.",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            read_run(path)
    with pytest.raises(FileNotFoundError, match=r"^`run` must be a folder or a file, got "):
        read_run(tmp_path / "missing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "epoch,loss\n0,1.0\n",
            "`{path}` must be a run with NoiseScaleMonitor, got no metric noise_scale/step (other"
            " metrics are epoch, loss). Add `NoiseScaleMonitor()` to the callbacks of the Trainer.",
        ),
        (
            "step,noise_scale/step\n0,1,2\n",
            "`{path}` must have 2 cells in each line, got 3 in line 2. The line may have a comma"
            " within a number, be damaged, or not be complete yet. Correct or remove it.",
        ),
        (
            "step,noise_scale/step\n0,nan\n",
            "`noise_scale/step` must be finite, got nan in line 2 of {path}. NoiseScaleMonitor"
            " only logs finite values: correct the program that wrote the file.",
        ),
    ],
)
def test_csv_files_that_are_no_run_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(content)

    with pytest.raises(ValueError, match=f"^{re.escape(message.format(path=path))}$"):
        read_run(path)


def test_an_event_file_that_has_just_begun_is_none_of_a_run_without_a_monitor(
    tmp_path: Path,
) -> None:
    (tmp_path / "events.out.tfevents.1").touch()

    with pytest.raises(Refusal) as refused:
        read_run(tmp_path, allow_truncated=True)

    assert refused.value.word == "empty"
    assert refused.value.got == "a log without metrics"


@pytest.mark.parametrize("run", ["plain", "grown", "transformers", "with_pictures", "two_monitors"])
def test_every_number_is_the_one_that_tensorboard_reads(run: str) -> None:
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
    """A killed run leaves it. A number in it may have lost its end."""
    names = ("step", "examples", "batch_size")
    rows = [",".join(f"noise_scale/{name}" for name in names), "1,32,32", "2,64,32", "3,96,3"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))

    with pytest.warns(UserWarning, match=r"metrics\.csv ends within line 4, .* The line is left"):
        read = read_run(tmp_path)

    assert read["step"].tolist() == [1, 2]


def test_a_run_is_predicted_from_by_the_name_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, range(1, 20))

    by_path, by_name, read = (
        predict(run).to_json() for run in (tmp_path, str(tmp_path), read_run(tmp_path))
    )

    assert by_path == by_name == read
