# SPDX-License-Identifier: Apache-2.0
"""Log intervals in which every step was left out: the noise scale is not known there."""

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from fits import classifier, loader, trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger

from noisescale import NoiseScaleMonitor
from noisescale.history.reading import read_run

SCALE = ("simple", "simple_low", "simple_high", "efficiency", "lower_bound", "group/all")


class Metrics(L.Callback):
    """What other callbacks find at the end of each epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_epoch_end(self, fitting: Any, module: Any) -> None:
        self.seen.append({k: v.item() for k, v in fitting.callback_metrics.items()})


class NotFinite(L.Callback):
    """Spoils the gradients of some epochs, and leaves the parameters as they are."""

    def __init__(self, epochs: set[int]) -> None:
        self.epochs = epochs

    def on_fit_start(self, fitting: Any, module: Any) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
            return gradient * math.nan if fitting.current_epoch in self.epochs else None

        next(module.parameters()).register_hook(spoil)

        def leave_out(*_: Any, **__: Any) -> None:
            for p in module.parameters():
                p.grad.nan_to_num_(0, 0, 0)

        module.configure_gradient_clipping = leave_out


def fit(folder: Path, monitor: NoiseScaleMonitor, *callbacks: Any, **options: Any) -> Any:
    """Four epochs of 8 batches; what is logged of each step, what others see, what is warned of."""
    metrics = Metrics()
    fitting = trainer(
        1,
        strategy="auto",
        callbacks=[monitor, *callbacks, metrics],
        logger=CSVLogger(folder, name="", version=""),
        **{"max_epochs": 4, "log_every_n_steps": 2, **options},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(classifier(), loader(8, 64))
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    logged = {int(r["step"]) + 1: r for r in rows if r.get("noise_scale/batch_size")}
    told = [str(w.message) for w in caught if "micro-batch" in str(w.message)]
    return logged, metrics.seen, told


def test_windows_of_one_micro_batch_log_no_noise_scale_and_say_why(tmp_path: Path) -> None:
    """Steps 1 to 8 have 2 micro-batches, steps 9 to 24 one."""
    monitor = NoiseScaleMonitor(groups=lambda _: "all", small_batch="micro_batch")

    logged, seen, told = fit(tmp_path, monitor, GradientAccumulationScheduler({0: 2, 2: 1}))

    assert sorted(logged) == [2, 4, 6, 8, *range(10, 25, 2)]
    for step, row in logged.items():
        values = [row[f"noise_scale/{key}"] for key in (*SCALE, "grad_sq_norm", "noise_trace")]
        assert any(values) == (step <= 8), step
    assert not any(math.isnan(seen[1][f"noise_scale/{key}"]) for key in SCALE)
    for later in seen[2:]:
        assert all(math.isnan(later[f"noise_scale/{key}"]) for key in SCALE)
        assert later["noise_scale/accumulation"] == 1
    history = monitor.history
    assert history["step"].tolist() == sorted(logged)
    assert history["examples"].tolist() == [
        16 * min(step, 8) + 8 * max(step - 8, 0) for step in sorted(logged)
    ]
    assert repr(monitor).endswith("): nothing measured at step 24")
    known = history["step"] <= 8
    assert np.isfinite(history["low"]).tolist() == known.tolist()
    for column in ("grad_sq_norm", "noise_trace"):  # of two steps the first sets the level
        assert np.isfinite(history[column]).tolist() == [False, *known.tolist()[1:]]
    for column in ("noise_scale", "high", "group/all"):
        assert np.isfinite(history[column][known][-1])
        assert np.isnan(history[column][~known]).all()
    assert told == [
        "Since step 9 each step has only one micro-batch in one process, so there is nothing to"
        " compare it with: no noise scale is logged from there on. Accumulate two or more"
        " micro-batches, use more devices, or compare the halves of each batch:"
        ' `small_batch="half"`.'
    ]


def test_a_log_without_a_lower_bound_at_its_end_is_read_back_with_all_its_steps(
    tmp_path: Path,
) -> None:
    """Steps 1 to 8 have 2 micro-batches, steps 9 to 24 one."""
    monitor = NoiseScaleMonitor(small_batch="micro_batch")
    fit(tmp_path, monitor, GradientAccumulationScheduler({0: 2, 2: 1}))

    read = read_run(tmp_path)

    assert read["step"].tolist() == monitor.history["step"].tolist()
    assert read["examples"].tolist() == monitor.history["examples"].tolist()
    assert np.isfinite(read["low"]).tolist() == (read["step"] <= 8).tolist()


def test_the_short_last_window_of_an_epoch_ends_no_training(tmp_path: Path) -> None:
    """Its one micro-batch is not measured: what was measured a step before stays in force."""
    stopping = EarlyStopping(
        "noise_scale/lower_bound", mode="max", patience=9, check_on_train_epoch_end=True
    )
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "limit_train_batches": 7}

    monitor = NoiseScaleMonitor(small_batch="micro_batch")
    logged, seen, told = fit(tmp_path, monitor, stopping, **options)

    assert sorted(logged) == list(range(1, 17))
    assert not any(math.isnan(metrics["noise_scale/lower_bound"]) for metrics in seen)
    assert not told


def test_steps_that_are_not_finite_log_no_noise_scale(tmp_path: Path) -> None:
    monitor = NoiseScaleMonitor()

    logged, seen, told = fit(tmp_path, monitor, NotFinite({1, 2}), accumulate_grad_batches=2)

    known = {step: bool(row["noise_scale/lower_bound"]) for step, row in logged.items()}
    assert known == {step: step <= 4 or step > 12 for step in range(2, 17, 2)}
    simple = [metrics["noise_scale/simple"] for metrics in seen]
    assert [math.isfinite(value) for value in simple] == [True, False, False, True]
    assert seen[-1]["noise_scale/skipped_steps"] == 8
    assert told == []


def test_a_single_short_window_is_no_reason_to_warn(tmp_path: Path) -> None:
    """Each epoch has windows of 7 batches and of one."""
    monitor = NoiseScaleMonitor(small_batch="micro_batch")
    _, _, told = fit(tmp_path, monitor, accumulate_grad_batches=7, log_every_n_steps=1)

    assert told == []


def test_between_two_measured_steps_the_last_values_are_in_force(tmp_path: Path) -> None:
    """Measured are steps 1, 6, 11 and 16, of which step 11 is left out; steps 2, 4, ... log."""
    monitor = NoiseScaleMonitor(every_n_steps=5)

    _, _, _ = fit(tmp_path, monitor, NotFinite({2}), accumulate_grad_batches=2)

    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    known = [bool(row["noise_scale/lower_bound"]) for row in rows]
    assert known == [True] * 5 + [False] * 2 + [True]
    assert monitor.history["step"].tolist() == [1, 6, 11, 16]


def test_a_checkpoint_goes_on_with_what_was_in_force(tmp_path: Path) -> None:
    """With `every_n_steps` the first log step after it has nothing new to log either."""
    first, second = NoiseScaleMonitor(every_n_steps=9), NoiseScaleMonitor(every_n_steps=9)
    save = ModelCheckpoint(tmp_path, save_last=True)
    options = {"accumulate_grad_batches": 2}
    fit(tmp_path / "first", first, save, max_epochs=1, enable_checkpointing=True, **options)

    fitting = trainer(
        1, strategy="auto", callbacks=[second], max_epochs=2, log_every_n_steps=2, **options
    )
    fitting.fit(classifier(), loader(8, 64), ckpt_path=tmp_path / "last.ckpt")

    assert math.isfinite(fitting.callback_metrics["noise_scale/lower_bound"].item())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_noise_scale_that_is_not_known_is_no_best_checkpoint(tmp_path: Path, mode: str) -> None:
    monitor = NoiseScaleMonitor()
    save = ModelCheckpoint(tmp_path, monitor="noise_scale/simple", mode=mode, filename="{epoch}")

    _, seen, _ = fit(
        tmp_path,
        monitor,
        NotFinite({1, 2, 3}),
        save,
        accumulate_grad_batches=2,
        enable_checkpointing=True,
    )

    assert save.best_model_path.endswith("epoch=0.ckpt")
    assert save.best_model_score == pytest.approx(seen[0]["noise_scale/simple"])
