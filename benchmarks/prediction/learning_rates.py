# SPDX-License-Identifier: Apache-2.0
"""The best learning rate at each batch size against rules, from sweeps that were trained before.

Two kinds of sweeps over batch size and learning rate: the fewest steps to a goal at a constant
rate (`single_runs.py`), and the lowest loss of a budget of examples with the rate's schedule
(`scheduling/fixed_budget.py`). The best rate is the vertex of a parabola through the best one and
its neighbours on the grid; where the best one is at an edge there is none. Each rule is asked to go
from one batch size of a workload to another one, up to 16 times as large. Its error is how far its
rate is from the best, as a factor.

    python benchmarks/prediction/learning_rates.py [--save]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from benchmarks.scheduling.fixed_budget import FRESH
from noisescale.tradeoff.learning_rate_rules import RULES, Change, Kind, Settings

MOST = 16
"""Times that a batch size grows, at most."""

NOISE_SCALES = {
    "digits": 18.1,
    "mnist": 38.3,
    "digits, momentum": 36.0,
    "mnist, momentum": 70.4,
    "characters": 30.8,
    "digits, AdamW": 33.1,
    "convolutions, AdamW": 57.6,
    "characters, AdamW": 33.1,
}
"""The noise scale of a run to the goal, see docs/measured-truths.md."""


def kind_of(workload: str) -> Kind:
    if "Muon" in workload:
        return "muon"
    if "AdamW" in workload or workload == "characters":
        return "adam"
    return "momentum" if "momentum" in workload else "sgd"


def vertex(of_rate: dict[float, float]) -> float | None:
    """The rate where a parabola in the logarithm of the rate is lowest; None at an edge."""
    known = {rate: x for rate, x in of_rate.items() if math.isfinite(x)}
    if not known:
        return None
    best, rates = min(known, key=known.__getitem__), sorted(known)
    place = rates.index(best)
    if not 0 < place < len(rates) - 1:
        return None
    three = rates[place - 1 : place + 2]
    a, b, _ = np.polyfit(np.log2(three), [known[rate] for rate in three], 2)
    return float(2 ** (-b / 2 / a)) if a > 0 else best


def best_rates() -> Iterator[tuple[str, str, dict[int, float]]]:
    """Workload, what was lowest, and the best rate of each batch size."""
    steps: Any = defaultdict(lambda: defaultdict(dict))
    for row in saved_rows("prediction/single_runs"):
        if row["kind"] == "sweep" and "decay" not in row["workload"]:
            found = [math.inf if x is None else math.log(x) for x in row["steps"]]
            steps[row["workload"]][row["batch_size"]][row["lr"]] = statistics.median(found)
    losses: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in saved_rows("scheduling/fixed_budget"):
        searched = row["policy"] == "kept" and row["seed"] < FRESH
        if searched and row.get("loss") is not None and "on" not in row:
            losses[row["workload"]][row["start"]][row["lr"]].append(row["loss"])
    for what, of_workloads in (("steps", steps), ("loss", losses)):
        for workload, sizes in of_workloads.items():
            rates = {}
            for size, of_rate in sizes.items():
                one = {
                    k: statistics.mean(v) if isinstance(v, list) else v for k, v in of_rate.items()
                }
                if (rate := vertex(one)) is not None:
                    rates[size] = rate
            if len(rates) > 1:
                yield workload, what, rates


def errors() -> Iterator[dict[str, Any]]:
    for workload, what, rates in best_rates():
        # Of a budget there was no run to this goal.
        noise_scale = NOISE_SCALES[workload] if what == "steps" else math.nan
        for old in rates:
            for new in rates:
                if not old < new <= MOST * old:
                    continue
                change = Change(old, new, noise_scale)
                place = "below" if new <= noise_scale else "beyond"
                if old < noise_scale < new:
                    place = "across"
                for rule in RULES:
                    if kind_of(workload) not in rule.kinds:
                        continue
                    said = rule.apply(Settings(learning_rate=rates[old]), change).learning_rate
                    if said is None or math.isnan(said):
                        continue
                    yield {
                        "workload": workload,
                        "lowest": what,
                        "kind": kind_of(workload),
                        "place": place if what == "steps" else "budget",
                        "rule": rule.name,
                        "old": old,
                        "new": new,
                        "error": said / rates[new],
                    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    of: Any = defaultdict(list)
    for one in errors():
        of[one["kind"], one["place"], one["rule"]].append(math.log(one["error"]))
    rows = []
    for (kind, place, rule), logs in sorted(of.items()):
        row = {
            "kind": kind,
            "place": place,
            "rule": rule,
            "pairs": len(logs),
            "median_factor_off": math.exp(statistics.median(map(abs, logs))),
            "median_error": math.exp(statistics.median(logs)),
            "largest_factor_off": math.exp(max(map(abs, logs))),
        }
        rows.append(row)
        print(
            f"{kind:9} {place:7} {rule:24} {len(logs):3} pairs: off by"
            f" {row['median_factor_off']:5.2f} x (median; most {row['largest_factor_off']:.1f}),"
            f" {row['median_error']:5.2f} x the best"
        )
    for workload, what, rates in best_rates():
        print(f"{workload:32} {what:6}", {b: float(f"{rates[b]:.3g}") for b in sorted(rates)})
    if arguments.save:
        write_results("prediction/learning_rates", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
