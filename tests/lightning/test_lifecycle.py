# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, resuming, second fits, errors: what is put in is taken out, nothing is lost."""

import copy
import pickle
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import classifier, fit, loader, opaque_network, trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from ranks import as_torchrun, on_ranks

from noisescale import NoiseScaleMonitor


def checkpoint_to(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)


def logged_after(result: dict[str, Any], step: int) -> dict[str, Any]:
    history = dict(result["history"])
    history.pop("seconds_per_step")
    rows = [i for i, s in enumerate(history["step"]) if s > step]
    return {name: [column[i] for i in rows] for name, column in history.items()}


@pytest.mark.parametrize(
    ("every_n_steps", "small_batch", "accumulate", "half"),
    [(1, "rank", 1, 14), (3, "rank", 1, 14), (1, "micro_batch", 2, 8), (2, "rank", 2, 8)],
)
def test_resuming_continues_every_logged_value_exactly(
    tmp_path: Path, every_n_steps: int, small_batch: Any, accumulate: int, half: int
) -> None:
    """N steps == N/2 + checkpoint + N/2."""
    options: dict[str, Any] = {"max_epochs": 4, "log_every_n_steps": 2}
    options["accumulate_grad_batches"] = accumulate  # the last window of an epoch is short
    to_disk = checkpoint_to(tmp_path, every_n_epochs=2)

    def monitor() -> NoiseScaleMonitor:
        return NoiseScaleMonitor(every_n_steps=every_n_steps, small_batch=small_batch)

    whole = fit(monitor(), to_disk, enable_checkpointing=True, **options)
    resumed = fit(monitor(), ckpt_path=tmp_path / f"step={half}.ckpt", **options)

    for ours, theirs in zip(resumed, whole, strict=True):
        np.testing.assert_equal(logged_after(ours, half), logged_after(theirs, half))
        assert len(logged_after(ours, half)["step"]) >= half // 3
        assert ours["noise_scale"] == theirs["noise_scale"]
        np.testing.assert_equal(ours["meter"], theirs["meter"])


def test_resuming_in_mid_epoch_continues_the_averages(tmp_path: Path) -> None:
    at_step_3 = checkpoint_to(tmp_path, every_n_train_steps=3)
    whole = fit(NoiseScaleMonitor(), at_step_3, enable_checkpointing=True, log_every_n_steps=1)
    resumed = fit(NoiseScaleMonitor(), ckpt_path=tmp_path / "step=3.ckpt", log_every_n_steps=1)

    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["history"]["step"] == [1, 2, 3, 4, 5, 6, 7]
        for column in ("low", "sum_noise_trace", "sum_grad_sq_norm"):
            assert ours["history"][column][:3] == theirs["history"][column][:3]


def test_checkpoints_load_weights_only_and_are_alike_on_all_ranks(tmp_path: Path) -> None:
    results = fit(
        NoiseScaleMonitor(),
        checkpoint_to(tmp_path),
        enable_checkpointing=True,
        log_every_n_steps=2,
    )

    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=True)["callbacks"]["NoiseScaleMonitor"]
    saved = state["optimizers"][0]["meter"]
    assert saved["counts"]["steps"] == 7
    increments = saved["estimates"].pop("increments")
    assert increments["row"]["steps"] == 1  # step 7, which the row at the end of the fit takes
    for result in results:
        assert result["meter"]["estimates"].pop("increments")["row"]["steps"] == 0
        np.testing.assert_equal(result["meter"], saved)


def damaged(checkpoint: Any, damage: str) -> dict[str, Any]:
    """The options of a monitor for which a checkpoint does not fit, or is made not to."""
    (state,) = checkpoint["callbacks"]["NoiseScaleMonitor"]["optimizers"]
    match damage:
        case "another window":
            return {"window": 30}
        case "another unit":
            return {"unit": "rows"}
        case "no averages":
            del state["meter"]["estimates"]["whole"]["recent"]
        case "averages of other steps":
            state["meter"]["estimates"]["whole"]["recent"]["steps"].append([0.0, 0.0])
        case "no counts":
            del state["meter"]["counts"]["skipped_steps"]
        case "no meter":
            del state["meter"]
        case "nothing":
            checkpoint["callbacks"]["NoiseScaleMonitor"]["optimizers"] = None
        case "no history":
            del state["history"]
    return {}


ANEW, GOES_ON = [8, 10, 12, 14], [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize(
    ("damage", "told", "steps"),
    [
        ("another window", "averages.*were not restored.*`window` must be the one", GOES_ON),
        ("another unit", "averages.*were not restored.*`unit` must be the one", ANEW),
        ("no averages", "averages.*were not restored.*KeyError: 'recent'", GOES_ON),
        ("averages of other steps", "averages.*were not restored.*inhomogeneous", GOES_ON),
        ("no counts", "averages.*were not restored.*KeyError: 'skipped_steps'", GOES_ON),
        ("no meter", "averages.*were not restored.*KeyError: 'meter'", [1, 3, 5, 7]),
        ("nothing", "averages.*were not restored.*TypeError", [1, 3, 5, 7]),
        ("no history", "history was not restored.*KeyError: 'history'", ANEW),
    ],
)
def test_what_cannot_be_restored_begins_anew_and_training_goes_on(
    damage: str, told: str, steps: list[int], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"strategy": "auto", "accumulate_grad_batches": 2}
    options["log_every_n_steps"] = 2
    first = trainer(
        1,
        callbacks=[NoiseScaleMonitor(window=20), checkpoint_to(tmp_path)],
        enable_checkpointing=True,
        **options,
    )
    first.fit(classifier(), loader())
    (path,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    monitor = NoiseScaleMonitor(**{"window": 20} | damaged(checkpoint, damage))
    torch.save(checkpoint, path)
    options["max_epochs"] = 2
    plain, resumed = classifier(), classifier()
    trainer(1, **options).fit(plain, loader(), ckpt_path=path)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(1, callbacks=[monitor], **options).fit(resumed, loader(), ckpt_path=path)

    assert any(re.search(told, str(warning.message)) for warning in caught)
    assert monitor.history["step"].tolist() == steps
    assert (monitor.noise_scale.steps > 7) == (damage == "no history")
    for ours, theirs in zip(resumed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_of_a_run_without_the_monitor_can_be_resumed(tmp_path: Path) -> None:
    fit(checkpoint_to(tmp_path), enable_checkpointing=True, results=lambda *_: None)

    (path,) = tmp_path.glob("*.ckpt")
    (result, _) = fit(NoiseScaleMonitor(), max_epochs=2, ckpt_path=path)

    assert result["meter"]["counts"]["steps"] == 7


def test_one_process_hands_on_what_was_measured_on_two(tmp_path: Path) -> None:
    """Two ranks, then one, then two again: the middle leg measures nothing and loses nothing."""
    options: dict[str, Any] = {"enable_checkpointing": True}
    (first, _) = fit(
        NoiseScaleMonitor(),
        checkpoint_to(tmp_path / "a"),
        model=classifier(net=opaque_network()),
        **options,
    )
    alone = trainer(
        1,
        strategy="auto",
        max_epochs=2,
        callbacks=[NoiseScaleMonitor(), checkpoint_to(tmp_path / "b")],
        **options,
    )
    with pytest.warns(UserWarning, match="nothing to measure"):
        alone.fit(
            classifier(net=opaque_network()),
            loader(),
            ckpt_path=next((tmp_path / "a").glob("*.ckpt")),
        )
    (last, _) = fit(
        NoiseScaleMonitor(),
        model=classifier(net=opaque_network()),
        max_epochs=3,
        ckpt_path=next((tmp_path / "b").glob("*.ckpt")),
    )

    assert last["meter"]["counts"]["steps"] == first["meter"]["counts"]["steps"] + 7


def hooks_on(module: Any) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())


def used_again(folder: Path) -> dict[str, Any]:
    """One Trainer fits twice, validates and tests an old checkpoint, and goes on; then another."""
    monitor = NoiseScaleMonitor()
    first = trainer(2, strategy="ddp", callbacks=[monitor], log_every_n_steps=1)
    model = classifier()
    seen: dict[str, Any] = {}

    def look(name: str) -> None:
        seen[name] = (monitor.history["step"].tolist(), hooks_on(model), repr(monitor.noise_scale))

    first.fit(model, loader())
    look("first fit")
    path = Path(folder) / "first.ckpt"
    first.save_checkpoint(path)
    first.fit_loop.max_epochs = 2
    first.fit(model, loader())
    look("second fit")
    first.validate(model, loader(), verbose=False, ckpt_path=path)
    first.test(model, loader(), verbose=False, ckpt_path=path)
    look("validate and test")
    first.fit_loop.max_epochs = 3
    first.fit(model, loader())
    look("third fit")
    trainer(2, strategy="ddp", callbacks=[monitor], log_every_n_steps=1).fit(model, loader())
    look("another Trainer")
    return seen


def test_more_fits_continue_and_what_validate_and_test_load_does_not_disturb(
    tmp_path: Path,
) -> None:
    for seen in on_ranks(2, as_torchrun(lambda: used_again(tmp_path))):
        assert seen["first fit"][0] == [1, 2, 3, 4, 5, 6, 7]
        assert seen["second fit"][0] == [*range(1, 15)]
        assert seen["validate and test"] == seen["second fit"]
        assert seen["third fit"][0] == [*range(1, 22)]
        assert seen["another Trainer"][0] == [1, 2, 3, 4, 5, 6, 7]
        assert {hooks for _, hooks, _ in seen.values()} == {0}
        assert len({text for _, _, text in seen.values()}) == 4


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
@pytest.mark.parametrize("batch", [0, 4])
def test_an_error_removes_every_hook_and_leaves_a_checkpoint(tmp_path: Path, batch: int) -> None:
    """After batch 0 every parameter still has its hook, after batch 4 one has."""

    def fails() -> int:
        model = classifier()
        callbacks = [NoiseScaleMonitor(), RaisesAt(batch), OnExceptionCheckpoint(tmp_path)]
        with pytest.raises(RuntimeError, match="out of luck"):
            trainer(
                2,
                strategy="ddp",
                callbacks=callbacks,
                enable_checkpointing=True,
                default_root_dir=tmp_path,
            ).fit(model, loader())
        return hooks_on(model)

    assert on_ranks(2, as_torchrun(fails)) == [0, 0]
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert (
        checkpoint["callbacks"]["NoiseScaleMonitor"]["optimizers"][0]["meter"]["counts"]["steps"]
        == batch + 1
    )


def test_validation_and_checkpoints_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that a batch moves by 0.01 s, and each of the others by 100 s."""
    now = [0.0]
    monkeypatch.setattr(
        "noisescale.meter.step_timer.time", SimpleNamespace(perf_counter=lambda: now[0])
    )

    class Clock(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            now[0] += 0.01

        def on_save_checkpoint(self, *_: Any) -> None:
            now[0] += 100

        def on_validation_end(self, *_: Any) -> None:
            now[0] += 100

    class Validated(type(classifier())):
        def val_dataloader(self) -> Any:
            return loader(50)

    (result, _) = fit(
        NoiseScaleMonitor(),
        Clock(),
        checkpoint_to(tmp_path, every_n_train_steps=3),
        enable_checkpointing=True,
        model=Validated(),
        val_check_interval=4,
        log_every_n_steps=1,
    )

    timed = result["history"]["seconds_per_step"]
    # Not timed: the first step, the one after step 4's validation, those after saving at 3 and 6.
    assert np.isnan(timed).tolist() == [True, False, False, True, True, False, True]
    assert np.array(timed)[[1, 2, 5]] == pytest.approx(0.01)
