# SPDX-License-Identifier: Apache-2.0
"""How far off the theory is for each kind of optimizer, out of sample.

The ratio is that of a sweep's B_crit over the one that the noise scale of a single run gives: of
`optimizer_sweeps.py` (noise scales at frozen weights, constant and falling rates) and of
`single_runs.py` (noise scales as the monitor gave them). Runs are those from far below B_crit, near
it and far above it, see `geometries.py`.

The band of a kind holds 95 % of a further model's ratios, if the logarithms are Gaussian: from the
scatter between models and within each, which all kinds share, by Student's t. Each model is left
out in turn, with all its workloads: the band from the others is asked how many of its ratios it
holds, and how far off its middle is, beside a middle of 1, which is what the theory says.

    python benchmarks/prediction/bands.py [--save]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import stdtrit

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.lib.workloads import WORKLOADS
from benchmarks.prediction.geometries import cases, chosen, predictions
from benchmarks.prediction.single_runs import MEASURED, history_of
from noisescale import fit_tradeoff, predict
from noisescale.bounded import Bounded

FALLING = "falling rate"
PLAIN = ("sgd", "momentum", "adam", "sign", "spectral", "schedule-free")


class Ratio(NamedTuple):
    """The B_crit of a sweep over that of a run's noise scale."""

    kind: str
    model: str
    workload: str
    batch_size: int
    value: float
    weighted: float
    """With steps weighed by a falling learning rate."""


def of_optimizer_sweeps() -> list[Ratio]:
    of_workload: dict[str, list[Any]] = defaultdict(list)
    for case in cases():
        of_workload[case.workload].append(case)
    measured = {
        (row["workload"], row["batch_size"]): row
        for row in saved_rows("prediction/optimizer_sweeps")
        if row["kind"] == "measured"
    }
    found = []
    for workload, all_of_it in of_workload.items():
        for case in chosen(all_of_it).values():
            row = measured[workload, case.batch_size]
            weighted = predictions(row, weighted=True) if case.decays else case.predicted
            swept = case.swept.value
            found.append(
                Ratio(
                    FALLING if case.decays else case.kind,
                    case.model,
                    workload,
                    case.batch_size,
                    swept / case.predicted["simple"],
                    swept / weighted["simple"],
                )
            )
    return found


NAMED = {"momentum": "momentum", "AdamW": "adam", "decay": FALLING}
UNNAMED = {"characters": "adam", "digits": "sgd", "mnist": "sgd"}
"""Optimizers of the workloads of `single_runs.py`, by their names and where these have none."""


def of_single_runs() -> list[Ratio]:
    rows = saved_rows("prediction/single_runs")
    found = []
    for name, workload in WORKLOADS.items():
        steps: dict[int, float] = {}
        for row in rows:
            if row["workload"] == name and row["kind"] == "sweep":
                size = row["batch_size"]
                steps[size] = min(steps.get(size, math.inf), statistics.median(_counts(row)))
        reached = {size: count for size, count in steps.items() if count < math.inf}
        swept = fit_tradeoff(list(reached), list(reached.values())).critical_batch_size
        model, *others = name.split(", ")
        kind = UNNAMED[model] if not others else NAMED[others[0]]
        for position in MEASURED:
            size = workload.batch_sizes[position]
            histories = [
                history_of(row)
                for row in rows
                if row["kind"] == "measured"
                and (row["workload"], row["batch_size"]) == (name, size)
                and row.get("log_every", 1) == 1
            ]
            weighted = swept / statistics.median(map(_by_noise_scale, histories))
            constant = [
                {name: x for name, x in history.items() if name != "learning_rate"}
                for history in histories
            ]
            value = swept / statistics.median(map(_by_noise_scale, constant))
            found.append(Ratio(kind, model, f"{name} (monitor)", size, value, weighted))
    return found


def _by_noise_scale(history: Mapping[str, Any]) -> float:
    return predict(history).critical_batch_size_by_noise_scale.value


def _counts(row: dict[str, Any]) -> list[float]:
    return [math.inf if x is None else x for x in row["steps"]]


class Scatter(NamedTuple):
    """Variances of logarithms, which all kinds share: some have three models alone."""

    between: float
    within: float
    freedom: int

    @classmethod
    def of(cls, ratios: Iterable[Ratio], which: str) -> Scatter:
        of_kind: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for ratio in ratios:
            of_kind[ratio.kind][ratio.model].append(math.log(getattr(ratio, which)))
        between = within = 0.0
        freedom = runs = 0
        for of_model in of_kind.values():
            means = [statistics.mean(logs) for logs in of_model.values()]
            middle = statistics.mean(means)
            between += sum((m - middle) ** 2 for m in means)
            freedom += len(means) - 1
            for logs, mean in zip(of_model.values(), means, strict=True):
                within += sum((x - mean) ** 2 for x in logs)
                runs += len(logs) - 1
        return cls(between / freedom, within / runs, freedom)


def band_of(ratios: Iterable[Ratio], scatter: Scatter, which: str) -> Bounded:
    """The middle, and where 95 % of a further model's ratios are."""
    of_model: dict[str, list[float]] = defaultdict(list)
    for ratio in ratios:
        of_model[ratio.model].append(math.log(getattr(ratio, which)))
    middle = statistics.mean(map(statistics.mean, of_model.values()))
    spread = math.sqrt(scatter.between * (1 + 1 / len(of_model)) + scatter.within)
    reach = float(stdtrit(scatter.freedom, 0.975)) * spread
    return Bounded(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def of_kind(kind: str, everything: list[Ratio], which: str) -> dict[str, Any]:
    ratios = [ratio for ratio in everything if ratio.kind == kind]
    models = sorted({ratio.model for ratio in ratios})
    band = band_of(ratios, Scatter.of(everything, which), which)
    held, off, off_one = [], [], []
    for model in models:
        known = [ratio for ratio in everything if ratio.model != model]
        alike = [ratio for ratio in known if ratio.kind == kind]
        other = band_of(alike, Scatter.of(known, which), which)
        for ratio in ratios:
            if ratio.model == model:
                value = getattr(ratio, which)
                held.append(other.low <= value <= other.high)
                off.append(abs(math.log(value / other.value)))
                off_one.append(abs(math.log(value)))
    values = [getattr(ratio, which) for ratio in ratios]
    return {
        "kind": kind,
        "which": which,
        "models": models,
        "ratios": len(ratios),
        "lowest": min(values),
        "highest": max(values),
        "middle": band.value,
        "low": band.low,
        "high": band.high,
        "held_left_out": sum(held),
        "off_by_middle": math.exp(statistics.median(off)),
        "off_by_one": math.exp(statistics.median(off_one)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ratios = [*of_optimizer_sweeps(), *of_single_runs()]
    rows = []
    for kind in (*PLAIN, FALLING):
        for which in ("value", "weighted") if kind == FALLING else ("weighted",):
            row = of_kind(kind, ratios, which)
            rows.append(row)
            print(
                f"{kind:14} {which:9} {row['ratios']:3} runs of {len(row['models'])} models:"
                f" {row['lowest']:.2f} to {row['highest']:.2f}; band {row['middle']:.2f}"
                f" ({row['low']:.2f} to {row['high']:.2f}); of models left out it holds"
                f" {row['held_left_out']}, off by {row['off_by_middle']:.2f} from the middle,"
                f" {row['off_by_one']:.2f} from 1"
            )
    for ratio in sorted(ratios):
        weighted = "" if ratio.weighted == ratio.value else f" (weighted {ratio.weighted:.2f})"
        about = f"{ratio.kind:14} {ratio.workload:34} B = {ratio.batch_size:4}"
        print(f"  {about}: {ratio.value:.2f}{weighted}")
    if arguments.save:
        write_results("prediction/bands", [*rows, *(ratio._asdict() for ratio in ratios)])


if __name__ == "__main__":
    main()
