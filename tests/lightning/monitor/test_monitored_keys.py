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
from fits import classifier, fit, loader, opaque_network, trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from noisescale import BatchSizeScheduler, NoiseScaleMonitor
from noisescale.meter.logged_meter import LoggedMeter

LOW = "noise_scale/lower_bound"


def stopping(key: str = LOW, **options: Any) -> EarlyStopping:
    return EarlyStopping(key, patience=99, check_finite=False, **options)


def validated(cls: type | None = None) -> Any:
    class Validated(cls or type(classifier())):
        def val_dataloader(self) -> Any:
            return loader(50)

    return Validated()


class Plateau(type(classifier())):
    """Its learning rate goes by the noise scale."""

    def __init__(self, interval: str = "epoch", patience: int = 10) -> None:
        super().__init__()
        self.patience = patience
        self.interval = interval
        self.found: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=self.patience)
        config = {"scheduler": schedule, "monitor": LOW, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.found.append(float(metric))
        scheduler.step(metric)


class Looks(L.Callback):
    """Finds what any callback would, at whatever time it looks."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def look(self, when: str, fitting: Any) -> None:
        metrics = fitting.callback_metrics
        self.found.setdefault(when, []).append(metrics[LOW].item() if LOW in metrics else None)

    def on_train_epoch_start(self, fitting: Any, *_: Any) -> None:
        self.look("train epoch start", fitting)

    def on_validation_end(self, fitting: Any, *_: Any) -> None:
        if not fitting.sanity_checking:
            self.look("validation end", fitting)

    def on_train_epoch_end(self, fitting: Any, *_: Any) -> None:
        self.look("train epoch end", fitting)


def run(*callbacks: Any, model: Any = None, batch_size: int = 8, **options: Any) -> Any:
    """One process, steps of two batches, 7 to an epoch."""
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 50, **options}
    fitting = trainer(1, strategy="auto", callbacks=[*callbacks], **options)
    fitting.fit(model or validated(), loader(batch_size))
    return fitting


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("model", [classifier, validated])
def test_a_new_lower_bound_is_there_whenever_others_look(first: bool, model: Any) -> None:
    looks = Looks()
    others = stopping("noise_scale/grad_sq_norm", check_on_train_epoch_end=False)
    early = [stopping(), others, looks]
    monitor = NoiseScaleMonitor()

    run(*early, monitor, model=model()) if first else run(monitor, *early, model=model())

    ends = looks.found["train epoch end"]
    assert len(set(ends)) == 2
    assert all(math.isfinite(value) for value in ends)
    assert looks.found.get("validation end", ends) == ends
    assert math.isnan(looks.found["train epoch start"][0])
    assert looks.found["train epoch start"][1] == ends[0]
    assert monitor.history["step"].tolist() == [14]
    assert monitor.history["low"][-1] == pytest.approx(ends[-1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit_train_batches": 2},
        {"num_sanity_val_steps": 0},
        {"val_check_interval": 3},
        {"check_val_every_n_epoch": 2},
        {"max_steps": 4, "max_epochs": -1},
        {"fast_dev_run": True},
    ],
)
def test_checkpoints_and_early_stopping_find_the_keys(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """By example, so that no step is short of micro-batches."""
    saved = ModelCheckpoint(tmp_path, monitor=LOW)
    monitor = NoiseScaleMonitor(small_batch="example")
    options = {"enable_checkpointing": True, "accumulate_grad_batches": 1, **options}

    fitting = run(stopping(), saved, monitor, **options)

    assert not fitting.should_stop
    if "fast_dev_run" not in options:  # Lightning leaves both callbacks out there
        assert saved.best_model_score is not None
        assert saved.best_model_score.isfinite()
    assert LOW in fitting.callback_metrics


def test_checkpoints_every_so_many_steps_find_the_lower_bound_of_their_step(
    tmp_path: Path,
) -> None:
    """It is what a log at that very step has."""
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
    look = LoggedMeter.look

    def counted(measurement: LoggedMeter) -> dict[str, float]:
        reads.append(measurement.meter.last_measured_step)
        return look(measurement)

    monkeypatch.setattr(LoggedMeter, "look", counted)
    monitor = NoiseScaleMonitor(every_n_steps=1)

    run(monitor, log_every_n_steps=4, max_epochs=3, logger=CSVLogger(tmp_path, "", ""))

    assert reads == [0, 7, 14, 21]  # before the first step and at the ends of epochs
    assert monitor.history["step"].tolist() == [4, 8, 12, 16, 20, 21]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(lines) == 1 + 6


def test_looking_changes_nothing_of_what_is_logged() -> None:
    """The rows of a run that is looked at after every step are those of one that is not."""
    looked_at, alone = NoiseScaleMonitor(), NoiseScaleMonitor()

    run(looked_at, model=Plateau("step", patience=99), log_every_n_steps=4)
    run(alone, model=type(classifier())(), log_every_n_steps=4)

    for name, column in alone.history.items():
        if name != "seconds_per_step":
            assert looked_at.history[name].tolist() == pytest.approx(column.tolist(), nan_ok=True)


def test_ranks_find_the_same(tmp_path: Path) -> None:
    found = fit(
        stopping(),
        NoiseScaleMonitor(),
        ModelCheckpoint(tmp_path, monitor=LOW, every_n_train_steps=2),
        model=validated(),
        max_epochs=2,
        enable_checkpointing=True,
        results=lambda fitting, _: (
            fitting.early_stopping_callback.best_score.item(),
            [c.best_model_score.item() for c in fitting.checkpoint_callbacks],
        ),
    )

    assert found[0] == found[1]
    assert math.isfinite(found[0][0])


def test_what_the_scheduler_logs_is_there_too(tmp_path: Path) -> None:
    keys = [f"batch_size/{key}" for key in ("wanted", "given", "lr_factor", "noise_scale")]
    saved = ModelCheckpoint(tmp_path, monitor="batch_size/given", mode="max")

    run(
        *map(stopping, keys),
        saved,
        BatchSizeScheduler("ratio", max_batch_size=32, decide_every_n_steps=1),
        enable_checkpointing=True,
    )

    assert saved.best_model_score.isfinite()


def test_where_nothing_can_be_measured_the_keys_are_not_a_number() -> None:
    looks = Looks()
    with pytest.warns(UserWarning, match="nothing to measure"):
        run(
            looks,
            NoiseScaleMonitor(),
            model=classifier(net=opaque_network()),
            accumulate_grad_batches=1,
        )
    measured = run(NoiseScaleMonitor())

    assert all(math.isnan(value) for value in looks.found["train epoch end"])
    keys = {k for k in measured.callback_metrics if "increment" not in k}
    with pytest.warns(UserWarning, match="nothing to measure"):
        nothing = run(
            NoiseScaleMonitor(),
            model=classifier(net=opaque_network()),
            accumulate_grad_batches=1,
        )
    assert set(nothing.callback_metrics) == keys


def test_a_search_for_a_learning_rate_in_the_same_fit_leaves_the_keys_alone() -> None:
    class Tuned(type(validated())):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    fitting = run(
        NoiseScaleMonitor(),
        stopping(),
        LearningRateFinder(num_training_steps=8, update_attr=True),
        model=Tuned(),
        logger=False,
    )

    assert fitting.callback_metrics["noise_scale/step"] == 14
    assert math.isfinite(fitting.callback_metrics[LOW])
