# SPDX-License-Identifier: Apache-2.0
"""A run of two ranks that is killed (SIGKILL) and resumed is the run that was not."""

import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import trainer
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from ranks import as_torchrun, on_ranks, until_killed
from resumable import EPOCHS, Restless, Resumable, model

from noisescale import BatchSizeScheduler, NoiseScaleMonitor, predict
from noisescale.history.reading import read_run

pytestmark = pytest.mark.slow
SAVED_EVERY = 4
KILLED_BETWEEN = 9, 11
"""Steps between two saves. One of them is in mid-epoch: which one hangs on the last bits."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesBetweenSteps(L.Callback):
    """Kills some ranks in mid-epoch."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def on_train_batch_end(self, fitting: Any, module: Any, outputs: Any, *_: Any) -> None:
        first, last = KILLED_BETWEEN
        in_time = first <= fitting.global_step <= last and not fitting.is_last_batch
        if in_time and fitting.global_rank in self.ranks:
            die()


class DiesWhileSaving(L.Callback):
    """Kills rank 0 when a checkpoint is written to a temporary file, and not yet in its place."""

    def on_save_checkpoint(self, fitting: Any, module: Any, checkpoint: Any) -> None:
        if fitting.global_step > KILLED_BETWEEN[-1] and fitting.is_global_zero:
            LocalFileOpener.commit = lambda opened: die()


def train(folder: Path, version: str, *callbacks: L.Callback) -> dict[str, Any]:
    """Train from the last checkpoint in the folder on, if there is one."""
    monitor = NoiseScaleMonitor()
    options = {"lr_scaling": "sqrt", "progress": "examples", "max_batch_size": 160}
    scheduler = BatchSizeScheduler(Restless(), decide_every_n_steps=2, **options)
    save = ModelCheckpoint(
        folder / "saved", filename="{step}", save_last=True, every_n_train_steps=SAVED_EVERY
    )
    began: list[int] = []
    start = L.callbacks.LambdaCallback(
        on_train_start=lambda fitting, _: began.append(fitting.global_step)
    )
    module = model("cosine")
    fitting = trainer(
        2,
        strategy="ddp",
        callbacks=[scheduler, monitor, save, start, *callbacks],
        enable_checkpointing=True,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        max_epochs=EPOCHS,
        logger=[
            TensorBoardLogger(folder, name="board", version=""),
            CSVLogger(folder, name="csv", version=version),
        ],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*there is no last checkpoint available")
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
        fitting.fit(module, Resumable(), ckpt_path="last")
    return {
        "began": began[0],
        "parameters": [p.detach().clone() for p in module.parameters()],
        "optimizer": fitting.optimizers[0].state_dict(),
        "scheduler": scheduler.state_dict(),
        "moves": [str(move) for move in scheduler.moves],
        "meter": monitor.state_dict()["optimizers"][0]["meter"],
        "history": {k: v for k, v in monitor.history.items() if k != "seconds_per_step"},
        "noise_scale": str(monitor.noise_scale),
    }


def on_two_ranks(folder: Path, version: str = "first", *callbacks: L.Callback) -> Any:
    return on_ranks(2, as_torchrun(lambda: train(folder, version, *callbacks)))


class Uninterrupted(NamedTuple):
    folder: Path
    ranks: list[dict[str, Any]]
    predicted: list[Any]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("whole")
    return Uninterrupted(folder, on_two_ranks(folder), predicted(folder / "board"))


@pytest.mark.parametrize(
    ("killer", "grace", "last_save"),
    [
        (DiesBetweenSteps(0, 1), 0.0, 8),
        (DiesBetweenSteps(1), 3.0, 8),  # rank 0 finds its connection closed
        (DiesWhileSaving(), 0.0, 8),
    ],
    ids=["all ranks in mid-epoch", "one rank in mid-epoch", "while saving"],
)
def test_a_killed_run_that_is_resumed_is_the_run_that_was_not(
    killer: L.Callback,
    grace: float,
    last_save: int,
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = uninterrupted
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a killed rank leaves things
    until_killed(2, as_torchrun(lambda: train(tmp_path, "first", killer)), grace=grace)
    on_disk = read_run(tmp_path / "csv/first")["step"].tolist()
    saved = torch.load(tmp_path / "saved/last.ckpt", weights_only=False)["global_step"]
    assert last_save <= saved < last_save + SAVED_EVERY  # early versions save at epoch ends, too

    resumed = on_two_ranks(tmp_path, "second")

    # A checkpoint that is half written is not found: the one before it is in its place.
    steps = len(whole.ranks[0]["history"]["step"])
    last = f"step={steps // SAVED_EVERY * SAVED_EVERY}.ckpt"
    assert sorted(path.name for path in tmp_path.glob("saved/*")) == ["last.ckpt", last]
    for ours, theirs in zip(resumed, whole.ranks, strict=True):
        assert (ours.pop("began"), theirs["began"]) == (saved, 0)
        moves = ours.pop("moves")
        assert len(moves) > 2
        assert moves == theirs["moves"]  # also those before the checkpoint
        assert ours["history"]["step"].tolist() == list(range(1, steps + 1))
        for name, value in ours.items():
            np.testing.assert_equal(plain(value), plain(theirs[name]))
    # Whatever a checkpoint goes on from has been logged, what was trained twice counts once, and a
    # new folder has the rows before, too.
    assert on_disk[:saved] == list(range(1, saved + 1))
    assert untimed(tmp_path / "csv/second") == untimed(whole.folder / "csv")
    assert untimed(tmp_path / "board") == untimed(whole.folder / "board")
    assert predicted(tmp_path / "board") == whole.predicted


def untimed(folder: Path) -> dict[str, list[float]]:
    """What is read back of a run, but for the clock's."""
    history = read_run(folder)
    columns = {k: v.tolist() for k, v in history.items() if k != "seconds_per_step"}
    return {name: [repr(value) for value in values] for name, values in columns.items()}


def predicted(folder: Path) -> list[Any]:
    """What does not depend on the clock."""
    record = predict(read_run(folder), [32, 64, 128]).to_dict()
    of_rows = [[row[key] for key in ("batch_size", "steps", "examples")] for row in record["rows"]]
    return [of_rows, record["critical_batch_size"], record["tradeoff"], record["resolved"]]


def plain(value: Any) -> Any:
    """Tensors as arrays, which numpy compares bit by bit, in whatever they are."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        # The pace of measuring has the seconds of a step.
        return {key: plain(one) for key, one in value.items() if key != "pace"}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value
