# SPDX-License-Identifier: Apache-2.0
"""Trials that reach a loss of 0.1 at a given step, for tests of what is made of them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noisescale.history.metrics import Goal
from noisescale.lab.compare.compare import compare
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.measurements import Measurements, Trial

GOAL = Goal.read("loss<=0.1")
EVERY = 10
"""Steps between two evaluations."""
SIZES = [8 * 2**k for k in range(9)]


def compared(trials: Iterable[Trial], clock: str | None = None, **options: Any) -> Comparison:
    return compare(trials, GOAL, by=clock, **options)


def law(critical: float, least: float = 100, sizes: Sequence[int] = SIZES) -> dict[float, float]:
    """The steps of each batch size, at an evaluation."""
    return {size: round(least * (1 + critical / size), -1) for size in sizes}


def trial(
    steps: float, *, until: float | None = None, seconds: float | None = None, **where: Any
) -> Trial:
    """A trial whose loss falls from 0.9, and is 0.1 from `steps` on.

    Args:
        steps: Infinite if the goal is never reached.
        until: The last step; the one after `steps` if it is not given.
        seconds: Of each step.
        **where: Of `Trial`.
    """
    last = until if until is not None else (steps + EVERY if np.isfinite(steps) else 1000)
    at = np.arange(EVERY, last + 1, EVERY)
    losses = np.where(at >= steps, 0.1, 0.9 - 0.2 * at / last)
    clocks = {} if seconds is None else {"seconds": seconds * at}
    where.setdefault("name", f"{where.get('submission', 'run')}/{steps:g}")
    return Trial(measurements=Measurements(at, losses, **clocks), **where)


def rivals(times: Mapping[str, float], **where: Any) -> list[Trial]:
    """A trial of each submission."""
    return [trial(steps, submission=name, **where) for name, steps in times.items()]


def on_workloads(times: Mapping[str, Mapping[str, float]], **where: Any) -> list[Trial]:
    """A trial of each submission on each of its workloads."""
    return [
        trial(steps, submission=name, workload=workload, **where)
        for name, of in times.items()
        for workload, steps in of.items()
    ]


def seeds(steps: Iterable[float], **where: Any) -> list[Trial]:
    """Repetitions: they differ in their seed."""
    return [
        trial(at, hyperparameters={"seed": k}, name=f"{where.get('submission', '')}{k}", **where)
        for k, at in enumerate(steps)
    ]


def sweep(
    steps: Mapping[float, float], rates: Mapping[float, float] | None = None, **where: Any
) -> list[Trial]:
    """Trials at batch sizes with the best of three learning rates in the middle.

    Args:
        steps: From each batch size to the steps of its best trial.
        rates: From a batch size to its best learning rate. Default: 0.1.
        **where: Of `Trial`.
    """
    return [
        trial(
            steps[size] * (1 if factor == 1 else 2),
            batch_size=float(size),
            learning_rate=(rates or {}).get(size, 0.1) * factor,
            name=f"{size}/{factor}",
            **where,
        )
        for size in steps
        for factor in (0.5, 1, 2)
    ]


def course(steps: float) -> list[tuple[int, float]]:
    """Evaluations every 10 steps, at 0.1 from `steps` on; the goal may be missed in 500 steps."""
    last = int(min(steps, 490)) + EVERY
    return [(at, 0.1 if at >= steps else 0.9) for at in range(EVERY, last + 1, EVERY)]


def write_run(folder: Path, steps: float, *, metric: str = "loss", **hyperparameters: Any) -> Path:
    """Write a run as Lightning's CSVLogger does, which counts steps from 0."""
    folder.mkdir(parents=True)
    lines = [f"{k},{at - 1},{loss}" for k, (at, loss) in enumerate(course(steps))]
    (folder / "metrics.csv").write_text("\n".join([f"epoch,step,{metric}", *lines, ""]))
    lines = [f"{name}: {value}\n" for name, value in hyperparameters.items()]
    (folder / "hparams.yaml").write_text("".join(lines) or "{}")
    return folder


def write_trials(path: Path, trials: Iterable[Mapping[str, Any]]) -> Path:
    """Write a file of trials; `steps` is when each reaches the goal."""
    rows = [
        {**{name: value for name, value in trial.items() if name != "steps"}, **at_once}
        for trial in trials
        for at_once in ({"step": at, "loss": loss} for at, loss in course(trial["steps"]))
    ]
    lines = [",".join(map(str, row.values())) for row in rows]
    path.write_text("\n".join([",".join(rows[0]), *lines, ""]))
    return path
