# SPDX-License-Identifier: Apache-2.0
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logged_runs import log_run, record
from refused import refused

from noisescale.extras import MissingExtraError
from noisescale.history.history import History
from noisescale.history.record import Recorder
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.reading import read_trials

BATCH, EXAMPLES, EPOCHS = 10, 100, 3


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training with a monitor and without, in the folders "with" and "without"."""
    from fits import both_loggers, classifier, data, loader, trainer
    from torch.utils.data import DataLoader

    from noisescale import NoiseScaleMonitor

    class Validated(type(classifier())):  # type: ignore[misc]
        """Logs the optimizer step at each validation: what a reader has to find."""

        def __init__(self, lr: float = 0.1, batch_size: int = BATCH, optimizer: str = "sgd"):
            super().__init__()
            self.save_hyperparameters()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_step", float(self.trainer.global_step))
            self.log("val_epochs", self.trainer.global_step / (EXAMPLES / BATCH))

    root = tmp_path_factory.mktemp("logs")
    for name, callbacks in (("with", [NoiseScaleMonitor()]), ("without", [])):
        fitting = trainer(
            ranks=1,
            strategy="auto",
            max_epochs=EPOCHS,
            val_check_interval=0.5,
            log_every_n_steps=4,
            num_sanity_val_steps=0,
            callbacks=callbacks,
            logger=both_loggers(root / name),
        )
        fitting.fit(Validated(), loader(BATCH, EXAMPLES), DataLoader(data(10), batch_size=10))
    return root


@pytest.mark.parametrize("monitored", ["with", "without"])
@pytest.mark.parametrize("logger", ["board", "csv"])
def test_a_run_of_lightning_is_read_on_all_clocks(logs: Path, monitored: str, logger: str) -> None:
    (trial,) = read_trials(logs / monitored / logger, "val_step")
    (epochs,) = read_trials(logs / monitored / logger, "val_epochs")

    measured = trial.measurements
    assert measured.steps.tolist() == measured.values.tolist() == [5, 10, 15, 20, 25, 30]
    assert measured.examples == pytest.approx(BATCH * measured.steps)
    assert epochs.measurements.epochs == pytest.approx(epochs.measurements.values)
    assert (trial.name, trial.submission) == (logger, "sgd")
    assert (trial.batch_size, trial.learning_rate) == (BATCH, 0.1)
    if monitored == "with" or logger == "board":
        assert (np.diff(measured.seconds) > 0).all()
    else:
        assert measured.seconds is None


def write_events(
    folder: Path, events: Iterable[tuple[float, int, str, float]], began: float = 1000
) -> Path:
    """Write an event file of (time, step, tag, value), as a program that starts at `began`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"events.out.tfevents.{began:.0f}"
    with file.open("wb") as stream:
        records = RecordWriter(stream)
        records.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        for at, step, tag, value in events:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            records.write(Event(wall_time=at, step=step, summary=summary).SerializeToString())
    return file


LOSSES = [(1010, 10, "loss", 3.0), (1020, 20, "loss", 2.0)]


def read_one(path: Path, metric: str = "loss") -> Trial:
    (trial,) = read_trials(path, metric)
    return trial


def test_runs_below_a_folder_are_named_by_their_paths(logs: Path, tmp_path: Path) -> None:
    for version in (10, 2):
        shutil.copytree(logs / "without/board", tmp_path / f"sgd/version_{version}")
    write_events(tmp_path / "adam/version_0", [(1001, 1, "other", 1.0)])

    trials = read_trials(tmp_path, "val_step", submission="mine")

    assert [(trial.name, len(trial.measurements)) for trial in trials] == [
        ("adam/version_0", 0),
        ("sgd/version_2", 6),
        ("sgd/version_10", 6),
    ]
    assert {trial.submission for trial in trials} == {"mine"}
    with refused("goal", got="'val'", remedy="val_epochs"):
        read_trials(tmp_path, "val")


def test_time_between_two_files_of_a_resumed_run_does_not_count(tmp_path: Path) -> None:
    write_events(tmp_path, [*LOSSES, (1025, 22, "other", 0)])
    write_events(tmp_path, [(5008, 20, "loss", 1.5), (5018, 30, "loss", math.nan)], began=5000)

    trial = read_one(tmp_path)

    assert trial.measurements.steps.tolist() == [10, 20, 30]
    assert trial.measurements.values.tolist()[:2] == [3, 1.5]
    assert trial.measurements.seconds == pytest.approx([10, 25 + 8, 25 + 18])
    assert trial.diverged


def read_monitored(folder: Path, rows: list[dict[str, float]], at: list[int]) -> Trial:
    columns = {name: [row.get(name, math.nan) for row in rows] for row in rows for name in row}
    record(folder, **columns, behind=np.ones(len(rows)))
    write_events(folder, [(1000 + step, step - 1, "loss", 1.0) for step in at])
    return read_one(folder)


def test_examples_and_training_time_are_those_of_the_monitor(tmp_path: Path) -> None:
    """Twice the examples and the seconds from step 20 on; no step was timed before step 30."""
    rows = [
        {"step": 10, "examples": 100, "batch_size": 10, "learning_rate": 0.5},
        {"step": 20, "examples": 200, "batch_size": 10, "learning_rate": 0.25},
        {"step": 30, "examples": 400, "batch_size": 20, "seconds_per_step": 2},
        {"step": 40, "examples": 600, "batch_size": 20, "seconds_per_step": 4},
    ]

    trial = read_monitored(tmp_path, rows, [5, 20, 25, 50])

    assert trial.measurements.examples == pytest.approx([50, 200, 300, 800])
    assert trial.measurements.seconds == pytest.approx([3 * 5, 60, 60 + 10, 80 + 40 + 40])
    assert math.isnan(trial.batch_size)
    assert trial.learning_rate == 0.5


def test_a_run_that_was_refused_says_why_and_an_optimizer_that_was_not_has_its_rows(
    tmp_path: Path,
) -> None:
    refusal = History()
    refusal.why_nothing = "One process trains. Accumulate."
    Recorder(tmp_path).note(refusal)
    write_events(tmp_path, LOSSES)
    nothing = read_one(tmp_path)

    log_run(tmp_path, optimizer=1)
    (second,) = read_trials(tmp_path, "noise_scale/optimizer_1/simple")

    assert nothing.unmeasured == "One process trains. Accumulate."
    assert math.isnan(nothing.batch_size)
    assert second.batch_size == 64
    assert second.unmeasured == ""


@pytest.mark.parametrize(
    ("sizes", "constant"),
    [([8, 8, 4, 8, 4], 8), ([4, 8, 4, 8], 8), ([8, 8, 16, 16], math.nan), ([8, 4, 4, 8], math.nan)],
)
def test_short_last_batches_leave_the_batch_size_constant(
    tmp_path: Path, sizes: list[float], constant: float
) -> None:
    rows = [
        {"step": 10 * k, "examples": 80 * k, "batch_size": size} for k, size in enumerate(sizes, 1)
    ]

    found = read_monitored(tmp_path, rows, [10]).batch_size
    assert found == pytest.approx(constant, nan_ok=True)


def test_hyperparameters_of_torch_are_read_from_the_folder_that_it_makes(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 10)
        writer.add_hparams({"lr": 0.5, "batch_size": 32, "momentum": 0.9, "optimizer": "lars"}, {})

    trial = read_one(tmp_path)

    assert (trial.learning_rate, trial.batch_size, trial.submission) == (0.5, 32, "lars")
    assert dict(trial.hyperparameters) == {"momentum": 0.9}
    assert trial.measurements.steps.tolist() == [10]  # no hparams.yaml: not Lightning's


@pytest.mark.parametrize(
    ("steps", "logged", "epochs"),
    [
        ((10, 20, 30), {10: 0.5, 20: 1.0, 30: 1.5}, [0.5, 1, 1.5]),
        # Whole epochs have passed when they are logged.
        ((50, 100, 200), {100: 1.0, 200: 2.0}, [0.5, 1, 2]),
    ],
)
def test_epochs_of_transformers_are_parts(
    tmp_path: Path, steps: tuple[int, ...], logged: dict[int, float], epochs: list[float]
) -> None:
    events = [(1000 + step, step, "eval/loss", 1.0) for step in steps]
    events += [(1000 + step, step, "train/epoch", epoch) for step, epoch in logged.items()]
    write_events(tmp_path, sorted(events))

    assert read_one(tmp_path, "eval/loss").measurements.epochs == pytest.approx(epochs)


@pytest.mark.parametrize(("began", "seconds"), [(1000, [10, 10, 30]), (5000, None)])
def test_a_clock_that_was_set_back_says_no_time(tmp_path: Path, began: float, seconds: Any) -> None:
    """Nor do the times of a log that was converted: the file begins when it was written.

    Where the clock was set back during the run, time stands still.
    """
    write_events(tmp_path, [LOSSES[0], (1005, 15, "loss", 2.5), (1030, 20, "loss", 2)], began)

    measured = read_one(tmp_path).measurements

    assert measured.steps.tolist() == [10, 15, 20]
    assert (measured.seconds if seconds is None else measured.seconds.tolist()) == seconds


def test_without_tensorboard_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(tmp_path, [])
    monkeypatch.setattr("noisescale.extras.is_installed", lambda package: False)

    with pytest.raises(MissingExtraError, match=r'pip install "noisescale\[tensorboard\]"'):
        read_trials(tmp_path, "loss")


@pytest.mark.parametrize(
    ("last", "more", "steps"), [(-5, b"", [10]), (None, bytes(4096), [10, 20])]
)
def test_an_event_file_of_a_run_that_was_killed_is_read_until_there(
    tmp_path: Path, last: int | None, more: bytes, steps: list[int]
) -> None:
    """Zeros at its end are no damage."""
    file = write_events(tmp_path, LOSSES)
    file.write_bytes(file.read_bytes()[:last] + more)

    trial = read_one(file)

    assert trial.name == tmp_path.name
    assert trial.measurements.steps.tolist() == steps


def test_an_event_file_that_is_damaged_before_its_end_is_refused(tmp_path: Path) -> None:
    """What follows the damage cannot be read: the run may have reached the goal there."""
    file = write_events(tmp_path, [*LOSSES, (1030, 30, "loss", 1.0)])
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    with pytest.raises(ValueError, match=r"a damaged one after \d+ events"):
        read_trials(file, "loss")
