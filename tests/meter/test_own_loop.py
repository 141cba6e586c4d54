# SPDX-License-Identifier: Apache-2.0
"""`NoiseScaleMeter(log_to=...)`: what a loop of one's own leaves is read as a Trainer's run is."""

import math
import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fits import data, loss_of, network
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from noisescale import History, NoiseScaleMeter, compare, predict
from noisescale.extras import MissingExtraError
from noisescale.history.following import FollowedRun
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_metric, read_run
from noisescale.lab.compare.reading import read_trials
from noisescale.meter import noise_scale_meter
from noisescale.refusal import Refusal

DATA, LABELS = data(4000).tensors


class Loop:
    """Two micro-batches of 8 a step in one process, as nanoGPT trains."""

    def __init__(self, log_to: Path | None, **options: Any) -> None:
        self.model = network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options = {"every_n_steps": 1, "log_every_n_steps": 10, "unit": "sequences"} | options
        self.meter = NoiseScaleMeter(self.model, optimizer=self.optimizer, log_to=log_to, **options)

    def train(self, steps: int, *, close: bool = True) -> "Loop":
        for step in range(self.meter.steps, self.meter.steps + steps):
            self.optimizer.zero_grad()
            for part in range(2):
                rows = slice(16 * step + 8 * part, 16 * step + 8 * part + 8)
                loss = loss_of(self.model, [DATA[rows], LABELS[rows]]) / 2
                self.meter.backward(loss, local_batch_size=8)
            self.meter.step()
            self.optimizer.step()
            if self.meter.steps % 5 == 0:
                self.meter.log(loss=2 * loss.detach())
        if close:
            self.meter.close()
        return self

    def state(self) -> dict[str, Any]:
        parts = self.model, self.optimizer, self.meter
        return {"parts": [part.state_dict() for part in parts]}

    def goes_on_from(self, state: dict[str, Any]) -> "Loop":
        for part, saved in zip((self.model, self.optimizer, self.meter), state["parts"],
                               strict=True):  # fmt: skip
            part.load_state_dict(saved)
        return self


def assert_same(read: History, own: History, *, but: tuple[str, ...] = ()) -> None:
    for name in own:
        if name not in but:
            expected = np.where(np.isnan(own[name]) & (name == "high"), math.inf, own[name])
            np.testing.assert_array_equal(read[name], expected, err_msg=name)


def test_what_a_loop_logs_is_read_as_the_history_of_its_meter(tmp_path: Path) -> None:
    meter = Loop(tmp_path).train(45).meter

    read = read_run(tmp_path)

    assert meter.history["step"].tolist() == [10, 20, 30, 40, 45]
    assert meter.history["examples"].tolist() == [160, 320, 480, 640, 720]
    assert read.loop == "own"
    assert_same(read, meter.history)
    assert not read.under_way
    assert (read.unit, read.optimizer) == ("sequences", OptimizerMix(OptimizerKind.ADAM))
    assert np.isfinite(read["seconds_per_step"]).all()
    assert read["learning_rate"].tolist() == [0.01] * 5
    assert predict(tmp_path).to_json() == predict(meter).to_json()
    assert "sequences" in predict(tmp_path).to_text()
    watched = FollowedRun(tmp_path)
    assert watched.read()
    assert watched.history is not None
    assert_same(watched.history, meter.history)


def test_event_files_have_what_a_person_looks_at_and_other_metrics(tmp_path: Path) -> None:
    meter = Loop(tmp_path).train(40).meter

    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()["scalars"]
    assert {tag.removeprefix("noise_scale/") for tag in tags} <= {
        *("simple", "simple_low", "simple_high", "efficiency", "lower_bound", "grad_sq_norm"),
        *("noise_trace", "batch_size", "seconds_per_step", "skipped_steps", "loss"),
    }
    assert [event.step for event in events.Scalars("noise_scale/batch_size")] == [10, 20, 30, 40]
    bounds = [event.value for event in events.Scalars("noise_scale/lower_bound")]
    assert bounds == pytest.approx(meter.history["low"])
    steps, _ = read_metric(tmp_path, "loss")
    assert steps.tolist() == [5, 10, 15, 20, 25, 30, 35, 40]


def test_the_user_s_own_writer_in_the_same_folder_is_read_too(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (10, 20, 30):
            loop.train(10, close=False)
            writer.add_scalar("val/loss", 1 / step, step)
    loop.meter.close()

    steps, values = read_metric(tmp_path, "val/loss")

    assert steps.tolist() == [10, 20, 30]
    assert values == pytest.approx(1 / steps)


def test_a_loop_that_still_trains_is_read_so_far(tmp_path: Path) -> None:
    loop = Loop(tmp_path).train(20, close=False)
    before = read_run(tmp_path)
    loop.meter.close()
    loop.meter.close()

    assert before.under_way
    assert not read_run(tmp_path).under_way
    assert (tmp_path / "noise_scale.jsonl").read_text().count("ended") == 1


def test_loops_are_compared_by_what_they_logged(tmp_path: Path) -> None:
    for name in ("one", "other"):
        Loop(tmp_path / name).train(40)

    (trial,) = read_trials(tmp_path / "one", "loss")
    text = compare([tmp_path / "one", tmp_path / "other"], goal="loss<=100").to_text()

    found = trial.measurements
    assert (trial.batch_size, trial.learning_rate) == (16, pytest.approx(0.01))
    assert found.steps.tolist() == [5, 10, 15, 20, 25, 30, 35, 40]
    assert found.examples.tolist() == [16 * step for step in found.steps]
    assert "one" in text
    assert "other" in text


def test_rank_zero_writes_alone_and_all_ranks_have_the_history(tmp_path: Path) -> None:
    def trained() -> tuple[list[float], bool]:
        rank = torch.distributed.get_rank()
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = NoiseScaleMeter(
            model, optimizer=optimizer, log_to=tmp_path, every_n_steps=1, log_every_n_steps=4
        )
        for step in range(10):
            optimizer.zero_grad()
            rows = slice(16 * step + 8 * rank, 16 * step + 8 * rank + 8)
            meter.backward(loss_of(model, [DATA[rows], LABELS[rows]]), local_batch_size=8)
            meter.step()
            optimizer.step()
            meter.log(loss=1.0)
        meter.close()
        return meter.history["low"].tolist(), "_writer" in vars(meter)

    (low, wrote), (other_low, other_wrote) = on_ranks(2, trained)

    assert low == other_low
    assert (wrote, other_wrote) == (True, False)
    assert len([*tmp_path.glob("events*")]) == 1
    read = read_run(tmp_path)
    assert read["step"].tolist() == [4, 8, 10]
    assert read["low"].tolist() == low
    assert read["devices"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("place", ["same", "new"])
def test_a_loop_that_goes_on_leaves_what_one_that_was_not_ended_leaves(
    tmp_path: Path, place: str
) -> None:
    """It was saved at step 25, went on to 35 and was killed."""
    whole = Loop(tmp_path / "whole").train(60).meter
    first = Loop(tmp_path / "same").train(25, close=False)
    state = torch.load(saved(first.state(), tmp_path), weights_only=True)
    first.train(10, close=False)

    resumed = Loop(tmp_path / place).goes_on_from(state).train(35).meter

    untimed = ("seconds_per_step",)
    assert_same(read_run(tmp_path / place), whole.history, but=untimed)
    assert_same(resumed.history, whole.history, but=untimed)


def saved(state: dict[str, Any], folder: Path) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def test_a_folder_that_cannot_be_written_is_one_warning_and_training_goes_on(
    tmp_path: Path,
) -> None:
    plain = Loop(None)
    for step in range(30):
        plain.optimizer.zero_grad()
        for part in range(2):
            rows = slice(16 * step + 8 * part, 16 * step + 8 * part + 8)
            (loss_of(plain.model, [DATA[rows], LABELS[rows]]) / 2).backward()
        plain.optimizer.step()
    (tmp_path / "file").touch()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = Loop(tmp_path / "file/runs").train(30)

    told = [str(w.message) for w in caught if "missing in" in str(w.message)]
    assert len(told) == 3  # rows, the noise scale in event files, the loss: one each
    assert all(f"{tmp_path}/file/runs" in message for message in told)
    assert loop.meter.history["step"].tolist() == [10, 20, 30]
    for ours, theirs in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_tensorboard_the_record_alone_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_pause_is_left_out_of_the_times(tmp_path: Path) -> None:
    loop = Loop(None, log_every_n_steps=10)

    for _ in range(2):
        train_without_log(loop, 5)
        loop.meter.pause()
        time.sleep(0.5)
        loop.meter.resume()

    assert loop.meter.history["seconds_per_step"][0] < 0.1


def train_without_log(loop: Loop, steps: int) -> None:
    for step in range(loop.meter.steps, loop.meter.steps + steps):
        rows = slice(16 * step, 16 * step + 16)
        loop.optimizer.zero_grad()
        loop.meter.backward(loss_of(loop.model, [DATA[rows], LABELS[rows]]), local_batch_size=16)
        loop.meter.step()
        loop.optimizer.step()


def test_the_meter_says_what_it_is_and_what_it_measured(tmp_path: Path) -> None:
    loop = Loop(tmp_path, window=20)
    before = repr(loop.meter)

    loop.train(40)

    shown = f"NoiseScaleMeter(window=20, unit='sequences', every_n_steps=1, log_to='{tmp_path}',"
    assert before == f"{shown} log_every_n_steps=10): nothing measured yet"
    after = repr(loop.meter).removeprefix(f"{shown} log_every_n_steps=10): ")
    assert re.fullmatch(r"(above )?[\d.]+ sequences .*at step 40.*", after)


@pytest.mark.parametrize(
    ("options", "argument", "requirement"),
    [
        ({"log_to": 5}, "log_to", "be the path of a folder"),
        ({"log_to": "s3://bucket/a"}, "log_to", "be a folder of this machine"),
        ({"log_to": __file__}, "log_to", "be a folder of this machine"),
        ({"log_every_n_steps": 0}, "log_every_n_steps", "be a positive whole number"),
    ],
)
def test_bad_arguments_are_refused_before_a_hook_is_set(
    options: dict[str, Any], argument: str, requirement: str
) -> None:
    model = network()

    with pytest.raises(Refusal) as refused:
        NoiseScaleMeter(model, **options)

    assert (refused.value.arguments, refused.value.requirement) == ((argument,), requirement)
    assert not any(p._backward_hooks for p in model.parameters())


def test_metrics_without_a_folder_are_refused() -> None:
    with pytest.raises(Refusal, match="`log_to` must be given to log metrics"):
        NoiseScaleMeter(network()).log(loss=1.0)
