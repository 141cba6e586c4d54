# SPDX-License-Identifier: Apache-2.0
"""The record of a run: what is written is read back, whatever happened while it was written."""

import io
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noisescale import History, predict
from noisescale.history.document import document_of, restore, round_row
from noisescale.history.history import LEVELS
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_metric, read_run
from noisescale.history.record import Recorder
from noisescale.history.run_files import only_run_in

PREFIX = "noise_scale/"


class Written:
    """A run that records rows of 32 examples a step."""

    def __init__(self, folder: Path, prefix: str = PREFIX, **about: Any) -> None:
        self.history = History(**about)
        self.history.prefix = prefix
        self.recorder = Recorder(folder)

    def train(self, *steps: int, **changed: float) -> "Written":
        for step in steps:
            row = {"step": step, "examples": 32 * step, "batch_size": 32, "noise_scale": step / 3}
            row |= {"low": 1.0, "high": math.inf, "behind": 1.0} | changed
            row = round_row(row)
            try:
                self.recorder.add(self.history, row)
            finally:
                self.history.append(**row)
        return self

    def end(self) -> None:
        self.recorder.end(self.history)

    def resumed_in(self, folder: Path) -> "Written":
        other = Written(folder, self.history.prefix)
        restore(other.history, document_of(self.history))
        return other


def assert_same(read: History, own: History) -> None:
    for name in own:
        np.testing.assert_array_equal(read[name], own[name], err_msg=name)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    mix = OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 1 / 3)
    about: Any = {"unit": "sequences", "confidence": 0.9, "parameters": 7.0}
    run = Written(tmp_path, optimizer=mix, **about).train(10, 20, 30)

    read = read_run(tmp_path)

    assert_same(read, run.history)
    found = (read.unit, read.confidence, read.parameters, read.loop)
    assert found == ("sequences", 0.9, 7.0, "")
    assert read.optimizer == mix


def test_a_run_is_under_way_until_it_ends_or_its_next_row_is_late(tmp_path: Path) -> None:
    run = Written(tmp_path).train(10, 20)
    assert read_run(tmp_path).under_way

    late = time.time() - 61
    os.utime(run.recorder.path, (late, late))
    assert not read_run(tmp_path).under_way

    run.train(30)
    assert predict(read_run(tmp_path)).document().headline.startswith("So far, after 30 steps: ")
    run.end()
    assert not read_run(tmp_path).under_way
    assert len(read_run(tmp_path)) == 3

    run.resumed_in(tmp_path).train(40)  # it goes on from a checkpoint
    assert read_run(tmp_path).under_way


def test_a_fit_is_read_back_from_the_folder_of_each_logger(tmp_path: Path) -> None:
    from fits import both_loggers, fit, loader

    from noisescale import NoiseScaleMonitor

    (result,) = fit(
        NoiseScaleMonitor(groups=lambda name: name.split(".")[-1], unit="rows"),
        train_loader=loader(10, 200),
        accumulate_grad_batches=2,
        ranks=1,
        strategy="auto",
        logger=both_loggers(tmp_path),
        log_every_n_steps=3,
    )
    columns = {name: np.array(values) for name, values in result["history"].items()}
    own = History.from_columns(columns, optimizer=OptimizerMix(OptimizerKind.SGD), parameters=195.0)

    runs = [read_run(path) for path in (tmp_path / "board", tmp_path / "csv")]

    assert len(own) > 2
    for run in runs:
        assert_same(run, own)
        assert (run.unit, run.loop) == ("rows", "lightning")
        assert run.planned_steps == run.last_step
    runs[0].source, own.way = None, "Halves"
    assert predict(runs[0], unit="examples").to_dict() == predict(own).to_dict()
    steps, _ = read_metric(tmp_path / "csv", "noise_scale/batch_size")
    assert steps.tolist() == own["step"].tolist()


def test_what_was_trained_again_counts_once_and_so_does_what_was_abandoned(tmp_path: Path) -> None:
    """An attempt up to step 50 ends; it goes on from step 20, with rows at other steps."""
    first = Written(tmp_path).train(10, 20)
    second = first.resumed_in(tmp_path)
    first.train(30, 40, 50, low=9.0)

    second.train(35, 45)

    assert read_run(tmp_path)["step"].tolist() == [10, 20, 35, 45]
    assert read_run(tmp_path)["low"].tolist() == [1.0] * 4
    rows = second.recorder.path.read_text().count('"row"')
    assert rows == 5 + 2  # those up to step 20 are there already


def test_two_trainings_that_go_on_from_one_checkpoint_at_once_are_not_mixed(
    tmp_path: Path,
) -> None:
    """The training before still writes, too, as it was only taken for dead."""
    first = Written(tmp_path).train(10, 20)
    second, third = (first.resumed_in(tmp_path) for _ in range(2))
    second.train(30, low=2.0)
    third.train(30, low=3.0)

    for step in (40, 50):
        for low, run in ((1.0, first), (3.0, third), (2.0, second)):
            run.train(step, low=low * step)

    with pytest.warns(UserWarning, match="Several trainings wrote into"):
        read = read_run(tmp_path)
    assert_same(read, third.history)
    assert read["low"].tolist() == [1, 1, 3, 120, 150]


def test_a_gap_that_was_filled_is_no_gap(tmp_path: Path) -> None:
    """A copy without the rows in the middle was trained on, and then all rows came again."""
    run = Written(tmp_path).train(10, 20, 30)
    lines = run.recorder.path.read_text().splitlines(keepends=True)
    run.recorder.path.write_text("".join([*lines[:2], *lines[3:]]))

    run.train(40)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(read_run(tmp_path), run.history)


def test_a_run_that_goes_on_in_a_new_folder_has_all_its_rows_there(tmp_path: Path) -> None:
    first = Written(tmp_path / "a").train(10, 20)
    other = Written(tmp_path / "a", "noise_scale/wide/").train(10)
    second = first.resumed_in(tmp_path / "b")
    another = other.resumed_in(tmp_path / "b")

    second.train(30)
    another.train(30)

    assert_same(read_run(tmp_path / "b"), second.history)
    assert_same(read_run(tmp_path / "b", monitor="wide"), another.history)
    assert read_run(tmp_path / "a")["step"].tolist() == [10, 20]


def test_a_new_run_in_an_old_folder_takes_its_place(tmp_path: Path) -> None:
    Written(tmp_path).train(10, 20, 30)
    new = Written(tmp_path)
    new.history.loop = "transformers"

    new.train(10, 50)

    assert read_run(tmp_path)["step"].tolist() == [10, 50]
    assert read_run(tmp_path).loop == read_run(tmp_path).until(25).loop == "transformers"


def test_half_a_line_of_a_killed_run_is_left_out_and_cut_off_by_the_next(tmp_path: Path) -> None:
    run = Written(tmp_path).train(10, 20)
    with (tmp_path / "noise_scale.jsonl").open("a") as file:
        file.write('{"of": "noise_scale/", "unit": "exa')

    with pytest.warns(UserWarning, match=r"noise_scale.jsonl ends within line 4, as if the run"):
        assert read_run(tmp_path)["step"].tolist() == [10, 20]
    run.resumed_in(tmp_path).train(30)

    assert read_run(tmp_path)["step"].tolist() == [10, 20, 30]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nothing more fits on it than the half of what is written first."""

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            if len(content) < 40:
                raise OSError("no space left")
            return super().write(content[: len(content) // 2])

    @contextmanager
    def full() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda path, mode, **_: Full(path, mode))
            yield

    return full


def test_rows_that_cannot_be_written_are_written_when_there_is_room(
    tmp_path: Path, full_disk: Any
) -> None:
    """The disk is full in the middle of a line, for two rows of one monitor and one of another."""
    run, other = Written(tmp_path).train(10), Written(tmp_path, "noise_scale/wide/").train(10)
    before = run.recorder.path.read_bytes()

    for one, step in ((run, 20), (other, 20), (run, 30)):
        with full_disk(), pytest.raises(OSError, match="no space"):
            one.train(step)
        assert run.recorder.path.read_bytes() == before
    run.train(40)
    other.end()

    assert_same(read_run(tmp_path), run.history)
    assert_same(read_run(tmp_path, monitor="wide"), other.history)


def test_a_record_that_is_deleted_is_written_again_with_all_rows(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Written(folder).train(10, 20)

    for step in (30, 50):
        shutil.rmtree(folder)
        told = pytest.warns(UserWarning, match="was deleted while") if step == 30 else nullcontext()
        with told:
            run.train(step, step + 10)

    assert_same(read_run(folder), run.history)
    assert len(run.history) == 6


def test_why_the_noise_scale_is_withheld_is_read_also_from_before_the_first_row(
    tmp_path: Path,
) -> None:
    run = Written(tmp_path)
    run.history.withhold("rows are alike")
    run.recorder.note(run.history)
    run.train(10, 20)

    assert read_run(tmp_path).withheld == "rows are alike"
    assert read_run(tmp_path)["step"].tolist() == [10, 20]


def test_a_row_takes_under_300_bytes(tmp_path: Path) -> None:
    """With the numbers of a fit that are never the same, and a learning rate that falls."""
    rng = np.random.default_rng(0)
    run = Written(tmp_path, optimizer=OptimizerMix(OptimizerKind.ADAM), parameters=1e8)
    same = ("step", "peak_memory", "device_memory", "behind")
    names = [name for name in run.history if name not in (*same, *LEVELS)]
    for step in range(1, 301):
        row = {name: 1e3 * rng.standard_normal() for name in names}
        row |= {"devices": 8, "accumulation": 1, "skipped_steps": 0, "increment_measured_steps": 5}
        run.train(100_000 + 50 * step, **row | {"increment_weight": 320, "batch_size": 32})

    lines = run.recorder.path.read_text().splitlines(keepends=True)

    assert sum(map(len, lines)) < 300 * len(lines)
    assert_same(read_run(tmp_path), run.history)


def test_columns_may_come_and_change_from_row_to_row(tmp_path: Path) -> None:
    run = Written(tmp_path, extra_columns=["group/a"]).train(10, 20)
    run.train(30, devices=2.0)
    run.train(40, **{"group/a": 7.0})
    run.history.optimizer = OptimizerMix(OptimizerKind.SIGN)
    run.train(50, 60, devices=math.nan, batch_size=48)

    read = read_run(tmp_path)

    assert_same(read, run.history)
    assert read.optimizer == run.history.optimizer


def test_several_monitors_and_optimizers_share_a_record(tmp_path: Path) -> None:
    Written(tmp_path).train(10, 20)
    Written(tmp_path, "noise_scale/wide/optimizer_1/").train(10, 20, 30)

    assert read_run(tmp_path)["step"].tolist() == [10, 20]
    assert read_run(tmp_path, monitor="wide", optimizer=1)["step"].tolist() == [10, 20, 30]


def test_a_folder_with_a_record_alone_is_a_run(tmp_path: Path) -> None:
    """As W&B's are: runs without files of TensorBoard or of a CSVLogger."""
    Written(tmp_path / "wandb/run-1/files").train(10)
    (tmp_path / "wandb/run-1/run-1.wandb").touch()

    assert only_run_in(tmp_path) == tmp_path / "wandb/run-1/files"
    assert only_run_in(tmp_path / "wandb/run-1/files/noise_scale.jsonl") == only_run_in(tmp_path)
    assert read_run(tmp_path)["step"].tolist() == [10]
