# SPDX-License-Identifier: Apache-2.0
"""Early stopping, checkpoints and schedules that go by our keys, in epochs shorter than a log step.

Each fit here has epochs of 7 steps, and Lightning logs at step 50.
"""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import classifier, fit_here, loader, opaque_network
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.history.increments import INCREMENTS
from noisescale.meter.run_log import RunLog

LOW = "noise_scale/lower_bound"


def stopping(key: str = LOW, **options: Any) -> EarlyStopping:
    return EarlyStopping(key, patience=99, check_finite=False, **options)


def validated(module: Any = None) -> Any:
    module = module or classifier()
    module.val_dataloader = lambda: loader(50)
    return module


class Plateau(type(classifier())):
    """Its learning rate goes by the noise scale."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval, self.found = interval, []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=99)
        config = {"scheduler": schedule, "monitor": LOW, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.found.append(float(metric))
        scheduler.step(metric)


class Looks(L.Callback):
    """Finds what any callback would, at whatever time it looks."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.validations: list[float] = []
        self.ends: list[float] = []

    def on_train_epoch_start(self, fitting: Any, *_: Any) -> None:
        self.starts.append(fitting.callback_metrics[LOW].item())

    def on_validation_end(self, fitting: Any, *_: Any) -> None:
        if not fitting.sanity_checking:
            self.validations.append(fitting.callback_metrics[LOW].item())

    def on_train_epoch_end(self, fitting: Any, *_: Any) -> None:
        self.ends.append(fitting.callback_metrics[LOW].item())


def run(*callbacks: Any, model: Any = None, **options: Any) -> Any:
    """One process, steps of two batches, 7 to an epoch."""
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 50, **options}
    return fit_here(*callbacks, model=model or validated(), **options)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("model", [classifier, validated])
def test_a_new_lower_bound_is_there_whenever_others_look(first: bool, model: Any) -> None:
    looks = Looks()
    others = stopping("noise_scale/grad_sq_norm", check_on_train_epoch_end=False)
    early = [stopping(), others, looks]
    monitor = NoiseScaleMonitor()

    run(*early, monitor, model=model()) if first else run(monitor, *early, model=model())

    assert len(set(looks.ends)) == 2
    assert all(math.isfinite(value) for value in looks.ends)
    assert looks.validations == (looks.ends if model is validated else [])
    assert math.isnan(looks.starts[0])
    assert looks.starts[1] == looks.ends[0]
    assert monitor.history["step"].tolist() == [14]
    assert monitor.history["low"][-1] == pytest.approx(looks.ends[-1])


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 2},
        {"val_check_interval": 3, "num_sanity_val_steps": 0},
        {"check_val_every_n_epoch": 2},
        {"max_steps": 4, "max_epochs": -1},
        {"fast_dev_run": True},
    ],
)
def test_checkpoints_and_early_stopping_find_the_keys(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """By halves, so that no step is short of micro-batches."""
    saved = ModelCheckpoint(tmp_path, monitor=LOW)
    monitor = NoiseScaleMonitor(small_batch="half")
    options = {"enable_checkpointing": True, "accumulate_grad_batches": 1, **options}

    fitting = run(stopping(), saved, monitor, **options)

    assert not fitting.should_stop
    if "fast_dev_run" not in options:  # Lightning leaves both callbacks out there
        assert saved.best_model_score.isfinite()
    assert LOW in fitting.callback_metrics


def test_checkpoints_every_so_many_steps_find_what_a_log_at_their_step_has(tmp_path: Path) -> None:
    saved = ModelCheckpoint(
        tmp_path, monitor=LOW, every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False
    )
    monitor = NoiseScaleMonitor()
    run(monitor, log_every_n_steps=3, max_steps=6)

    run(NoiseScaleMonitor(), saved, enable_checkpointing=True, max_steps=6, model=classifier())

    expected = [monitor.history["low"][list(monitor.history["step"]).index(s)] for s in (3, 6)]
    assert sorted(v.item() for v in saved.best_k_models.values()) == pytest.approx(sorted(expected))


@pytest.mark.parametrize(("interval", "times", "values"), [("epoch", 2, 2), ("step", 14, 10)])
def test_schedules_on_a_plateau_find_the_lower_bound(
    interval: str, times: int, values: int
) -> None:
    model = Plateau(interval)

    run(NoiseScaleMonitor(), model=model)

    assert len(model.found) == times
    assert len(set(model.found)) >= values
    assert math.isfinite(model.found[-1])


def test_the_device_is_read_once_an_epoch_and_rows_stay_at_log_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[float] = []
    look = RunLog.look

    def counted(measurement: RunLog) -> dict[str, float]:
        reads.append(measurement.meter.last_measured_step)
        return look(measurement)

    monkeypatch.setattr(RunLog, "look", counted)
    monitor = NoiseScaleMonitor(every_n_steps=1)

    run(monitor, log_every_n_steps=4, max_epochs=3, logger=CSVLogger(tmp_path, "", ""))

    assert reads == [0, 7, 14, 21]  # before the first step and at the ends of epochs
    assert monitor.history["step"].tolist() == [4, 8, 12, 16, 20, 21]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 6


def test_looking_changes_nothing_of_what_is_logged() -> None:
    """The rows of a run that is looked at after every step are those of one that is not."""
    looked_at, alone = NoiseScaleMonitor(), NoiseScaleMonitor()

    run(looked_at, model=Plateau("step"), log_every_n_steps=4)
    run(alone, model=classifier(), log_every_n_steps=4)

    for name, column in alone.history.items():
        if name != "seconds_per_step":
            assert looked_at.history[name].tolist() == pytest.approx(column.tolist(), nan_ok=True)


def test_what_the_scheduler_logs_is_there_too(tmp_path: Path) -> None:
    keys = [f"batch_size/{key}" for key in ("wanted", "given", "lr_factor", "noise_scale")]
    saved = ModelCheckpoint(tmp_path, monitor="batch_size/given", mode="max")

    scheduler = BatchSizeScheduler("ratio", max_batch_size=32, decide_every_n_steps=1)
    run(*map(stopping, keys), saved, scheduler, enable_checkpointing=True)

    assert saved.best_model_score.isfinite()


def test_where_nothing_can_be_measured_the_keys_are_not_a_number() -> None:
    looks, model = Looks(), classifier(net=opaque_network())
    with pytest.warns(UserWarning, match="nothing to measure"):
        nothing = run(looks, NoiseScaleMonitor(), model=model, accumulate_grad_batches=1)
    measured = run(NoiseScaleMonitor())

    assert all(math.isnan(value) for value in looks.ends)
    keys = {k for k in measured.callback_metrics if k.rpartition("/")[2] not in INCREMENTS}
    assert set(nothing.callback_metrics) == keys


def test_a_search_for_a_learning_rate_in_the_same_fit_leaves_the_keys_alone() -> None:
    class Tuned(type(classifier())):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    finder = LearningRateFinder(num_training_steps=8, update_attr=True)
    fitting = run(NoiseScaleMonitor(), stopping(), finder, model=validated(Tuned()))

    assert fitting.callback_metrics["noise_scale/step"] == 14
    assert math.isfinite(fitting.callback_metrics[LOW])
