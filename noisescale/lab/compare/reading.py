# SPDX-License-Identifier: Apache-2.0
"""Read trials from the files that loggers and trackers leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from noisescale.csv_lines import csv_lines
from noisescale.history.reading import refuse_metric
from noisescale.history.trackers import refuse_chart, refuse_tracker
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.readers.found import (
    Found,
    broken_trial,
    is_event_file,
    name_of_run,
    natural_key,
)
from noisescale.lab.compare.readers.logged_run import is_csv_run, read_logged_run
from noisescale.lab.compare.readers.long_csv import read_long_csv
from noisescale.refusal import FileRefusal, Refusal

FORMATS = (
    "event files of TensorBoard, a metrics.csv of CSVLogger, a CSV export of W&B or MLflow,"
    " or a CSV file with a line for each evaluation"
)


def read_trials(
    path: str | PathLike[str], metric: str, *, submission: str | None = None
) -> list[Trial]:
    """Read all trials at a path, whatever their format.

    | path | trials | see |
    |---|---|---|
    | a folder with event files of TensorBoard, or an event file | one | `readers/logged_run.py` |
    | a folder with a CSVLogger's metrics.csv, or this file | one | `readers/logged_run.py` |
    | a CSV file with the whole history of a run of W&B or MLflow | one | `readers/logged_run.py` |
    | another CSV file, with a line for each evaluation | many | `readers/long_csv.py` |
    | a folder above folders with event files or metrics.csv | one for each folder | |

    Folders within the folder of a run belong to this run. They are no trials of their own.

    A run that cannot be read is a trial without evaluations, and its `fault` says why. So is an
    empty folder, and a folder with an hparams.yaml alone, beside folders with runs.

    Args:
        path: A folder or a file.
        metric: The name of the metric in the files.
        submission: What the trials are trials of, if their format does not have a submission.
            By default it is the optimizer that was logged as a hyperparameter, if there is one.

    Returns:
        The trials. Each is named by its path below `path`, or by what tells it apart in its file,
        so that names are unique within one path. A trial in which the metric was not logged has no
        evaluations.

    Raises:
        ValueError: If there are no trials, no trial can be read, or no trial has the metric. The
            message then lists metrics that there are, of the first 20 runs.
        OSError: If the path cannot be read.
        MissingExtraError: If there are event files, and TensorBoard is not installed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> sweep = Path(folder.name, "sweep.csv")
        >>> _ = sweep.write_text("step,batch_size,val_loss\\n90,32,0.2\\n90,64,0.1\\n")
        >>> [(trial.name, trial.batch_size) for trial in read_trials(sweep, "val_loss")]
        [('batch_size=32', 32.0), ('batch_size=64', 64.0)]
        >>> folder.cleanup()
    """
    path = Path(path)
    found = [*_read_path(path, metric, submission)]
    trials = [trial for each in found for trial in each.trials]
    if not found:
        refuse_tracker(path, rows=False)
        raise Refusal(
            path,
            "contain trials",
            "none",
            f"Name a file or folder of one of these formats: {FORMATS}.",
        )
    if trials and all(trial.fault for trial in trials):
        raise next(error for each in found for error in each.errors)
    if not any(len(trial.measurements) for trial in trials):
        refuse_metric(path, metric, {name for each in found[:20] for name in each.metrics()})
    return trials


def _read_path(path: Path, metric: str, submission: str | None) -> Iterator[Found]:
    if path.is_file():
        yield from _read_file(path, metric, submission)
        return
    if not path.exists():
        raise FileRefusal(path, "be a folder or a file", "a path that does not exist", "Check it.")
    runs, empty = [], []
    for folder, below, files in os.walk(path):
        if any(map(is_event_file, files)) or "metrics.csv" in files:
            runs.append(Path(folder))
        else:
            place = Path(folder)
            if not below and {*files} <= {"hparams.yaml"} and place != path:
                empty += [] if place.name.startswith(".") else [place]
            continue
        below.clear()
    for run in sorted(runs, key=natural_key):
        try:
            yield read_logged_run(run, path, metric, submission)
        except (ValueError, OSError) as refused:
            yield _broken(run, path, refused, submission)
    for place in sorted(empty, key=natural_key) if runs else ():
        trained = any(place.iterdir())
        got = "a folder without one" if trained else "an empty folder"
        error = Refusal(place, "have the log of a run", got, "Remove it, or put the log there.")
        yield _broken(place, path, error, submission if trained else None)


def _broken(run: Path, path: Path, error: Exception, submission: str | None) -> Found:
    trial = broken_trial(name_of_run(run, path), error, submission)
    return Found([trial], tuple, [error])


def _read_file(path: Path, metric: str, submission: str | None) -> Iterator[Found]:
    if is_event_file(path.name):
        yield read_logged_run(path, path, metric, submission)
    elif path.suffix == ".csv":
        _, names = next(csv_lines(path), (0, []))
        refuse_chart(path, names)
        if is_csv_run(path, names):
            yield read_logged_run(path, path, metric, submission)
        else:
            yield read_long_csv(path, metric, submission)
