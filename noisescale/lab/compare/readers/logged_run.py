# SPDX-License-Identifier: Apache-2.0
"""The trial of one logged run, whichever logger wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescale.history.history import History
from noisescale.history.metric_names import measured_in
from noisescale.history.reading import history_from_scalars, last_logged, steps_behind
from noisescale.history.run_error import RunError
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.readers.found import measured
from noisescale.lab.compare.readers.hyperparameters import hyperparameters

Array = NDArray[np.float64]

OF_TRANSFORMERS = "train/epoch"

EPOCHS = ("epoch", OF_TRANSFORMERS)
"""Names of the epoch: Lightning, the Trainer of transformers."""


class Logged(NamedTuple):
    """A metric in the order of logging."""

    steps: ArrayLike
    """Under which it was logged."""
    values: ArrayLike
    seconds: ArrayLike | None = None
    """Since the run began, if known."""


@dataclass(frozen=True)
class LoggedRun:
    """What a logger wrote about one run."""

    source: str
    """The run's file or folder, for messages."""
    scalars: Mapping[str, Logged]
    """By name: the metric that is asked for, the epochs, and all metrics of NoiseScaleMonitor."""
    behind: float = 0.0
    """How many steps the log is behind the optimizer, if the run has no NoiseScaleMonitor."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    counts_calls: bool = False
    """Whether the steps are calls of the logger, if the run has no NoiseScaleMonitor."""


def trial_of(run: LoggedRun, name: str, metric: str, submission: str | None) -> Trial:
    """Return the trial of a run.

    - Steps: optimizer steps. The rows of NoiseScaleMonitor show whether the log is a step behind
      the optimizer (see `steps_behind`). Of steps that a resumed run trained again the last
      evaluations count.
    - Examples: those that NoiseScaleMonitor logged, interpolated, else steps times batch size.
    - Epochs: from the logged epoch, see `_epochs`.
    - Seconds: the training time from the seconds per step that NoiseScaleMonitor logged, which
      leave out validation, else the time of the log.
    - Batch size: that of NoiseScaleMonitor, if it was constant. In a run without the monitor it is
      the hyperparameter `batch_size`, which must then be the global one.
    - Learning rate: the hyperparameter, else the largest that NoiseScaleMonitor logged.

    A metric that was not logged gives no evaluations.
    """
    history, behind = _monitored(run)
    steps, values, logged_seconds = run.scalars.get(metric, Logged([], []))
    logged_at = np.asarray(steps, np.float64)
    last = last_logged(logged_at)
    at = logged_at[last] + behind
    given = hyperparameters(run.hyperparameters)
    batch_size, learning_rate = given.batch_size, given.learning_rate
    examples = seconds = None
    doubtful = {"steps"} if run.counts_calls and history is None else set[str]()
    if logged_seconds is not None:  # clocks may be set back
        seconds = np.fmax.accumulate(np.asarray(logged_seconds, np.float64)[last])
        doubtful.add("seconds")
        if (seconds < 0).any():  # to before the run began, which says nothing of its time
            seconds = None
    if history is not None:
        batch_size = _constant(history["batch_size"])
        examples = _along(at, history["step"], history["examples"], history["batch_size"][-1])
        trained = _training_time(at, history)
        if trained is not None:
            seconds = trained
            doubtful.discard("seconds")
        if math.isnan(learning_rate) and np.isfinite(history["learning_rate"]).any():
            learning_rate = float(np.nanmax(history["learning_rate"]))
    epoch = next((name for name in EPOCHS if name in run.scalars), None)
    return Trial(
        name,
        measured(
            run.source,
            at,
            np.asarray(values, np.float64)[last],
            batch_size=batch_size,
            examples=examples,
            epochs=None if epoch is None else _epochs(at, epoch, run.scalars[epoch], behind),
            seconds=seconds,
        ),
        submission=given.optimizer if submission is None else submission,
        batch_size=batch_size,
        learning_rate=learning_rate,
        hyperparameters=MappingProxyType(dict(given.others)),
        optimizer=given.optimizer,
        doubtful_clocks=frozenset(doubtful),
    )


def _monitored(run: LoggedRun) -> tuple[History | None, float]:
    """Return the monitor's history, if there is one, and how far the log is behind."""
    ours = next((name for name in sorted(run.scalars) if measured_in(name) is not None), None)
    if ours is None:
        return None, run.behind
    monitor, optimizer = measured_in(ours) or ("", 0)
    scalars = {name: (logged.steps, logged.values) for name, logged in run.scalars.items()}
    try:
        history = history_from_scalars(
            scalars, optimizer=optimizer, monitor=monitor or None, source=run.source
        )
    except RunError:  # no whole row
        return None, run.behind
    return history, steps_behind(*scalars[ours])


def _constant(batch_sizes: Array) -> float:
    """Return the batch size of a run; NaN if it changed.

    Single steps with fewer examples do not count: they end an epoch.
    """
    padded = np.concatenate([[math.inf], batch_sizes, [math.inf]])
    short = (padded[1:-1] < padded[:-2]) & (padded[1:-1] < padded[2:])
    sizes = np.unique(batch_sizes[~short] if not short.all() else batch_sizes)
    return float(sizes[0]) if len(sizes) == 1 else math.nan


def _along(at: Array, steps: Array, totals: Array, slope: float) -> Array:
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
    return _along(at, history["step"], total, float(seconds[-1]))


def _epochs(at: Array, name: str, logged: Logged, behind: float) -> Array:
    """Return the epochs until each step.

    The Trainer of transformers logs the epochs that have passed, parts of epochs too. These are
    interpolated from 0. Lightning logs the number of the epoch, from 0. Its epoch ends with the
    last step that was logged under its number, a validation's as a rule; within an epoch, steps
    count alike. An epoch in which the log ends is as long as those before it, if there are any, and
    as the log.
    """
    steps, values = np.asarray(logged.steps, np.float64), np.asarray(logged.values, np.float64)
    last = last_logged(steps) & np.isfinite(values)
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
