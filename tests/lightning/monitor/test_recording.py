# SPDX-License-Identifier: Apache-2.0
"""The record of a fit: where it is, who gets it, and when."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import fit_here, loader, loss_of, network
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from refused import refused

from noisescale import History, NoiseScaleMonitor, predict, read_run
from noisescale.lightning import trainer_access

RECORD = "noise_scale.jsonl"


class Ends(L.Callback):
    """An error in the middle of a fit."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, idx: int) -> None:
        if idx == 9:
            raise RuntimeError("the device is gone")


def assert_same(found: History, own: History) -> None:
    assert len(found) == len(own) > 0
    for name in own:
        np.testing.assert_array_equal(found[name], own[name], err_msg=name)


def test_without_a_logger_the_record_is_beside_the_checkpoints_and_in_each(tmp_path: Path) -> None:
    """One document in all places, with what the run is at 50 % confidence."""
    monitor = NoiseScaleMonitor(confidence=0.5, unit="rows", every_n_steps=1)

    fit_here(
        *(monitor, ModelCheckpoint(tmp_path / "kept", every_n_train_steps=10, save_top_k=-1)),
        enable_checkpointing=True,
        log_every_n_steps=5,
    )

    beside = read_run(tmp_path)
    (path,) = (tmp_path / "kept").glob("*step=10.ckpt")
    saved = read_run(path)
    assert beside.source == tmp_path / "kept"
    assert_same(beside, monitor.history)
    assert_same(saved, monitor.history.until(float(saved["step"][-1])))
    for history in (beside, saved):
        assert (history.unit, history.confidence, history.loop) == ("rows", 0.5, "lightning")
        assert (history.run, history.way) == (monitor.history.run, "Halves")
    assert "50 % " in predict(path).to_text(details=True)
    assert "95 % interval" not in predict(path).to_text(details=True)


def test_without_logger_and_checkpoints_the_monitor_has_it() -> None:
    monitor = NoiseScaleMonitor(every_n_steps=1)

    fit_here(monitor, log_every_n_steps=1)

    assert predict(monitor).own_batch_size == 8


class Tracker(CSVLogger):
    """One that keeps files with its runs on a server, as those of W&B and MLflow do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "", "")
        self.given: list[tuple[int, bool]] = []
        self.run_id, self.disabled, self.dir = "a1", False, str(folder)

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(
            log_artifact=lambda run, path: self._take(Path(path)),
            save=lambda path, base_path, policy: self._take(Path(path)),
            dir=self.dir,
            disabled=False,
        )

    def _take(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line["row"][0] for line in lines if "row" in line]
        self.given.append((len(steps), any("ended" in line for line in lines)))

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def save(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["WANDB_LOGGERS", "MLFLOW_LOGGERS"])
def test_trackers_get_the_record_at_checkpoints_at_the_end_and_on_an_error(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_access, kind, (Tracker,))
    keep = {"every_n_train_steps": 6, "save_top_k": -1}

    def fitted(name: str, *callbacks: Any) -> list[tuple[int, bool]]:
        tracker = Tracker(tmp_path / name)
        saves = ModelCheckpoint(tmp_path / name / "kept", **keep)
        monitor = NoiseScaleMonitor(every_n_steps=1)
        options = {"logger": tracker, "enable_checkpointing": True, "log_every_n_steps": 2}
        try:
            fit_here(monitor, saves, *callbacks, train_loader=loader(8, 96), **options)
        except RuntimeError as error:
            if "the device is gone" not in str(error):
                raise
        return tracker.given

    assert fitted("whole") == [(3, False), (6, False), (6, True)]
    assert fitted("cut", Ends()) == [(3, False), (5, False)]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_keeps_its_name_and_a_new_one_has_another(tmp_path: Path) -> None:
    def fitted(steps: int, ckpt_path: Path | None = None) -> History:
        monitor = NoiseScaleMonitor(every_n_steps=1)
        fit_here(
            *(monitor, ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5)),
            enable_checkpointing=True,
            log_every_n_steps=5,
            max_steps=steps,
            max_epochs=-1,
            ckpt_path=ckpt_path,
        )
        return monitor.history

    first = fitted(10)
    resumed = fitted(20, next(tmp_path.glob("*10.ckpt")))
    read = read_run(tmp_path)
    new = fitted(10)

    assert (first.attempt, resumed.attempt, read.attempt) == (1, 2, 2)
    assert first.run == resumed.run == read.run != new.run
    assert read["step"].tolist() == [5, 10, 15, 20]
    assert read_run(tmp_path)["step"].tolist() == [5, 10]
    assert len(read_run(tmp_path / RECORD / first.run)) == 4


def test_why_nothing_is_measured_stands_in_the_record(tmp_path: Path) -> None:
    class Untrained(L.LightningModule):
        """Its optimizer has none of the parameters that require gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.frozen = network(), torch.nn.Linear(1, 1).requires_grad_(False)

        def training_step(self, batch: Any, idx: int) -> Any:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.frozen.parameters(), lr=0.1)

    with pytest.warns(UserWarning, match="No parameter of an optimizer"):
        fit_here(
            NoiseScaleMonitor(name="all"), model=Untrained(), logger=CSVLogger(tmp_path, "", "")
        )

    with refused(f"{tmp_path}", remedy="Unfreeze parameters", word="unmeasured"):
        read_run(tmp_path, monitor="all")
