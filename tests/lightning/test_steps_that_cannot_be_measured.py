# SPDX-License-Identifier: Apache-2.0
"""Log intervals in which every step was left out: the noise scale is not known there."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fits import NotFinite, fit_here, heard, loader
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger

from noisescale import NoiseScaleMonitor
from noisescale.history.reading import read_run

SCALE = ("simple", "simple_low", "simple_high", "efficiency", "lower_bound", "group/all")


def spoiled(*epochs: int) -> NotFinite:
    return NotFinite(lambda fitting: fitting.current_epoch in epochs)


def fit(folder: Path, monitor: NoiseScaleMonitor, *callbacks: Any, **options: Any) -> Any:
    """Four epochs of 8 batches; what is logged of each step, what others see, what is warned of."""
    seen: list[dict[str, float]] = []

    def look(fitting: Any, module: Any) -> None:
        seen.append({k: v.item() for k, v in fitting.callback_metrics.items()})

    with heard() as told:
        fit_here(
            monitor,
            *callbacks,
            LambdaCallback(on_train_epoch_end=look),
            train_loader=loader(8, 64),
            logger=CSVLogger(folder, name="", version=""),
            **{"max_epochs": 4, "log_every_n_steps": 2, **options},
        )
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    logged = {int(r["step"]) + 1: r for r in rows if r.get("noise_scale/batch_size")}
    return logged, seen, [one for one in told if "micro-batch" in one]


def test_windows_of_one_micro_batch_log_no_noise_scale_and_say_why(tmp_path: Path) -> None:
    """Steps 1 to 8 have 2 micro-batches, steps 9 to 24 one. All are read back."""
    options: dict[str, Any] = {"groups": lambda _: "all", "small_batch": "micro_batch"}
    monitor = NoiseScaleMonitor(every_n_steps=1, **options)

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
        assert not np.isfinite(history[column][~known]).any()
    (message,) = told
    assert "step 9 " in message
    read = read_run(tmp_path)
    assert read["step"].tolist() == history["step"].tolist()
    assert read["examples"].tolist() == history["examples"].tolist()
    assert np.isfinite(read["low"]).tolist() == known.tolist()


def test_the_short_last_window_of_an_epoch_ends_no_training_and_is_no_reason_to_warn(
    tmp_path: Path,
) -> None:
    """Its one micro-batch is not measured: what was measured a step before stays in force."""
    key, at_ends = "noise_scale/lower_bound", {"check_on_train_epoch_end": True}
    stopping = EarlyStopping(key, mode="max", patience=9, **at_ends)
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "limit_train_batches": 7}

    monitor = NoiseScaleMonitor(small_batch="micro_batch")
    logged, seen, told = fit(tmp_path, monitor, stopping, **options)

    assert sorted(logged) == list(range(1, 17))
    assert not any(math.isnan(metrics[key]) for metrics in seen)
    assert not told


def test_steps_that_are_not_finite_log_no_noise_scale(tmp_path: Path) -> None:
    monitor = NoiseScaleMonitor()

    logged, seen, told = fit(tmp_path, monitor, spoiled(1, 2), accumulate_grad_batches=2)

    known = {step: bool(row["noise_scale/lower_bound"]) for step, row in logged.items()}
    assert known == {step: step <= 4 or step > 12 for step in range(2, 17, 2)}
    simple = [metrics["noise_scale/simple"] for metrics in seen]
    assert [math.isfinite(value) for value in simple] == [True, False, False, True]
    assert seen[-1]["noise_scale/skipped_steps"] == 8
    assert told == []


def test_between_two_measured_steps_the_last_values_are_in_force(tmp_path: Path) -> None:
    """Measured are steps 1, 6, 11 and 16, of which step 11 is left out; steps 2, 4, ... log."""
    monitor = NoiseScaleMonitor(every_n_steps=5)

    fit(tmp_path, monitor, spoiled(2), accumulate_grad_batches=2)

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

    batches, saved = loader(8, 64), tmp_path / "last.ckpt"
    options |= {"max_epochs": 2, "log_every_n_steps": 2}
    fitting = fit_here(second, train_loader=batches, ckpt_path=saved, **options)

    assert math.isfinite(fitting.callback_metrics["noise_scale/lower_bound"].item())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_noise_scale_that_is_not_known_is_no_best_checkpoint(tmp_path: Path, mode: str) -> None:
    monitor = NoiseScaleMonitor()
    save = ModelCheckpoint(tmp_path, monitor="noise_scale/simple", mode=mode, filename="{epoch}")

    options = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    _, seen, _ = fit(tmp_path, monitor, spoiled(1, 2, 3), save, **options)

    assert save.best_model_path.endswith("epoch=0.ckpt")
    assert save.best_model_score == pytest.approx(seen[0]["noise_scale/simple"])
