# SPDX-License-Identifier: Apache-2.0
"""The trial of one logged run, whichever logger wrote it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from noisescale.history.history import History
from noisescale.history.logs import (
    CLOCKS,
    OF_LIGHTNING_IN_WANDB,
    OF_WANDB,
    TIMES,
    CsvLog,
    EventLog,
    Metric,
)
from noisescale.history.metric_names import monitor_of
from noisescale.history.reading import mark_last, monitored_history, read_log, steps_behind
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.readers.found import Found, is_event_file, measurements_of, name_of_run
from noisescale.lab.compare.readers.hyperparameters import hyperparameters, read_hparams
from noisescale.lab.compare.readers.long_csv import TRIALS
from noisescale.refusal import Refusal

Array = NDArray[np.float64]

OF_TRANSFORMERS = "train/epoch"

EPOCHS = ("epoch", OF_TRANSFORMERS)
"""Names of the epoch: Lightning, the Trainer of transformers."""


def is_csv_run(path: Path, names: Sequence[str]) -> bool:
    """Return whether a CSV file has one run, as a logger or tracker wrote it."""
    if any(monitor_of(n) is not None or n in (*CLOCKS[1:], *TIMES) for n in names):
        return True
    return path.name == "metrics.csv" and not _trial_columns(names)


def read_logged_run(run: Path, below: Path, metric: str, submission: str | None) -> Found:
    """Read a run from event files of TensorBoard, or from a CSV file with one run.

    NoiseScaleMonitor is not needed, but makes the trial more exact. A file may end within an event
    or a line, as that of a run that was killed.

    - Steps: optimizer steps. The rows of NoiseScaleMonitor show whether the log is a step behind
      the optimizer (see `steps_behind`). Without it, a run of Lightning is taken to be one step
      behind: one with an hparams.yaml, or with W&B's `trainer/global_step`. W&B's `_step` counts
      calls of `wandb.log`. Of steps that a resumed run trained again the last evaluations count.
    - Examples: those that NoiseScaleMonitor logged, interpolated, else steps times batch size.
    - Epochs: from the logged epoch, see `_epochs`.
    - Seconds: the training time from the seconds per step that NoiseScaleMonitor logged, which
      leave out validation. Without it, the time since the first event of the run, without the time
      between two event files, or W&B's `_runtime` or `_timestamp`.
    - Batch size: that of NoiseScaleMonitor, if it was constant. In a run without the monitor it is
      the hyperparameter `batch_size`, which must then be the global one.
    - Learning rate: the hyperparameter, else the largest that NoiseScaleMonitor logged.
    - Hyperparameters: those of hparams.yaml, if PyYAML is installed, and those that were logged for
      TensorBoard's page of hyperparameters, into the same folder as by Lightning, or into a folder
      in it as by torch's `add_hparams`.

    A metric that was not logged gives no evaluations.

    Args:
        run: The folder or file.
        below: The path that was asked for, which names the trial.
        metric: The name of the metric.
        submission: See `read_trials`.

    Raises:
        ValueError: If a file is damaged, a step is missing, or a CSV file has several trials.
        MissingExtraError: If there are event files, and TensorBoard is not installed.
    """
    log = read_log(run)
    folder = run.parent if run.is_file() else run
    of_lightning, counts_calls = (folder / "hparams.yaml").is_file(), False
    given = read_hparams(folder)
    if isinstance(log, CsvLog):
        if not is_csv_run(log.path, log.names):
            raise Refusal(
                log.path,
                "have one run",
                f"the columns {', '.join(_trial_columns(log.names))} of several trials",
                "Name the file, not its folder.",
            )
        clock = log.clock_of(metric)
        of_lightning = clock == OF_LIGHTNING_IN_WANDB or (clock == CLOCKS[0] and of_lightning)
        counts_calls = clock == OF_WANDB
    else:
        files = sorted(file for file in folder.glob("*/*") if is_event_file(file.name))
        within = EventLog(folder, files)
        given = within.hyperparameters | log.hyperparameters | given
    found = hyperparameters(given)
    history = monitored_history(run)
    logged_at, values, logged_seconds = log.metric(metric)
    last = mark_last(logged_at)
    behind = float(of_lightning) if not history else steps_behind(history)
    at = logged_at[last] + behind
    batch_size, learning_rate = found.batch_size, found.learning_rate
    examples = seconds = None
    doubtful = {"steps"} if counts_calls and not history else set[str]()
    if np.isfinite(logged_seconds).any():  # clocks may be set back
        seconds = np.fmax.accumulate(logged_seconds[last])
        doubtful.add("seconds")
        if (seconds < 0).any():  # to before the run began, which says nothing of its time
            seconds = None
    if history:
        batch_size = _only_batch_size(history["batch_size"])
        examples = _interpolate(at, history["step"], history["examples"], history["batch_size"][-1])
        trained = _training_time(at, history)
        if trained is not None:
            seconds = trained
            doubtful.discard("seconds")
        if math.isnan(learning_rate) and np.isfinite(history["learning_rate"]).any():
            learning_rate = float(np.nanmax(history["learning_rate"]))
    epoch = next((name for name in EPOCHS if name in log.names), None)
    trial = Trial(
        name_of_run(run, below),
        measurements_of(
            str(run),
            at,
            values[last],
            batch_size=batch_size,
            examples=examples,
            epochs=_epochs(at, epoch, _metric_beside(log, epoch, metric), behind)
            if epoch
            else None,
            seconds=seconds,
        ),
        submission=found.optimizer if submission is None else submission,
        batch_size=batch_size,
        learning_rate=learning_rate,
        hyperparameters=MappingProxyType(dict(found.others)),
        optimizer=found.optimizer,
        doubtful_clocks=frozenset(doubtful),
        unmeasured="" if history is None else history.why_nothing or history.withheld,
    )
    return Found([trial], lambda: log.names)


def _metric_beside(log: CsvLog | EventLog, name: str, metric: str) -> Metric:
    """Return another metric, with the steps of the first."""
    return log.metric(name, like=metric) if isinstance(log, CsvLog) else log.metric(name)


def _trial_columns(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in TRIALS]


def _only_batch_size(batch_sizes: Array) -> float:
    """Return the batch size of a run; NaN if it changed.

    Single steps with fewer examples do not count: they end an epoch.
    """
    padded = np.concatenate([[math.inf], batch_sizes, [math.inf]])
    short = (padded[1:-1] < padded[:-2]) & (padded[1:-1] < padded[2:])
    sizes = np.unique(batch_sizes[~short] if not short.all() else batch_sizes)
    return float(sizes[0]) if len(sizes) == 1 else math.nan


def _interpolate(at: Array, steps: Array, totals: Array, slope: float) -> Array:
    """Interpolate what rises from zero along steps; after the last of these, with a slope."""
    inside: Array = np.interp(at, np.append(0.0, steps), np.append(0.0, totals))
    beyond: Array = slope * np.maximum(at - steps[-1], 0.0)
    return inside + beyond


def _training_time(at: Array, history: History) -> Array | None:
    """Return the seconds of the training steps until each step, without validations."""
    seconds = history["seconds_per_step"]
    if not np.isfinite(seconds).any():
        return None
    seconds = np.where(np.isfinite(seconds), seconds, np.nanmean(seconds))
    total = np.cumsum(seconds * np.diff(history["step"], prepend=0.0))
    return _interpolate(at, history["step"], total, float(seconds[-1]))


def _epochs(at: Array, name: str, logged: Metric, behind: float) -> Array:
    """Return the epochs until each step.

    The Trainer of transformers logs the epochs that have passed, parts of epochs too. These are
    interpolated from 0. Lightning logs the number of the epoch, from 0. Its epoch ends with the
    last step that was logged under its number, a validation's as a rule; within an epoch, steps
    count alike. An epoch in which the log ends is as long as those before it, if there are any, and
    as the log.
    """
    steps, values, _ = logged
    last = mark_last(steps) & np.isfinite(values)
    steps, values = steps[last] + behind, values[last]
    if not len(steps):
        return np.full(len(at), math.nan)
    if name == OF_TRANSFORMERS or (values % 1).any():
        passed: Array = np.interp(at, np.append(0.0, steps), np.append(0.0, values))
        return passed
    ends = np.append(values[1:] > values[:-1], True)
    steps, values = np.append(0.0, steps[ends]), np.append(0.0, values[ends] + 1)
    if len(steps) > 2:
        mean = steps[-2] / values[-2]
        steps[-1] = max(steps[-1], steps[-2] + mean * (values[-1] - values[-2]))
    return np.interp(at, steps, values)
