# SPDX-License-Identifier: Apache-2.0
"""How far off the theory is for each kind of optimizer, out of sample.

The ratio is that of a sweep's B_crit over the one that the noise scale of a single run gives: of
`optimizer_sweeps.py` (noise scales at frozen weights, constant and falling rates) and of
`single_runs.py` (noise scales as the monitor gave them). Runs are those from far below B_crit, near
it and far above it, see `geometries.py`.

The band of a kind holds 95 % of a further model's ratios, if the logarithms are Gaussian: from the
scatter between models and within each, by Student's t. Each model is left out in turn, with all its
workloads: the band from the others is asked how many of its ratios it holds, and how far off its
middle is, beside a middle of 1, which is what the theory says.

    python benchmarks/prediction/bands.py [--save]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
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

PLAIN = ("sgd", "momentum", "adam", "sign", "spectral", "schedule-free")
FEWEST = 3
"""Models that a band needs."""


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
                    "falling rate" if case.decays else case.kind,
                    case.model,
                    workload,
                    case.batch_size,
                    swept / case.predicted["simple"],
                    swept / weighted["simple"],
                )
            )
    return found


KINDS = {"characters": "adam", "digits": "sgd", "mnist": "sgd", "digits, decay": "falling rate"}
"""Of the workloads of `single_runs.py` that do not name their optimizer."""


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
        kind = KINDS.get(name) or ("momentum" if "momentum" in name else "adam")
        for position in MEASURED:
            size = workload.batch_sizes[position]
            runs = [
                row
                for row in rows
                if row["kind"] == "measured"
                and (row["workload"], row["batch_size"]) == (name, size)
                and row.get("log_every", 1) == 1
            ]
            values = [predict(history_of(row)).critical_batch_size.value for row in runs]
            # The weights are not tried here: of its falling rates the history has no more to say.
            ratio = swept / statistics.median(values)
            model = name.split(", ")[0]
            found.append(Ratio(kind, model, f"{name} (monitor)", size, ratio, ratio))
    return found


def _counts(row: dict[str, Any]) -> list[float]:
    return [math.inf if x is None else x for x in row["steps"]]


def band_of(ratios: Iterable[Ratio], which: str = "value") -> Bounded:
    """The middle, and where 95 % of a further model's ratios are."""
    of_model: dict[str, list[float]] = defaultdict(list)
    for ratio in ratios:
        of_model[ratio.model].append(math.log(getattr(ratio, which)))
    means = [statistics.mean(logs) for logs in of_model.values()]
    middle, count = statistics.mean(means), len(means)
    within = [(x - m) ** 2 for logs, m in zip(of_model.values(), means, strict=True) for x in logs]
    freedom = max(sum(map(len, of_model.values())) - count, 1)
    scatter = statistics.variance(means) * (1 + 1 / count) + sum(within) / freedom
    reach = float(stdtrit(count - 1, 0.975)) * math.sqrt(scatter)
    return Bounded(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def of_kind(kind: str, ratios: list[Ratio], which: str = "value") -> dict[str, Any]:
    models = sorted({ratio.model for ratio in ratios})
    band = band_of(ratios, which)
    held, off, off_one = [], [], []
    for model in models:
        other = band_of([ratio for ratio in ratios if ratio.model != model], which)
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
        "held_left_out": statistics.mean(held),
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
    for kind in (*PLAIN, "falling rate"):
        alike = [ratio for ratio in ratios if ratio.kind == kind]
        for which in ("value", "weighted") if kind == "falling rate" else ("value",):
            tried = alike
            if kind == "falling rate":
                tried = [r for r in alike if not r.workload.endswith("(monitor)")]
            if len({ratio.model for ratio in tried}) < FEWEST:
                continue
            row = of_kind(kind, tried, which)
            rows.append(row)
            print(
                f"{kind:14} {which:9} {row['ratios']:3} runs of {len(row['models'])} models:"
                f" {row['lowest']:.2f} to {row['highest']:.2f}; band {row['middle']:.2f}"
                f" ({row['low']:.2f} to {row['high']:.2f}); left out: holds"
                f" {row['held_left_out']:.0%}, off by {row['off_by_middle']:.2f} from the middle,"
                f" {row['off_by_one']:.2f} from 1"
            )
    everything = [r for r in ratios if r.kind in PLAIN]
    for ratio in sorted(ratios):
        weighted = "" if ratio.weighted == ratio.value else f" (weighted {ratio.weighted:.2f})"
        about = f"{ratio.kind:14} {ratio.workload:34} B = {ratio.batch_size:4}"
        print(f"  {about}: {ratio.value:.2f}{weighted}")
    rows.append(of_kind("any", everything))
    if arguments.save:
        write_results("prediction/bands", [*rows, *(ratio._asdict() for ratio in ratios)])


if __name__ == "__main__":
    main()
