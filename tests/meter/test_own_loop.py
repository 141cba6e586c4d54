# SPDX-License-Identifier: Apache-2.0
"""`NoiseScaleMeter(log_to=...)`: what a loop of one's own leaves is read as a Trainer's run is."""

import math
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fits import data, loss_of, network
from ranks import on_ranks
from refused import refused
from tiers import slow
from torch.nn.parallel import DistributedDataParallel

from noisescale import History, NoiseScaleMeter, predict
from noisescale.extras import MissingExtraError
from noisescale.history import event_file, record
from noisescale.history.following import FollowedRun
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_metric, read_run
from noisescale.lab.compare.reading import read_trials
from noisescale.meter import noise_scale_meter
from noisescale.meter.step_timer import StepTimer
from noisescale.prediction.closing import closing_lines

DATA, LABELS = data(4000).tensors


class Loop:
    """Two micro-batches of 8 a step in one process, as nanoGPT trains."""

    def __init__(self, log_to: Path | None, **options: Any) -> None:
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options = {"every_n_steps": 1, "log_every_n_steps": 10, "unit": "sequences"} | options
        self.meter = NoiseScaleMeter(self.model, optimizer=self.optimizer, log_to=log_to, **options)
        self.parts = self.model, self.optimizer, self.meter

    def train(self, steps: int, *, close: bool = True) -> "Loop":
        for step in range(self.meter.steps, self.meter.steps + steps):
            self.step(step, self.meter.backward)
            if self.meter.steps % 5 == 0:
                self.meter.log(loss=torch.tensor(1 / self.meter.steps))
        if close:
            self.meter.close()
        return self

    def step(self, step: int, backward: Callable[[torch.Tensor, int], None] | None) -> None:
        self.optimizer.zero_grad()
        for part in range(2):
            rows = slice(16 * step + 8 * part, 16 * step + 8 * part + 8)
            loss = loss_of(self.model, [DATA[rows], LABELS[rows]]) / 2
            if backward is None:
                loss.backward()
            else:
                backward(loss, 8)
        if backward is not None:
            self.meter.step()
        self.optimizer.step()


def assert_same(read: History, own: History, *, but: tuple[str, ...] = ()) -> None:
    for name in own:
        if name not in but:
            expected = np.where(np.isnan(own[name]) & (name == "high"), math.inf, own[name])
            np.testing.assert_array_equal(read[name], expected, err_msg=name)


def test_closing_prints_the_verdict_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(tmp_path).train(20)

    said = closing_lines([loop.meter.history], tmp_path)
    assert capsys.readouterr().out == f"NoiseScaleMeter: {said}\n"


@pytest.mark.parametrize(("finds_savings", "cost"), [(False, 0.125), (True, 0.125 / 8)])
def test_by_the_hosts_clock_measuring_never_gets_cheaper(
    finds_savings: bool, cost: float, tmp_path: Path
) -> None:
    timed = {"mean": 0.1, "costs": [0.001] * 8, "finds_savings": finds_savings}
    with mock.patch.multiple(StepTimer, **timed):
        loop = Loop(tmp_path).train(60, close=False)

    assert loop.meter._cost == cost
    loop.meter.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def meter(folder: Path) -> NoiseScaleMeter:
    """Of a loop of 45 steps."""
    loop = Loop(folder, window=20)
    says = f"NoiseScaleMeter(window=20, unit='sequences', every_n_steps=1, log_to='{folder}',"
    assert repr(loop.meter) == f"{says} log_every_n_steps=10): nothing measured yet"
    return loop.train(45).meter


def test_what_a_loop_logs_is_read_as_its_history(folder: Path, meter: NoiseScaleMeter) -> None:
    read = read_run(folder)

    assert meter.history["step"].tolist() == [10, 20, 30, 40, 45]
    assert meter.history["examples"].tolist() == [160, 320, 480, 640, 720]
    assert read.loop == "own"
    assert_same(read, meter.history)
    assert not read.under_way
    assert (read.unit, read.optimizer) == ("sequences", OptimizerMix(OptimizerKind.ADAM))
    assert np.isfinite(read["seconds_per_step"]).all()
    assert read["learning_rate"].tolist() == [0.01] * 5
    assert predict(folder).to_json() == predict(meter).to_json()
    watched = FollowedRun(folder)
    assert watched.read()
    assert_same(watched.history, meter.history)
    assert re.search(r"\): (above )?[\d.]+ sequences .*at step 45", repr(meter))


def test_event_files_have_metrics_for_a_person(folder: Path, meter: NoiseScaleMeter) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    assert {tag.removeprefix("noise_scale/") for tag in tags} <= {
        *("simple", "simple_low", "simple_high", "efficiency", "lower_bound", "grad_sq_norm"),
        *("noise_trace", "batch_size", "seconds_per_step", "skipped_steps", "loss"),
    }
    logged = meter.history["step"].tolist()
    assert [event.step for event in events.Scalars("noise_scale/batch_size")] == logged
    bounds = [event.value for event in events.Scalars("noise_scale/lower_bound")]
    assert bounds == pytest.approx(meter.history["low"])
    assert read_metric(folder, "loss")[0].tolist() == [*range(5, 46, 5)]


def test_a_loop_that_still_trains_is_read_so_far_with_the_user_s_own_writer(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    loop = Loop(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (10, 20, 30):
            loop.train(10, close=False)
            writer.add_scalar("val/loss", 1 / step, step)
    before = read_run(tmp_path)
    loop.meter.close()
    loop.meter.close()

    assert before.under_way
    assert not read_run(tmp_path).under_way
    assert (tmp_path / "noise_scale.jsonl").read_text().count("ended") == 1
    steps, values = read_metric(tmp_path, "val/loss")
    assert steps.tolist() == [10, 20, 30]
    assert values == pytest.approx(1 / steps)


def test_loops_are_compared_by_what_they_logged(folder: Path, meter: NoiseScaleMeter) -> None:
    (trial,) = read_trials(folder, "loss")

    found = trial.measurements
    assert (trial.batch_size, trial.learning_rate) == (16, pytest.approx(0.01))
    assert found.steps.tolist() == [*range(5, 46, 5)]
    assert found.examples.tolist() == [16 * step for step in found.steps]


def test_rank_zero_writes_alone_and_all_ranks_have_the_history(tmp_path: Path) -> None:
    def trained() -> tuple[list[float], bool]:
        rank = torch.distributed.get_rank()
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"optimizer": optimizer, "every_n_steps": 1, "log_every_n_steps": 4}
        meter = NoiseScaleMeter(model, log_to=tmp_path, **options)
        for step in range(10):
            rows = slice(16 * step + 8 * rank, 16 * step + 8 * rank + 8)
            meter.backward(loss_of(model, [DATA[rows], LABELS[rows]]), local_batch_size=8)
            meter.step()
            meter.log(loss=1.0)
            model.zero_grad()
        meter.close()
        return meter.history["low"].tolist(), "_events" in vars(meter)

    (low, wrote), (other_low, other_wrote) = on_ranks(2, trained)

    assert low == other_low
    assert (wrote, other_wrote) == (True, False)
    assert len([*tmp_path.glob("events*")]) == 1
    read = read_run(tmp_path)
    assert read["step"].tolist() == [4, 8, 10]
    assert read["low"].tolist() == low
    assert read["devices"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("place", ["same", slow("new")])
def test_a_loop_that_goes_on_leaves_the_same(tmp_path: Path, meter: Any, place: str) -> None:
    """It was saved at step 25, went on to 35 and was killed."""
    first = Loop(tmp_path / "same", window=20).train(25, close=False)
    torch.save([part.state_dict() for part in first.parts], tmp_path / "state.pt")
    first.train(10, close=False)

    resumed = Loop(tmp_path / place, window=20)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    for part, state in zip(resumed.parts, saved, strict=True):
        part.load_state_dict(state)
    resumed.train(20)

    untimed = ("seconds_per_step",)
    assert_same(read_run(tmp_path / place), meter.history, but=untimed)
    assert_same(resumed.meter.history, meter.history, but=untimed)


def test_a_disk_that_is_full_for_some_time_is_one_warning_and_rows_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 10 to 25, and in another run to its end."""
    plain = Loop(None)
    for step in range(40):
        plain.step(step, None)

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loops = [Loop(tmp_path / name).train(10, close=False) for name in ("some", "long")]
        with monkeypatch.context() as full:
            for module in (record, event_file):
                full.setattr(module, "append_whole", fails)
            loops[0].train(15, close=False)
            loops[1].train(30)
        loops[0].train(15)

    told = [str(w.message) for w in caught]
    assert [sum(f"{tmp_path}/{name} until" in text for text in told) for name in ("some", "long")]
    assert len(told) == 2
    assert read_run(tmp_path / "some")["step"].tolist() == [10, 20, 30, 40]
    assert read_run(tmp_path / "long")["step"].tolist() == [10]
    assert read_metric(tmp_path / "some", "loss")[0].tolist() == [*range(5, 41, 5)]
    for loop in loops:
        assert loop.meter.history["step"].tolist() == [10, 20, 30, 40]
        assert all(map(torch.equal, loop.model.parameters(), plain.model.parameters()))


def test_a_folder_that_is_deleted_is_one_warning_and_has_all_rows(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run").train(20, close=False)

    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match="was deleted while the run trained"):
        loop.train(15)

    assert_same(read_run(tmp_path / "run"), loop.meter.history)
    assert read_metric(tmp_path / "run", "loss")[0][-3:].tolist() == [25, 30, 35]


def test_a_folder_that_cannot_be_made_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = Loop(tmp_path / "file/runs").train(30)

    assert len([w for w in caught if f"{tmp_path}/file/runs" in str(w.message)]) == 1
    assert loop.meter.history["step"].tolist() == [10, 20, 30]


def test_without_tensorboard_the_record_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    loop = Loop(tmp_path, log_every_n_steps=2)

    def missing(*_: str) -> None:
        raise MissingExtraError("tensorboard")

    monkeypatch.setattr(noise_scale_meter, "is_installed", lambda _: False)
    loop.train(4, close=False)
    monkeypatch.setattr(noise_scale_meter, "need", missing)
    with pytest.raises(MissingExtraError):
        loop.meter.log(loss=1.0)
    loop.meter.close()

    assert [path.name for path in tmp_path.iterdir()] == ["noise_scale.jsonl"]
    assert read_run(tmp_path)["step"].tolist() == [2, 4]


def test_a_pause_is_left_out_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("noisescale.meter.step_timer.time", clock)
    loop = Loop(None)

    for step in range(10):
        loop.step(step, loop.meter.backward)
        now[0] += 0.01
        if step == 4:
            loop.meter.pause()
            now[0] += 1000
            loop.meter.resume()

    assert loop.meter.history["seconds_per_step"][0] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [("log_to", 5), ("log_to", "s3://bucket/a"), ("log_to", __file__), ("log_every_n_steps", 0)],
)
def test_bad_arguments_are_refused_before_a_hook_is_set(argument: str, wrong: Any) -> None:
    model = network()

    with refused(argument):
        NoiseScaleMeter(model, **{argument: wrong})

    assert not any(p._backward_hooks for p in model.parameters())
    with refused("log_to"):  # metrics need a folder
        NoiseScaleMeter(model).log(loss=1.0)
