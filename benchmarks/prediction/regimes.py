# SPDX-License-Identifier: Apache-2.0
"""Count how often the bounds of a sweep's law and regimes hold the truth.

Arithmetic only: sweeps are drawn around S_min·(1 + (B_crit/B)^α)^(1/α) with a scatter of 10 or 15 %
from run to run, and `find_regimes` looks for B_crit and for the batch sizes where examples and
steps are 20 % above their fewest. Sweeps show all three regimes, two or one. All sweeps count: an
open bound holds every truth. Beside it stands how often the bounds hold the truth if α = 1 is
assumed. Their scatter is found by the same rule.

With --published the sweeps are real ones, in which the learning rate was tuned at each batch size.
Each 3 to 5 neighbouring batch sizes, and each 2 that are 16 or 64 times apart, with the steps of
one seed, have to hold the B_crit of all batch sizes (7 to 9).

    python benchmarks/prediction/regimes.py [--runs 150] [--processes 2] [--only NAME] [--published]
                                           [--save]

Exits 1 if fewer than 93 % of all bounds hold, or a setting holds less than 90 % by more than two
standard errors. Settings whose batch sizes scatter by more than their repeats make no claim, nor do
bends sharper than any sweep of ours has shown (α of more than 2).
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from noisescale.bounded import Bounded
from noisescale.tradeoff.profile import STEPS_SCATTER, grid_around, profile_of
from noisescale.tradeoff.regimes import ASSUMED_FREEDOM, OVERHEAD, find_regimes
from noisescale.tradeoff.tradeoff import Floats

Array = NDArray[np.float64]

DATA = Path(os.environ.get("NOISESCALE_DATA", Path(__file__).resolve().parents[2] / "data"))
LOWEST_OF_ALL, LOWEST = 0.93, 0.9
CHUNK = 10
CRITICAL = 1000.0
SHARPEST = 2.0
"""Sharper bends than this make no claim."""

WHAT = ("critical", "perfect", "maximal")
"""What has bounds: B_crit, where perfect scaling ends, where data parallelism is maximal."""

SEEN = ("all three", "perfect and diminishing", "diminishing and flat", "perfect", "flat")
"""Regimes that a sweep shows."""


@dataclass(frozen=True)
class Setting:
    seen: str
    sharpness: float
    sizes: int
    factor: float
    """Between two batch sizes."""
    repeats: int
    scatter: float
    """Of each run."""
    between: float = 0.0
    """Of each batch size, whose repeats share it, as one learning rate that is tuned worse."""

    @property
    def name(self) -> str:
        between = f", sizes {self.between:.0%}" if self.between else ""
        return (
            f"{self.seen}, α {self.sharpness:g}, {self.sizes} sizes x {self.factor:g},"
            f" {self.repeats} x {self.scatter:.0%}{between}"
        )

    @property
    def claims(self) -> bool:
        return not self.between and self.sharpness <= SHARPEST

    def borders(self) -> tuple[float, float]:
        apart = ((1 + OVERHEAD) ** self.sharpness - 1) ** (1 / self.sharpness)
        return CRITICAL * apart, CRITICAL / apart

    def batch_sizes(self) -> Array:
        perfect, maximal = self.borders()
        span = self.factor ** (self.sizes - 1)
        first = {
            "all three": CRITICAL / math.sqrt(span),
            "perfect and diminishing": 1.5 * CRITICAL / span,
            "diminishing and flat": CRITICAL / 1.5,
            "perfect": min(perfect, CRITICAL) / span,
            "flat": max(maximal, CRITICAL),
        }[self.seen]
        return np.repeat(first * self.factor ** np.arange(self.sizes), self.repeats)


DESIGNS = ((4, 4.0, 1, 0.15), (7, 2.0, 1, 0.1), (9, 4.0, 3, 0.15))
SHARPNESSES = (0.5, 0.7, 1.0, 1.5, 2.5, 4.0)
SETTINGS = (
    *(
        Setting(seen, alpha, *design)
        for design, seen, alpha in itertools.product(DESIGNS, SEEN, SHARPNESSES)
    ),
    *(Setting("all three", alpha, 12, 2.0, 1, 0.1) for alpha in SHARPNESSES),
    *(Setting("all three", 1.0, n, 4.0, 4, 0.1, between=0.1) for n in (4, 6, 8, 12)),
)


def law_alone(batch_sizes: Floats, steps: Floats, scatter: float | None = None) -> Bounded:
    """B_crit with its profile interval at α = 1, with the scatter by the rule of `find_regimes`."""
    logs = np.log(np.asarray(steps, dtype=float))
    sizes, which, runs = np.unique(batch_sizes, return_inverse=True, return_counts=True)
    means = np.bincount(which, logs) / runs

    def misfit(log_critical: float) -> float:
        left = means - np.log1p(math.exp(log_critical) / sizes)
        return float((left - left @ runs / runs.sum()) ** 2 @ runs)

    free, repeated = max(len(sizes) - 2, 0), len(logs) - len(sizes)
    if scatter is None:
        guess = ASSUMED_FREEDOM * STEPS_SCATTER**2 + float(((logs - means[which]) ** 2).sum())
        squares = ASSUMED_FREEDOM * guess / (ASSUMED_FREEDOM + repeated)
        squares += min(map(misfit, grid_around(sizes))) if free else 0.0
        freedom = ASSUMED_FREEDOM + free
        scatter = math.sqrt(squares / freedom)
    else:
        freedom = 10**9
    return profile_of(misfit, sizes, (float(stdtrit(freedom, 0.975)) * scatter) ** 2)


def run(setting: Setting, seed: int) -> list[float]:
    """One sweep; of B_crit and both borders: held, held if α = 1, and doublings left open."""
    rng = np.random.default_rng([seed, SETTINGS.index(setting)])
    sizes = setting.batch_sizes()
    law = (1 + (CRITICAL / sizes) ** setting.sharpness) ** (1 / setting.sharpness)
    noise = rng.normal(0, setting.scatter, len(sizes))
    noise += np.repeat(rng.normal(0, setting.between, setting.sizes), setting.repeats)
    steps = 100 * law * np.exp(noise)
    found = find_regimes(sizes, steps)
    by_law = law_alone(sizes, steps)
    answers: list[float] = []
    for truth, border, times in zip(
        (CRITICAL, *setting.borders()),
        (found.critical_batch_size, found.perfect_up_to, found.maximal_from),
        (1.0, OVERHEAD, 1 / OVERHEAD),
        strict=True,
    ):
        low, high = (min(max(x, sizes[0]), sizes[-1]) for x in (border.low, border.high))
        answers += [
            border.low <= truth <= border.high,
            by_law.low * times <= truth <= by_law.high * times,
            math.log2(high / low),
        ]
    return answers


def chunk(setting: Setting, start: int) -> list[list[float]]:
    return [run(setting, seed) for seed in range(start, start + CHUNK)]


def measure(setting: Setting, runs: int, pool: Pool) -> dict[str, Any]:
    parts = pool.map(functools.partial(chunk, setting), range(0, runs, CHUNK))
    answers = np.array([row for part in parts for row in part][:runs], dtype=float)
    held, held_by_law, open_doublings = answers.mean(axis=0).round(4).reshape(3, 3).T.tolist()
    return {
        "runs": runs,
        **{f"{what}_coverage": x for what, x in zip(WHAT, held, strict=True)},
        **{f"{what}_coverage_if_alpha_is_1": x for what, x in zip(WHAT, held_by_law, strict=True)},
        **{f"{what}_doublings_open": x for what, x in zip(WHAT, open_doublings, strict=True)},
    }


def published() -> dict[str, dict[float, list[float]]]:
    """Steps of each seed at each batch size, at the learning rate with the lowest median."""
    found: dict[str, dict[float, list[float]]] = {}
    with (DATA / "critical_batch_size" / "steps_to_target.csv").open() as file:
        for line in csv.DictReader(file):
            sweep = found.setdefault(f"Zhang et al., {line['model']}", {})
            sweep[float(line["batch_size_sequences"])] = [float(line["steps_in_fit"])]
    for name in ("prediction/single_runs", "scheduling/adaptive"):
        medians: dict[tuple[str, float], float] = {}
        for row in saved_rows(name):
            if row.get("kind") != "sweep" or not row["steps"]:
                continue
            steps = [each or math.inf for each in row["steps"]]
            of, median = f"{name}.py, {row['workload']}", statistics.median(steps)
            if median < medians.get((of, row["batch_size"]), math.inf):
                medians[of, row["batch_size"]] = median
                found.setdefault(of, {})[row["batch_size"]] = steps
    return {name: dict(sorted(sweep.items())) for name, sweep in found.items()}


def parts(sizes: Sequence[float]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Batch sizes of which the steps have to say what those of all do."""
    for many in (3, 4, 5):
        for first in range(len(sizes) - many + 1):
            yield f"{many} neighbours", tuple(sizes[first : first + many])
    for times in (16, 64):
        yield from ((f"2, {times} x apart", (b, times * b)) for b in sizes if times * b in sizes)


def of_published() -> list[dict[str, Any]]:
    """How often bounds from a part of a sweep hold the B_crit of all of it."""

    def by_both(sizes: Floats, steps: Floats, scatter: float | None = None) -> list[Bounded]:
        bent = find_regimes(sizes, steps, scatter=scatter)
        return [bent.critical_batch_size, law_alone(sizes, steps, scatter)]

    found: dict[str, list[list[float]]] = {}
    for name, sweep in published().items():
        sizes, medians = list(sweep), [statistics.median(steps) for steps in sweep.values()]
        whole, alpha = by_both(sizes, medians), find_regimes(sizes, medians).sharpness
        said = [f"{b.value:,.4g} ({b.low:,.4g} to {b.high:,.4g})" for b in whole]
        print(f"{name:40} α {alpha.value:.2f} ({alpha.low:.2f} to {alpha.high:.2f}), B_crit", *said)
        for part, some in parts(sizes) if len(sizes) > 6 else ():
            for steps in zip(*(sweep[size] for size in some), strict=True):
                if math.inf in steps:
                    continue
                # Two batch sizes as two runs have it: `noisescale predict --second-run`.
                bands = by_both(some, steps, STEPS_SCATTER if len(some) == 2 else None)
                held = [
                    b.low <= truth.value <= b.high for b, truth in zip(bands, whole, strict=True)
                ]
                wide = [math.log2(max(b.high, 1e-9) / max(b.low, 1e-9)) for b in bands]
                found.setdefault(part, []).append([*held, *wide])
    rows = []
    for part, answers in found.items():
        held, held_by_law, doublings, doublings_by_law = np.array(answers, dtype=float).T
        rows.append(
            {
                "name": f"published: {part}",
                "runs": len(answers),
                "critical_coverage": round(float(held.mean()), 4),
                "critical_coverage_if_alpha_is_1": round(float(held_by_law.mean()), 4),
                "median_doublings": round(float(np.median(doublings)), 2),
                "median_doublings_if_alpha_is_1": round(float(np.median(doublings_by_law)), 2),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=150)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--published", action="store_true", help="published sweeps alone")
    parser.add_argument("--save", action="store_true", help="write the figures of the settings run")
    arguments = parser.parse_args()

    rows = of_published() if arguments.published else []
    settings = [each for each in SETTINGS if arguments.only in each.name]
    settings = [] if arguments.published else settings
    failed = False
    print("held: B_crit, perfect, maximal; the same if α = 1; doublings open")
    with get_context("spawn").Pool(arguments.processes) as pool:
        for setting in settings:
            row = measure(setting, arguments.runs, pool)
            least = min(row[f"{what}_coverage"] for what in WHAT)
            error = math.sqrt(LOWEST * (1 - LOWEST) / arguments.runs)
            good = not setting.claims or least >= LOWEST - 2 * error
            failed |= not good
            rows.append({"name": setting.name, **asdict(setting), **row, "passed": good})
            print(
                f"{setting.name:62}",
                *(f"{row[f'{what}_coverage']:7.1%}" for what in WHAT),
                *(f"{row[f'{what}_coverage_if_alpha_is_1']:7.1%}" for what in WHAT),
                *(f"{row[f'{what}_doublings_open']:5.1f}" for what in WHAT),
                "" if good else "MISSED",
                flush=True,
            )
    for said, some in (
        ("claimed", [row for row in rows if row.get("sharpness", math.inf) <= SHARPEST]),
        ("α beyond 2", [row for row in rows if row.get("sharpness", 0.0) > SHARPEST]),
    ):
        some = [row for row in some if not row["between"]]
        for ending in ("coverage", "coverage_if_alpha_is_1") if some else ():
            held = np.array([[row[f"{what}_{ending}"] for what in WHAT] for row in some])
            print(
                f"{said}, {ending.replace('_', ' ')}: {held.mean():.1%}, B_crit",
                f"{held[:, 0].mean():.1%}",
            )
            failed |= (said, ending) == ("claimed", "coverage") and bool(
                held.mean() < LOWEST_OF_ALL
            )
    if arguments.save:
        known = {row["name"]: row for row in (*saved_rows("prediction/regimes"), *rows)}
        names = [setting.name for setting in SETTINGS if setting.name in known]
        names += [name for name in known if name.startswith("published")]
        write_results("prediction/regimes", [known[name] for name in names])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
