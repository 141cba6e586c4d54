# SPDX-License-Identifier: Apache-2.0
"""A run's history from its checkpoints, of Lightning and of transformers' Trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fits import classifier, loader, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers_fits import fit

from noisescale import NoiseScaleMonitor, predict
from noisescale.history.following import FollowedRun
from noisescale.history.history import History
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_metric, read_run
from noisescale.hugging_face import NoiseScaleCallback
from noisescale.refusal import Refusal


def checkpoint(folder: Path, *monitors: NoiseScaleMonitor, **module: Any) -> Path:
    """One that a fit of 26 steps saves at its end, without a logger."""
    made = classifier()
    for name, value in module.items():
        setattr(made, name, value)
    fitting = trainer(
        1,
        strategy="auto",
        max_epochs=2,
        log_every_n_steps=5,
        callbacks=[*monitors, ModelCheckpoint(folder, save_last=True, save_top_k=0)],
        enable_checkpointing=True,
    )
    fitting.fit(made, loader())
    return folder / "last.ckpt"


def same(found: History, wanted: History) -> bool:
    return all(np.array_equal(found[c], wanted[c][: len(found)], equal_nan=True) for c in wanted)


def refusal(path: Path, **which: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        read_run(path, **which)
    return refused.value


def test_a_checkpoint_has_the_history_of_its_monitor(tmp_path: Path) -> None:
    monitor = NoiseScaleMonitor(unit="digits", groups={"first": r"net\.0"})

    history = read_run(path := checkpoint(tmp_path, monitor))

    assert len(history) >= 4
    assert same(history, monitor.history)
    assert (history.unit, history.optimizer) == ("digits", OptimizerMix(OptimizerKind.SGD))
    assert history.source == path
    assert "You train at batch size 8" in predict(path).to_text()


def test_what_the_optimizer_is_is_in_a_checkpoint_or_in_its_settings(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, NoiseScaleMonitor())
    saved = torch.load(path, weights_only=True)
    history = saved["callbacks"]["NoiseScaleMonitor"]["optimizers"][0]["history"]
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    mix = OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 0.625)

    def read(**changed: Any) -> OptimizerMix | None:
        torch.save(saved | changed, path)
        return read_run(path).optimizer

    def states(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [optimizer.state_dict()]

    history["optimizer"] = mix.numbers
    assert read() == mix
    del history["optimizer"]  # as an earlier version saved it
    assert read() == OptimizerMix(OptimizerKind.SGD)
    muon, other = torch.optim.Muon([weight]), torch.optim.RMSprop([weight])
    assert read(optimizer_states=states(muon)) == OptimizerMix(OptimizerKind.SPECTRAL)
    assert read(optimizer_states=states(other)) is None


def test_several_monitors_and_optimizers_are_told_apart(tmp_path: Path) -> None:
    wide = NoiseScaleMonitor(small_batch="half", name="wide")
    path = checkpoint(tmp_path, NoiseScaleMonitor(), wide)

    assert same(read_run(path, monitor="wide"), wide.history)
    assert refusal(path, monitor="other").got == "'other'"
    assert refusal(path, monitor="other").remedy == "Its monitors: one without a name, 'wide'."
    assert refusal(path, optimizer=1).arguments == ("optimizer",)


def test_what_is_in_a_checkpoint_and_no_history_is_said(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert refusal(path).got == "one without the state of a monitor"

    early = NoiseScaleMonitor()
    saved = torch.load(path, weights_only=True)
    saved["callbacks"]["NoiseScaleMonitor"] = early.state_dict()
    torch.save(saved, path)
    assert refusal(path).word == "unmeasured"

    torch.save([1], path)
    assert refusal(path).got == "an object of type list"


def test_an_empty_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, NoiseScaleMonitor())
    content = path.read_bytes()

    path.write_bytes(content[: len(content) // 2])
    assert refusal(path).got.startswith("one that torch cannot read: ")
    path.write_bytes(b"")
    assert refusal(path).got == "an empty file"
    path.write_bytes(b"weights")
    assert "the folder of the run" in refusal(path).remedy


def test_a_checkpoint_with_objects_names_what_torch_does_not_load(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, NoiseScaleMonitor())
    torch.save(
        torch.load(path, weights_only=True) | {"hyper_parameters": {"data": Path("data")}}, path
    )

    assert refusal(path).requirement == "have builtins and tensors only"
    assert refusal(path).remedy == "Name the folder of the run instead."


def test_a_state_in_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, NoiseScaleMonitor())
    saved = torch.load(path, weights_only=True)
    (state,) = saved["callbacks"]["NoiseScaleMonitor"]["optimizers"]

    del state["history"]["columns"]["step"]
    torch.save(saved, path)

    assert refusal(path).got == "one in which a part is missing"


def test_a_monitor_that_had_not_logged_yet_is_said(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, NoiseScaleMonitor())
    saved = torch.load(path, weights_only=True)
    (state,) = saved["callbacks"]["NoiseScaleMonitor"]["optimizers"]

    state["history"]["columns"] = {name: [] for name in state["history"]["columns"]}
    torch.save(saved, path)

    assert refusal(path).word == "empty"


def test_a_folder_of_checkpoints_alone_names_the_last(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoints", NoiseScaleMonitor())

    assert refusal(tmp_path).remedy.endswith(f"if the run had a monitor: name {path}.")


def test_other_metrics_and_news_are_in_no_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, NoiseScaleMonitor())

    with pytest.raises(Refusal, match="a checkpoint, which has the history alone"):
        read_metric(path, "loss")
    with pytest.raises(Refusal, match="Run `noisescale predict` with it"):
        FollowedRun(path).read()


def test_a_checkpoint_of_transformers_has_the_history(tmp_path: Path) -> None:
    callback = NoiseScaleCallback(unit="digits")
    fit(callback, output_dir=str(tmp_path), save_strategy="steps", save_steps=4)

    history = read_run(path := tmp_path / "checkpoint-4")

    assert len(history) >= 2
    assert same(history, callback.history)
    assert (history.unit, history.optimizer) == ("digits", OptimizerMix(OptimizerKind.ADAM))

    state = path / "trainer_state.json"
    content = json.loads(state.read_text())
    content["stateful_callbacks"] = {}
    state.write_text(json.dumps(content))
    assert refusal(path).got == "one without the state of a monitor"
    state.write_text("{")
    assert refusal(path).got == "something else"
