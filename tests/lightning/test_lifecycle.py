# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, resuming, second fits, errors: what is put in is taken out, nothing is lost."""

import copy
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import (
    classifier,
    fit_here,
    fits_on_ranks,
    heard,
    loader,
    monitored,
    opaque_network,
    trainer,
)
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from tiers import slow

from noisescale import NoiseScaleMonitor

ALONE: dict[str, Any] = {"strategy": "auto", "accumulate_grad_batches": 2, "log_every_n_steps": 2}
"""7 steps an epoch in one process."""
SAVING: dict[str, Any] = {**ALONE, "enable_checkpointing": True}


def checkpoint_to(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)


def only_checkpoint(folder: Path) -> Path:
    (path,) = folder.glob("*.ckpt")
    return path


def meter_of(monitor: NoiseScaleMonitor) -> dict[str, Any]:
    found: dict[str, Any] = monitor.state_dict()["optimizers"][0]["meter"]
    return found


def logged_after(result: dict[str, Any], step: int) -> dict[str, Any]:
    history = dict(result["history"])
    history.pop("seconds_per_step")
    rows = [i for i, s in enumerate(history["step"]) if s > step]
    return {name: [column[i] for i in rows] for name, column in history.items()}


@pytest.mark.parametrize(
    ("every_n_steps", "small_batch", "accumulate", "half"),
    [
        (2, "rank", 2, 8),
        slow(1, "rank", 1, 14),
        slow(3, "rank", 1, 14),
        slow(1, "micro_batch", 2, 8),
    ],
)
def test_resuming_continues_every_logged_value_exactly(
    tmp_path: Path, every_n_steps: int, small_batch: Any, accumulate: int, half: int
) -> None:
    """N steps == N/2 + checkpoint + N/2."""
    options: dict[str, Any] = {"ranks": 2, "max_epochs": 4, "log_every_n_steps": 2}
    options["accumulate_grad_batches"] = accumulate  # the last window of an epoch is short
    to_disk = checkpoint_to(tmp_path, every_n_epochs=2)

    def monitor() -> NoiseScaleMonitor:
        return NoiseScaleMonitor(every_n_steps=every_n_steps, small_batch=small_batch)

    saved = tmp_path / f"step={half}.ckpt"
    whole, resumed = fits_on_ranks(
        lambda: monitored(fit_here(monitor(), to_disk, enable_checkpointing=True, **options)),
        lambda: monitored(fit_here(monitor(), ckpt_path=saved, **options)),
    )

    for ours, theirs in zip(resumed, whole, strict=True):
        np.testing.assert_equal(logged_after(ours, half), logged_after(theirs, half))
        assert len(logged_after(ours, half)["step"]) >= half // 3
        assert ours["noise_scale"] == theirs["noise_scale"]
        np.testing.assert_equal(ours["meter"], theirs["meter"])
        np.testing.assert_equal(theirs["meter"], whole[0]["meter"])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_averages_of_shards_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """FSDP2's strategy restores it after its setup, when the meters are there already."""

    def measured_steps(max_steps: int, **options: Any) -> list[Any]:
        fitting = fit_here(
            NoiseScaleMonitor(every_n_steps=1),
            checkpoint_to(tmp_path, every_n_train_steps=4),
            ranks=2,
            strategy=ModelParallelStrategy(2, 1),
            model=classifier(sharded=True),
            max_steps=max_steps,
            enable_checkpointing=True,
            log_every_n_steps=1,
            **options,
        )
        return fitting.callbacks[0].history["measured_steps"].tolist()

    found = fits_on_ranks(
        lambda: measured_steps(4), lambda: measured_steps(6, ckpt_path=tmp_path / "step=4.ckpt")
    )
    assert found == [([1, 2, 3, 4],) * 2, ([1, 2, 3, 4, 5, 6],) * 2]


def test_resuming_in_mid_epoch_continues_the_averages(tmp_path: Path) -> None:
    whole, resumed = NoiseScaleMonitor(every_n_steps=1), NoiseScaleMonitor(every_n_steps=1)
    each = {"log_every_n_steps": 1}
    fit_here(whole, checkpoint_to(tmp_path, every_n_train_steps=3), **{**SAVING, **each})
    fit_here(resumed, ckpt_path=tmp_path / "step=3.ckpt", **{**ALONE, **each})

    assert resumed.history["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    for column in ("low", "increment_noise_trace", "increment_grad_sq_norm"):
        assert resumed.history[column][:3].tolist() == whole.history[column][:3].tolist()


class Plain(NamedTuple):
    """A run that goes on without the monitor after a checkpoint with it."""

    monitor: NoiseScaleMonitor
    checkpoint: Path
    parameters: list[torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder, monitor = tmp_path_factory.mktemp("saved"), NoiseScaleMonitor(window=20)
    fit_here(monitor, checkpoint_to(folder), **SAVING)
    path, module = only_checkpoint(folder), classifier()
    fit_here(model=module, max_epochs=2, ckpt_path=path, **ALONE)
    return Plain(monitor, path, list(module.parameters()))


def test_checkpoints_load_weights_only(plain: Plain) -> None:
    state = torch.load(plain.checkpoint, weights_only=True)
    saved = state["callbacks"]["NoiseScaleMonitor"]["optimizers"][0]["meter"]
    ended = copy.deepcopy(meter_of(plain.monitor))
    assert saved["counts"]["steps"] == 7
    assert (saved.pop("pace")["log_step"], ended.pop("pace")["log_step"]) == (
        6,
        7,
    )  # the last log steps
    increments = saved["estimates"].pop("increments")
    assert increments["row"]["steps"] == 1  # step 7, which the row at the end of the fit takes
    assert ended["estimates"].pop("increments")["row"]["steps"] == 0
    np.testing.assert_equal(ended, saved)


ANEW, GOES_ON, LATER = [8, 10, 12, 14], [2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("options", "path", "value", "told", "steps"),
    [
        ({"window": 30}, "", None, "averages.*`window` must be", GOES_ON),
        ({"unit": "rows"}, "", None, "averages.*`unit` must be", ANEW),
        ({}, "0/meter/estimates/whole/recent", ..., "averages.*'recent'", GOES_ON),
        ({}, "0/meter/estimates/whole/recent/steps", [[0.0, 0.0], [0.0]], "inhom", GOES_ON),
        ({}, "0/meter/counts/skipped_steps", ..., "averages.*'skipped_steps'", GOES_ON),
        ({}, "0/meter", ..., "averages.*'meter'", LATER),
        ({}, "", None, "averages.*TypeError", LATER),
        ({}, "0/document", ..., "history.*'document'", ANEW),
    ],
)
def test_what_cannot_be_restored_begins_anew_and_training_goes_on(
    options: Any, path: str, value: Any, told: str, steps: list[int], plain: Plain, tmp_path: Path
) -> None:
    """By a monitor of other options, or where the state of optimizers lacks a value (`...`)."""
    checkpoint = torch.load(plain.checkpoint, weights_only=True)
    if not options:
        state, name = checkpoint["callbacks"]["NoiseScaleMonitor"], "optimizers"
        for key in path.split("/") if path else ():
            state, name = state[name], int(key) if key.isdigit() else key
        state[name] = value
        if value is ...:
            del state[name]
    torch.save(checkpoint, damaged := tmp_path / "damaged.ckpt")
    monitor, resumed = NoiseScaleMonitor(**{"window": 20, **options}), classifier()

    with heard() as messages:
        fit_here(monitor, model=resumed, max_epochs=2, ckpt_path=damaged, **ALONE)

    assert any(re.search(told, message) for message in messages)
    assert monitor.history["step"].tolist() == steps
    assert (monitor.noise_scale.steps > 7) == (path == "0/document")
    assert all(map(torch.equal, resumed.parameters(), plain.parameters))


def test_a_checkpoint_of_a_run_without_the_monitor_can_be_resumed(tmp_path: Path) -> None:
    fit_here(checkpoint_to(tmp_path), **SAVING)
    monitor = NoiseScaleMonitor()

    fit_here(monitor, max_epochs=2, ckpt_path=only_checkpoint(tmp_path), **ALONE)

    assert meter_of(monitor)["counts"]["steps"] == 7


def test_a_fit_that_measures_nothing_hands_on_what_was_measured(tmp_path: Path) -> None:
    """Two micro-batches a step, then one, then two again."""
    counted = []
    for leg, accumulated in enumerate((2, 1, 2)):
        found = list(tmp_path.glob(f"{leg - 1}/*.ckpt"))
        monitor = NoiseScaleMonitor()
        with heard() as messages:
            fit_here(
                monitor,
                checkpoint_to(tmp_path / f"{leg}"),
                model=classifier(net=opaque_network()),
                **{**SAVING, "accumulate_grad_batches": accumulated, "max_epochs": leg + 1},
                ckpt_path=found[0] if found else None,
            )
        assert any("nothing to measure" in message for message in messages) == (leg == 1)
        if leg != 1:
            counted.append(meter_of(monitor)["counts"]["steps"])

    assert counted == [7, 14]


def hooks_on(module: Any) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


def test_more_fits_continue_and_what_validate_and_test_load_does_not_disturb(
    tmp_path: Path,
) -> None:
    """One Trainer fits twice, validates and tests an old checkpoint, and goes on; then another."""
    monitor, model = NoiseScaleMonitor(every_n_steps=1), classifier()
    options = {**ALONE, "callbacks": [monitor], "log_every_n_steps": 1}
    first = trainer(1, **options)

    def look() -> tuple[list[float], str]:
        assert hooks_on(model) == 0
        return monitor.history["step"].tolist(), repr(monitor.noise_scale)

    first.fit(model, loader())
    seen = [look()]
    first.save_checkpoint(tmp_path / "first.ckpt")
    first.fit_loop.max_epochs = 2
    first.fit(model, loader())
    seen.append(look())
    for evaluate in (first.validate, first.test):
        evaluate(model, loader(), verbose=False, ckpt_path=tmp_path / "first.ckpt")
        assert look() == seen[-1]
    first.fit_loop.max_epochs = 3
    first.fit(model, loader())
    seen.append(look())
    trainer(1, **options).fit(model, loader())
    seen.append(look())

    assert [steps for steps, _ in seen] == [list(range(1, 7 * n + 1)) for n in (1, 2, 3, 1)]
    assert len({text for _, text in seen}) == 4


def test_the_monitor_can_be_copied_and_sent_to_spawned_processes() -> None:
    monitor = NoiseScaleMonitor(window=20, confidence=0.9)

    for copied in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert copied.noise_scale.confidence == 0.9
        assert copied.state_dict() == {}


class RaisesAt(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, *arguments: Any) -> None:
        if arguments[-1] == self.batch:
            raise RuntimeError("out of luck")


# Two things that Lightning 2.6.6 says of every fit with an OnExceptionCheckpoint.
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize("batch", [0, slow(4)])
def test_an_error_removes_every_hook_and_leaves_a_checkpoint(tmp_path: Path, batch: int) -> None:
    """After batch 0 every parameter still has its hook, after batch 4 one has."""

    def fails() -> int:
        model = classifier()
        callbacks = NoiseScaleMonitor(), RaisesAt(batch), OnExceptionCheckpoint(tmp_path)
        options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        with pytest.raises(RuntimeError, match="out of luck"):
            fit_here(*callbacks, ranks=2, model=model, **options)
        return hooks_on(model)

    assert fits_on_ranks(fails) == [(0, 0)]
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    (state,) = checkpoint["callbacks"]["NoiseScaleMonitor"]["optimizers"]
    assert state["meter"]["counts"]["steps"] == batch + 1


def test_validation_and_checkpoints_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that a batch moves by 0.01 s, and each of the others by 100 s."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("noisescale.meter.step_timer.time", clock)

    class Clock(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            now[0] += 0.01

        def on_save_checkpoint(self, *_: Any) -> None:
            now[0] += 100

        def on_validation_end(self, *_: Any) -> None:
            now[0] += 100

    model = classifier()
    model.val_dataloader = lambda: loader(50)
    monitor = NoiseScaleMonitor(every_n_steps=1)
    fit_here(
        monitor,
        Clock(),
        checkpoint_to(tmp_path, every_n_train_steps=3),
        enable_checkpointing=True,
        model=model,
        train_loader=loader(16),
        val_check_interval=4,
        log_every_n_steps=1,
    )

    timed = monitor.history["seconds_per_step"]
    # Not timed: the first step, the one after step 4's validation, those after saving at 3 and 6.
    assert np.isnan(timed).tolist() == [True, False, False, True, True, False, True]
    assert timed[[1, 2, 5]] == pytest.approx(0.01)
