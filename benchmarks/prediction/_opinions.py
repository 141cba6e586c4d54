# SPDX-License-Identifier: Apache-2.0
"""What bounds, second runs and branches say of the critical batch size, beside that of a sweep."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lib.sweeping import Row, Sweep
from benchmarks.lib.workloads import Workload
from noisescale import History, Prediction, predict
from noisescale.bounded import Bounded
from noisescale.history.optimizers import OptimizerMix
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.prediction.calibration import Calibration

TIMES = 16
"""The batch size of a second run over that of the first."""

FAR_ENOUGH = 1.5
"""A second run says something from so many times the critical batch size on."""


class Opinion(NamedTuple):
    """What one run, or two, or a run with branches, say."""

    kind: str
    found: Bounded
    swept: float

    @property
    def ratio(self) -> float:
        return self.found.value / self.swept

    @property
    def holds(self) -> bool:
        return self.found.low <= self.swept <= self.found.high


NEARLY = 0.999
"""Times that differ by less are one."""


def kind_of(workload: Workload) -> OptimizerMix:
    return OptimizerMix.of(workload.optimizer_of(workload.model(), 0.1, workload.batch_sizes[0]))


def branched_of(row: Row) -> BranchedRun:
    told: dict[str, Any] = dict(row["branched"])
    branches = tuple(
        Branch(
            **{
                **b,
                "steps": tuple(b["steps"]),
                "losses": tuple(math.nan if x is None else x for x in b["losses"]),
            }
        )
        for b in told.pop("branches")
    )
    course = tuple((step, loss) for step, loss in told.pop("course"))
    return BranchedRun(course=course, branches=branches, **told)


def of_single_runs(
    rows: Iterable[tuple[Row, History]], swept: float
) -> Iterator[tuple[Opinion, Prediction]]:
    for row, history in rows:
        try:
            p = predict(history)
        except ValueError:
            continue  # it has no noise scale at all, and says so
        every = row.get("log_every", 1)
        kind = f"bounds, B = {row['batch_size']}" + (f", every {every}" if every > 1 else "")
        yield Opinion(kind, p.critical_batch_size, swept), p


def of_second_runs(
    rows: Iterable[tuple[Row, History]], sweep: Sweep, workload: Workload, swept: float
) -> Iterator[tuple[Opinion, Prediction]]:
    """With the steps that the sweep's best learning rate, or one by rule, took at 16 times B."""
    for row, history in rows:
        size = row["batch_size"]
        tuned = sweep.best(workload, TIMES * size)
        by_rule = [r for r in sweep.rows if r["kind"] == "by rule" and r["from"] == size]
        by_rule = [r for r in by_rule if r["workload"] == workload.name]
        for how, other in (("tuned", tuned), ("by rule", by_rule[0] if by_rule else None)):
            steps = other["steps"][row["seed"]] if other else None
            if not steps or row.get("log_every", 1) > 1:
                continue
            second = History.from_columns(
                {n: np.array([value]) for n, value in _end(TIMES * size, steps).items()},
                parameters=history.parameters,
                unit=history.unit,
            )
            p = predict(history, second_run=second)
            far = "" if TIMES * size >= FAR_ENOUGH * swept else ", too near"
            yield Opinion(f"second run {how}, B = {size}{far}", p.critical_batch_size, swept), p


def of_branches(
    rows: Iterable[tuple[Row, History]], swept: float
) -> Iterator[tuple[Opinion, Prediction]]:
    for row, history in rows:
        try:
            calibration = Calibration.from_branched_run(history, branched_of(row))
        except ValueError:
            continue  # no branch reached the loss
        p = predict(history, calibration=calibration)
        yield Opinion(f"branches, B = {row['batch_size']}", p.critical_batch_size, swept), p


def tell(console: Console, opinions: Iterable[Opinion]) -> None:
    """Print, for each kind, how far the values were off and how often the bounds held."""
    by_kind: dict[str, list[Opinion]] = {}
    for opinion in opinions:
        by_kind.setdefault(opinion.kind, []).append(opinion)
    table = Table("of the swept B_crit", "low", "median", "high", "bounds hold it")
    for kind, alike in by_kind.items():
        ratios = sorted(o.ratio if math.isfinite(o.ratio) else math.inf for o in alike)
        held = sum(opinion.holds for opinion in alike)
        ends = (ratios[0], statistics.median(ratios), ratios[-1])
        table.add_row(kind, *(f"{x:.2f}" for x in ends), f"{held} of {len(alike)}")
    console.print(table)


def dominated(p: Prediction) -> bool:
    """Whether a row takes fewer hours, and fewer device-hours, than a recommended one."""
    best = [row for row in (p.recommended, p.on_more_devices) if row is not None]
    return any(
        row.hours.value < NEARLY * one.hours.value
        and row.device_hours.value < NEARLY * one.device_hours.value
        for one in best
        for row in p.rows
    )


def opinions(
    sweep: Sweep, workload: Workload, histories: Iterable[tuple[Row, History]], swept: float
) -> list[tuple[Opinion, Prediction]]:
    """All of them, for one workload."""
    pairs = list(histories)
    measured = [pair for pair in pairs if pair[0]["kind"] == "measured"]
    branched = [pair for pair in pairs if pair[0]["kind"] == "branched"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            *of_single_runs(measured, swept),
            *of_second_runs(measured, sweep, workload, swept),
            *of_branches(branched, swept),
        ]


def _end(batch_size: float, steps: float) -> dict[str, float]:
    """The one row of a run of which nothing is known but its end."""
    unknown = {"noise_scale": math.nan, "low": 0.0, "high": math.inf}
    return {"step": steps, "examples": batch_size * steps, "batch_size": batch_size, **unknown}
