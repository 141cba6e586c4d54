# SPDX-License-Identifier: Apache-2.0
"""The noise scale at each checkpoint of a run, and the record of it that `predict` reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from program import refused, run

from noisescale import predict, read_run
from noisescale.frozen.along_run import MeasuredRun, measure_checkpoints

SCRIPT = """
import torch, lightning.pytorch as L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

def make():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 6, generator=g)
    y = x.sum(dim=1, keepdim=True) + torch.randn(512, 1, generator=g)
    return Module(), DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with checkpoints, and its script."""
    made = tmp_path_factory.mktemp("run")
    (made / "measured_run.py").write_text(SCRIPT)
    names: dict[str, Any] = {}
    exec(compile(SCRIPT, "measured_run.py", "exec"), names)
    torch.manual_seed(0)
    module, loader = names["make"]()
    checkpoints = ModelCheckpoint(
        made / "checkpoints", every_n_train_steps=10, save_top_k=-1, save_last=True
    )
    options = {"callbacks": [checkpoints], "enable_checkpointing": True}
    trainer(1, strategy="auto", max_epochs=None, max_steps=30, **options).fit(module, loader)
    return made


def measured(folder: Path, output: str, **options: Any) -> MeasuredRun:
    return measure_checkpoints(
        f"{folder}/measured_run.py:make",
        checkpoints=folder / "checkpoints",
        output=folder / output,
        groups={"all": "weight"},
        accelerator="cpu",
        **options,
    )


@pytest.fixture(scope="module")
def found(folder: Path) -> MeasuredRun:
    torch.manual_seed(0)
    return measured(folder, "record", batches=60, ways=[])


def test_each_checkpoint_is_a_row(found: MeasuredRun) -> None:
    assert [one.step for one in found.measurements] == [10, 20, 30]
    assert found.history["step"].tolist() == [10, 20, 30]
    assert found.history["examples"].tolist() == [160, 320, 480]
    scales = [one.noise_scale for one in found.measurements]
    assert found.history["noise_scale"].tolist() == pytest.approx(
        [scale.value for scale in scales], rel=1e-8
    )
    assert scales[-1].value > 2 * scales[0].value  # it has nearly converged


def test_the_record_is_read_as_that_of_a_monitor(found: MeasuredRun) -> None:
    read = read_run(found.record)

    for name in ("step", "noise_scale", "low", "high", "group/all", "learning_rate"):
        assert read[name] == pytest.approx(found.history[name], nan_ok=True)
    # Of the whole run: it weighs the beginning by its larger gradients.
    critical = predict(found.record).critical_batch_size
    scales = [one.noise_scale for one in found.measurements]
    assert scales[0].low < critical.value < scales[-1].low


def test_the_tab_of_tensorboard_finds_the_run(found: MeasuredRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(found.record)
    events.Reload()

    sizes = events.Scalars("noise_scale/batch_size")  # by which the tab knows a run
    assert [(one.step, one.value) for one in sizes] == [(10, 16), (20, 16), (30, 16)]


def test_a_checkpoint_without_a_number_leaves_a_gap(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("noisescale.frozen.measure.DRIFTS", 1.1)  # all of them drift

    gaps = measured(folder, "gaps", batches=10, ways=[])

    read = read_run(gaps.record)
    assert read["step"].tolist() == [10, 20, 30]
    assert read["increment_measured_steps"].tolist() == [0, 0, 0]
    for one in gaps.measurements:
        assert not one.noise_scale.resolved
        assert not one.groups["all"].resolved


def test_it_says_how_the_noise_scale_went(found: MeasuredRun) -> None:
    assert "rose" in found.document().headline
    assert "noisescale predict" in found.to_text()
    (figure,) = found.document().figures()
    resolved = [one.step for one in found.measurements if one.noise_scale.resolved]
    assert figure.drawing["data"][0]["x"] == resolved
    assert len(found.to_dict()["measurements"]) == 3


def test_the_command_measures_one_or_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    target = "measured_run.py:make", "--accelerator", "cpu", "--batches", "12"

    options = "--checkpoint", "checkpoints/last.ckpt", "--group", "b=bias"
    one = json.loads(run("measure", *target, *options, "--json"))
    assert (one["step"], one["batch_size"], [*one["groups"]]) == (30, 16, ["b"])
    every = json.loads(run("measure", *target, "--checkpoints", "checkpoints", "--json"))
    assert every["record"] == "noise_scale"
    assert (folder / "noise_scale").is_dir()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--checkpoints", "."], "`--checkpoints`"),
        (["--checkpoints", "checkpoints", "--checkpoint", "a"], "`--checkpoint` and `--checkp"),
        (["--group", "bias"], "`--group`"),
        (["--batches", "few"], "`--batches`"),
    ],
)
def test_bad_input_is_refused_by_its_flag(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(folder)
    assert refused("measure", "measured_run.py:make", *options).startswith(said)
