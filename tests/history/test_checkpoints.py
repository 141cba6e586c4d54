# SPDX-License-Identifier: Apache-2.0
"""A run's history from its checkpoints, of Lightning and of transformers' Trainer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import noisescale
from noisescale.history.history import History
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.reading import read_metric, read_run
from noisescale.refusal import Refusal


def checkpoint(folder: Path, *monitors: Any) -> Path:
    """One that a fit of 26 steps saves at its end, without a logger."""
    from fits import classifier, loader, trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    fitting = trainer(
        1,
        strategy="auto",
        max_epochs=2,
        log_every_n_steps=5,
        callbacks=[*monitors, ModelCheckpoint(folder, save_last=True, save_top_k=0)],
        enable_checkpointing=True,
    )
    fitting.fit(classifier(), loader())
    return folder / "last.ckpt"


def same(found: History, wanted: History) -> bool:
    return all(np.array_equal(found[c], wanted[c][: len(found)], equal_nan=True) for c in wanted)


def refusal(path: Path, **which: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        read_run(path, **which)
    return refused.value


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The checkpoint of a fit, and its monitor."""
    monitor = noisescale.NoiseScaleMonitor(unit="digits", groups={"first": r"net\.0"})
    return checkpoint(tmp_path_factory.mktemp("fitted"), monitor), monitor


@pytest.fixture
def path(fitted: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    return Path(shutil.copy(fitted[0], tmp_path))


def load(path: Path) -> tuple[Any, Any]:
    """What is in a checkpoint, and the state of the monitor's first optimizer."""
    saved = torch.load(path, weights_only=True)
    return saved, saved["callbacks"]["NoiseScaleMonitor"]["optimizers"][0]


def test_a_checkpoint_has_the_history_of_its_monitor(fitted: tuple[Path, Any]) -> None:
    path, monitor = fitted

    history = read_run(path)

    assert len(history) >= 4
    assert same(history, monitor.history)
    assert (history.unit, history.optimizer) == ("digits", OptimizerMix(OptimizerKind.SGD))
    assert history.source == path
    assert noisescale.predict(path).own_batch_size == 8


def test_several_monitors_and_optimizers_are_told_apart(tmp_path: Path) -> None:
    wide = noisescale.NoiseScaleMonitor(small_batch="half", name="wide")
    path = checkpoint(tmp_path, noisescale.NoiseScaleMonitor(), wide)

    assert same(read_run(path, monitor="wide"), wide.history)
    assert refusal(path, monitor="other").got == "'other'"
    assert "'wide', one without a name" in refusal(path, monitor="other").remedy
    assert refusal(path, optimizer=1).arguments == ("optimizer",)


def test_what_is_in_a_checkpoint_and_no_history_is_said_and_damage_refused(path: Path) -> None:
    content = path.read_bytes()

    def saved_with(change: Callable[[Any, Any], object]) -> Refusal:
        path.write_bytes(content)
        saved, state = load(path)
        change(saved, state)
        torch.save(saved, path)
        return refusal(path)

    def emptied(_: Any, state: Any) -> None:
        del state["document"][1:]

    callbacks = {"NoiseScaleMonitor": noisescale.NoiseScaleMonitor().state_dict()}
    no_monitor = saved_with(lambda saved, _: saved["callbacks"].clear())
    assert no_monitor.got == "one without the state of a monitor"
    assert saved_with(lambda saved, _: saved.update(callbacks=callbacks)).word == "unmeasured"
    part = saved_with(lambda _, state: state["document"][0]["columns"].remove("step"))
    assert part.got == "one in which a part is missing"
    assert saved_with(emptied).word == "empty"
    objects = saved_with(lambda saved, _: saved.update(hyper_parameters={"data": Path("data")}))
    assert objects.requirement == "have builtins and tensors only"
    assert "folder of the run" in objects.remedy
    torch.save([1], path)
    assert refusal(path).got == "an object of type list"
    path.write_bytes(content[: len(content) // 2])
    assert refusal(path).got.startswith("one that torch cannot read: ")
    path.write_bytes(b"")
    assert refusal(path).got == "an empty file"
    path.write_bytes(b"weights")
    assert "the folder of the run" in refusal(path).remedy


def test_other_metrics_and_news_are_in_no_checkpoint_and_a_folder_names_the_last(
    path: Path,
) -> None:
    assert f"name {path}." in refusal(path.parent).remedy
    with pytest.raises(Refusal, match="a checkpoint, which"):
        read_metric(path, "loss")


@pytest.mark.slow
def test_a_checkpoint_of_transformers_has_the_history(tmp_path: Path) -> None:
    from transformers_fits import fit

    from noisescale.hugging_face import NoiseScaleCallback

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
