# SPDX-License-Identifier: Apache-2.0
"""What a sweep over batch sizes says if the learning rate was not searched at each of them.

The sweeps of `single_runs.py` and `optimizer_sweeps.py` have the steps to a goal at many learning
rates. Here the best rate of one batch size is taken to the others by a rule: no change, the square
root, linear. The steps there, over the steps at the best rate, are what the rule costs. On
logarithmic axes this cost has a tilt, per doubling of the batch size, and a scatter around it. Both
are constants of `noisescale.tradeoff.regimes`.

Then it counts wrong answers. In each trial a sweep has five batch sizes of a workload, with one
learning rate each by a rule. An answer is wrong if the bounds of the critical batch size leave out
the critical batch size of the whole sweep with all its learning rates. The same is counted for
bounds that take each rate for a searched one, for sweeps with a search at the batch size whose rate
the rule began from, and for rates that were drawn.

Arithmetic only. Steps between two learning rates that were tried are interpolated. Below the lowest
rate they go as 1/rate, and above the highest one the goal is missed.

    python benchmarks/prediction/unsearched_rates.py [--trials 120] [--save]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from noisescale.bounded import Bounded
from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Measurements, Trial
from noisescale.lab.compare.outcomes import outcome_of
from noisescale.lab.compare.swept import sweep_of
from noisescale.tradeoff.profile import STEPS_SCATTER
from noisescale.tradeoff.regimes import find_regimes

RULES = {"no change": 0.0, "square root": 0.5, "linear": 1.0}
"""The power of the batch size that each rule multiplies the learning rate by."""

DRAWN = "drawn"
FEWEST_SIZES = 7
"""Sweeps with fewer batch sizes do not show where they bend."""

SIZES = 5
RUNS = (1, 5)
"""Runs of each batch size, which share its learning rate."""

GOAL = Goal.read("loss<=0.1")
BELOW = 0.99
"""Where a run was evaluated before its goal, as a share of its steps."""

Table = dict[float, dict[float, float]]
"""Steps at each learning rate of each batch size; infinite where the goal was missed."""


def tables() -> dict[str, Table]:
    """The sweeps, by benchmark and workload. Without schedules, which end at their own steps."""
    found: dict[str, Table] = defaultdict(lambda: defaultdict(dict))
    for row in saved_rows("prediction/single_runs"):
        if row["kind"] == "sweep":
            steps = [math.inf if each is None else each for each in row["steps"]]
            of_size = found[f"single_runs: {row['workload']}"][row["batch_size"]]
            of_size[row["lr"]] = statistics.median(steps)
    for row in saved_rows("prediction/optimizer_sweeps"):
        if row["kind"] == "sweep":
            of_size = found[f"optimizer_sweeps: {row['workload']}"][row["batch_size"]]
            of_size |= {
                float(rate): math.inf if steps is None else steps
                for rate, steps in row["tried"].items()
            }
    reached = {
        name: {
            size: of_rate for size, of_rate in sorted(sizes.items()) if best(of_rate)[1] < math.inf
        }
        for name, sizes in found.items()
        if "decay" not in name
    }
    return {name: sizes for name, sizes in reached.items() if len(sizes) >= FEWEST_SIZES}


def best(of_rate: dict[float, float]) -> tuple[float, float]:
    """The learning rate with the fewest steps, and these steps."""
    return min(of_rate.items(), key=lambda item: item[1])


def steps_at(of_rate: dict[float, float], rate: float) -> float:
    known = sorted((r, steps) for r, steps in of_rate.items() if math.isfinite(steps))
    rates, steps = np.log(known).T
    if (at := math.log(rate)) > rates[-1] + 1e-9:
        return math.inf
    return math.exp(np.interp(at, rates, steps) + max(rates[0] - at, 0.0))


def costs(table: Table) -> Iterator[tuple[str, list[float], list[float]]]:
    """Of each rule from each batch size: the doublings from it, and log(steps/fewest) there."""
    for base, of_rate in table.items():
        for rule, power in RULES.items():
            found = {
                math.log2(size / base): math.log(
                    steps_at(other, best(of_rate)[0] * (size / base) ** power) / best(other)[1]
                )
                for size, other in table.items()
            }
            kept = {doublings: cost for doublings, cost in found.items() if math.isfinite(cost)}
            if len(kept) > 2:
                yield rule, [*kept], [*kept.values()]


def lines(named: str) -> dict[str, Any]:
    """Tilts and scatters of the sweeps with a name, each rule with the same weight."""
    tilts, rests = defaultdict(list), defaultdict(list)
    for name, table in tables().items():
        for rule, doublings, logs in costs(table) if named in name else ():
            (tilt, _), squares, *_ = np.polyfit(doublings, logs, 1, full=True)
            tilts[rule].append(tilt**2)
            rests[rule].append(float(squares.sum()) / (len(logs) - 2))
    of_rule = {rule: round(math.sqrt(statistics.mean(tilts[rule])), 3) for rule in RULES}
    return {
        "kind": "lines",
        "sweeps": named or "all",
        "lines": sum(map(len, tilts.values())),
        "tilt": round(math.sqrt(statistics.mean(map(statistics.mean, tilts.values()))), 3),
        "scatter": round(math.sqrt(statistics.mean(map(statistics.mean, rests.values()))), 3),
        **{f"tilt, {rule}": tilt for rule, tilt in of_rule.items()},
    }


class Point(NamedTuple):
    """Runs at one batch size and one learning rate."""

    batch_size: float
    learning_rate: float
    steps: float
    runs: int

    def trials(self, rng: np.random.Generator) -> Iterator[Trial]:
        for run in range(self.runs):
            at = min(self.steps * math.exp(rng.normal(0, STEPS_SCATTER)), 1e9)
            last = 0.1 if self.steps < math.inf else 0.9
            yield Trial(
                f"{self.batch_size}/{self.learning_rate}/{run}",
                Measurements([BELOW * at, at], [0.9, last]),
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
            )


def sweep_by_rule(
    rng: np.random.Generator, table: Table, rule: str, runs: int, *, search: bool
) -> list[Point]:
    """Some batch sizes with one learning rate each. A search gives the first of them all rates."""
    sizes = sorted(rng.choice([*table], SIZES, replace=False).tolist())
    bests = {size: best(of_rate)[0] for size, of_rate in table.items()}
    base = sizes[rng.integers(SIZES)]
    if rule == DRAWN:
        ends = np.log([min(bests.values()), max(bests.values())])
        rates = np.exp(rng.uniform(*ends, SIZES)).tolist()
    else:
        rates = [bests[base] * (size / base) ** RULES[rule] for size in sizes]
    single = [
        Point(size, rate, steps_at(table[size], rate), runs)
        for size, rate in zip(sizes, rates, strict=True)
    ]
    others = [
        Point(base, rate, steps, 1)
        for rate, steps in table[base].items()
        if search and rate != bests[base]
    ]
    return [*single, *others]


def answers(
    rules: Sequence[str], runs: int, trials: int, *, search: bool = False
) -> dict[str, Any]:
    every = tables()
    truths = {
        name: find_regimes([*table], [best(of_rate)[1] for of_rate in table.values()])
        for name, table in every.items()
    }
    given: list[tuple[float, Bounded, Bounded]] = []
    for number in range(trials):
        rng = np.random.default_rng([number, runs])
        name = [*every][rng.integers(len(every))]
        rule = rules[number % len(rules)]
        points = sweep_by_rule(rng, every[name], rule, runs, search=search)
        trained = [trial for point in points for trial in point.trials(rng)]
        found = sweep_of("", "", [outcome_of(each, GOAL) for each in trained])
        if found is None or found.regimes is None:
            continue
        fitted = found.regimes
        taken = find_regimes(fitted.batch_sizes, fitted.measured_steps)
        truth = truths[name].critical_batch_size.value
        given.append((truth, fitted.critical_batch_size, taken.critical_batch_size))
    row: dict[str, Any] = {
        "kind": "answers",
        "rules": ", ".join(rules),
        "batch_sizes": SIZES,
        "searched": int(search),
        "runs": runs,
        "trials": trials,
        "answers": len(given),
    }
    for what, which in (("", 1), (" if taken for searched", 2)):
        both = [(each[0], each[which]) for each in given]
        row |= {
            f"wrong{what}": sum(not b.low <= truth <= b.high for truth, b in both),
            f"two bounds{what}": sum(b.low > 0 and b.high < math.inf for _, b in both),
            f"no bound{what}": sum(b.low == 0 and b.high == math.inf for _, b in both),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    rows = [lines(named) for named in ("", "single_runs", "optimizer_sweeps")]
    for rules, search in (([*RULES], False), ([*RULES], True), ([DRAWN], False)):
        rows += [answers(rules, runs, arguments.trials, search=search) for runs in RUNS]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.save:
        write_results("prediction/unsearched_rates", rows)


if __name__ == "__main__":
    main()
