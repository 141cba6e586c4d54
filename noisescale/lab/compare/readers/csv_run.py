# SPDX-License-Identifier: Apache-2.0
"""A run in one CSV file: a CSVLogger's metrics.csv, or a history that W&B or MLflow exported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from noisescale.history.metric_names import measured_in, name_in, prefix_of
from noisescale.history.reading import CLOCKS, is_logged_number
from noisescale.lab.compare.readers.found import Found, is_number, named, number, table
from noisescale.lab.compare.readers.hyperparameters import read_hparams
from noisescale.lab.compare.readers.logged_run import EPOCHS, Logged, LoggedRun, trial_of
from noisescale.lab.compare.readers.long_csv import GROUPS, TRIALS
from noisescale.printable import printable

_STEPS = (*CLOCKS, "_step")
_OF_LIGHTNING = "trainer/global_step"
_OF_TRACKERS = ("_step", "_runtime", "_timestamp", _OF_LIGHTNING, "train/global_step")


def is_csv_run(path: Path, names: Sequence[str]) -> bool:
    """Whether a CSV file has one run, as a logger or tracker wrote it."""
    if _ours(names) or any(name in names for name in _OF_TRACKERS):
        return True
    return path.name == "metrics.csv" and not _of_trials(names)


def read_csv_run(run: Path, below: Path, metric: str, submission: str | None) -> Found:
    """Read a run from the metrics.csv in a folder, or from a CSV file.

    The step of an evaluation is in the first of these columns that has numbers beside the metric:

    | column | of | step |
    |---|---|---|
    | `step` | CSVLogger, MLflow | one less than the optimizer's, if hparams.yaml is beside |
    | `trainer/global_step` | W&B with Lightning | one less than the optimizer's |
    | `train/global_step` | W&B with transformers | the optimizer's |
    | `_step` | W&B | the calls of `wandb.log`: right if each step was logged once |

    With columns of NoiseScaleMonitor, the optimizer's step is known, see `trial_of`, and the
    training time and the examples too. Else the seconds are W&B's `_runtime` or, without it,
    `_timestamp` since its first value: both have the time of validations. A CSVLogger has no
    clock. Hyperparameters are those of the hparams.yaml beside.

    Args:
        run: The folder or file.
        below: The path that was asked for, which names the trial.
        metric: The name of the column.
        submission: See `read_trials`.

    Raises:
        ValueError: If there is no column of steps, a step is missing, a cell has no number, or the
            file has several trials.
    """
    path = run / "metrics.csv" if run.is_dir() else run
    names, lines = table(path)
    if not is_csv_run(path, names):
        raise ValueError(
            f"`{printable(path)}` must have one run, got the columns"
            f" {', '.join(_of_trials(names))} of several trials. Name the file, not its folder."
        )
    wanted = [name for name in names if name in (metric, *EPOCHS)] + _ours(names)
    where = {name: names.index(name) for name in names}
    beside = [row for _, row in lines if metric in where and row[where[metric]]]
    clocks = [name for name in _STEPS if name in where]
    clock = next((c for c in clocks if any(row[where[c]] for row in beside)), "")
    if beside and not clock:
        raise ValueError(
            f"`{printable(path)}` must have the step of each {printable(metric)} in a column"
            f" {', '.join(_STEPS)}, got {printable(', '.join(names))}. Export all columns."
        )
    lacking = [at for at, row in lines if beside and row[where[metric]] and not row[where[clock]]]
    if lacking:
        raise ValueError(
            f"`{clock}` must be known of each {printable(metric)}, got an empty cell in line"
            f" {lacking[0]} of {printable(path)}. Write the step into it, or remove the line."
        )
    time = next((name for name in ("_runtime", "_timestamp") if name in where), "")

    def logged(name: str) -> Logged:
        rows = [(at, row) for at, row in lines if row[where[name]] and row[where[clock]]]
        steps, values, seconds = (
            [
                number(row[where[of]], path, at, of) if row[where[of]] else math.nan
                for at, row in rows
            ]
            if of
            else None
            for of in (clock, name, time)
        )
        for step, (at, row) in zip(steps or [], rows, strict=True):
            if not math.isfinite(step):
                raise ValueError(
                    f"`{clock}` must be finite, got {row[where[clock]]!r} in line {at} of"
                    f" {printable(path)}. Correct this cell, or remove the line."
                )
        return Logged(steps or [], values or [], seconds and [each - began for each in seconds])

    stamps = (row[where[time]] for _, row in lines if time == "_timestamp" and row[where[time]])
    began = min((float(stamp) for stamp in stamps if is_number(stamp)), default=0.0)
    scalars = {name: logged(name) for name in wanted} if clock else {}
    behind = clock == _OF_LIGHTNING or (
        clock == "step" and (path.parent / "hparams.yaml").is_file()
    )
    source = LoggedRun(
        str(path), scalars, float(behind), read_hparams(path.parent), counts_calls=clock == "_step"
    )
    return Found([trial_of(source, named(run, below), metric, submission)], lambda: names)


def _ours(names: Sequence[str]) -> list[str]:
    """Return the columns of numbers of NoiseScaleMonitor, or of the first of several."""
    who = next((who for name in names if (who := measured_in(name)) is not None), None)
    if who is None:
        return []
    monitor, optimizer = who
    prefix = prefix_of(optimizer, monitor or None)
    return [
        n for n in names if (within := name_in(n, prefix)) is not None and is_logged_number(within)
    ]


def _of_trials(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in (*GROUPS, *TRIALS)]
