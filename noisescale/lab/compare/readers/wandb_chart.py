# SPDX-License-Identifier: Apache-2.0
"""Runs in the CSV export of a chart on W&B's page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from noisescale.csv_lines import table
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.readers.found import (
    Found,
    broken_trial,
    measurements_of,
    number,
)
from noisescale.refusal import Refusal

_BETWEEN = " - "
_RANGES = ("__MIN", "__MAX")
_STEPS = {"Step": 0, "_step": 0, "global_step": 0, "train/global_step": 0, "trainer/global_step": 1}
"""Names of the step, and how many steps it is behind the optimizer's."""


def is_chart(names: Sequence[str]) -> bool:
    """Return whether a CSV file with these columns is the export of a chart."""
    return any(_BETWEEN in name and f"{name}{_RANGES[0]}" in names for name in names)


def read_chart(path: Path, metric: str, submission: str | None) -> Found:
    """Read one trial for each run of a chart.

    The first column is the chart's x-axis. For each run there are the columns "RUN - METRIC",
    "RUN - METRIC__MIN" and "RUN - METRIC__MAX", of which the first counts. A group of runs has one
    such column, with the mean over its runs, and is one trial. W&B averages or samples the values
    of long runs in charts. The whole history of a run is better, see `read_logged_run`.

    The step is the x-axis, if it is "Step" or "trainer/global_step", or else "RUN - _step". "Step"
    and "_step" count calls of `wandb.log`, not optimizer steps. Choose "trainer/global_step" for
    runs of Lightning: it is one less than the optimizer's step, and here one is added. If the
    x-axis is "Relative Time (Process)", it gives the seconds.

    Args:
        path: The file.
        metric: The name of the metric, as in the chart.
        submission: See `read_trials`.

    Raises:
        ValueError: If there are no steps, or a cell has no number.
    """
    names, lines, cut = table(path)
    axis, end = names[0], f"{_BETWEEN}{metric}"
    trials: list[Trial] = []
    errors: list[Exception] = []
    for column in [name for name in names[1:] if name.endswith(end)]:
        run = column.removesuffix(end)
        of_run = {f"{run}{_BETWEEN}{step}": behind for step, behind in _STEPS.items()}
        clocks = {axis: _STEPS[axis]} if axis in _STEPS else of_run
        clock = next((name for name in clocks if name in names), None)
        if clock is None:
            raise Refusal(
                path,
                f"have the steps of {run}",
                f"the x-axis {axis!r} alone",
                "Choose the x-axis trainer/global_step or Step in the chart's settings, and"
                " export the chart again.",
            )
        at, of = names.index(clock), names.index(column)
        rows = [(line, row) for line, row in lines if row[of] and row[at]]
        timed = axis == "Relative Time (Process)"
        try:
            measured = measurements_of(
                f"{run} in {path}",
                [number(row[at], path, line, clock) + clocks[clock] for line, row in rows],
                [number(row[of], path, line, column) for line, row in rows],
                seconds=[number(row[0], path, line, axis) for line, row in rows] if timed else None,
            )
        except ValueError as error:
            errors.append(error)
            trials.append(broken_trial(run, error, submission))
            continue
        doubtful = frozenset({"steps"} if _counts_calls(clock) else ())
        trials.append(Trial(run, measured, submission or "", doubtful_clocks=doubtful))
    if cut is not None:
        errors.append(cut)
        trials.append(broken_trial(f"the last line of {path.name}", cut))
    metrics = {n.rpartition(_BETWEEN)[2] for n in names[1:] if not n.endswith(_RANGES)}
    return Found(trials, lambda: metrics - {""}, errors)


def _counts_calls(clock: str) -> bool:
    """Return whether a column of steps counts the calls of `wandb.log`."""
    return clock.rpartition(_BETWEEN)[2] in ("Step", "_step")
