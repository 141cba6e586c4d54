# SPDX-License-Identifier: Apache-2.0
"""Count how often the bounds of a sweep's regimes hold the truth.

Arithmetic only: sweeps are drawn around S_min·(1 + (B_crit/B)^α)^(1/α) with a scatter of 10 or 15 %
from run to run, and `find_regimes` looks for the batch sizes where examples and steps are 20 %
above their fewest. Sweeps show all three regimes, two or one. All sweeps count: an open bound holds
every truth. Beside it stands how often the bounds hold the truth if α = 1 is assumed.

    python benchmarks/prediction/regimes.py [--runs 150] [--processes 2] [--only NAME] [--save]

Exits 1 if fewer than 93 % of all bounds hold, or a setting holds less than 90 % by more than two
standard errors. Settings whose batch sizes scatter by more than their repeats make no claim.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from noisescale.tradeoff.profile import profiled_critical_batch_size
from noisescale.tradeoff.regimes import OVERHEAD, find_regimes

Array = NDArray[np.float64]

LOWEST_OF_ALL, LOWEST = 0.93, 0.9
CHUNK = 10
CRITICAL = 1000.0

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


def run(setting: Setting, seed: int) -> list[float]:
    """One sweep; for both borders: held, held if α = 1, and doublings of the sweep left open."""
    rng = np.random.default_rng([seed, SETTINGS.index(setting)])
    sizes = setting.batch_sizes()
    law = (1 + (CRITICAL / sizes) ** setting.sharpness) ** (1 / setting.sharpness)
    noise = rng.normal(0, setting.scatter, len(sizes))
    noise += np.repeat(rng.normal(0, setting.between, setting.sizes), setting.repeats)
    steps = 100 * law * np.exp(noise)
    found = find_regimes(sizes, steps)
    by_law = profiled_critical_batch_size(sizes, steps)
    answers: list[float] = []
    for truth, border, times in zip(
        setting.borders(),
        (found.perfect_up_to, found.maximal_from),
        (OVERHEAD, 1 / OVERHEAD),
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
    perfect, perfect_by_law, perfect_open, maximal, maximal_by_law, maximal_open = (
        round(float(x), 4) for x in answers.mean(axis=0)
    )
    return {
        "runs": runs,
        "perfect_coverage": perfect,
        "maximal_coverage": maximal,
        "perfect_coverage_if_alpha_is_1": perfect_by_law,
        "maximal_coverage_if_alpha_is_1": maximal_by_law,
        "perfect_doublings_open": perfect_open,
        "maximal_doublings_open": maximal_open,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=150)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--save", action="store_true", help="write the figures of the settings run")
    arguments = parser.parse_args()

    print(f"{'sweep':62} perfect  maximal   if α = 1: perfect  maximal   doublings open")
    rows, failed = [], False
    with get_context("spawn").Pool(arguments.processes) as pool:
        for setting in SETTINGS:
            if arguments.only not in setting.name:
                continue
            row = measure(setting, arguments.runs, pool)
            least = min(row["perfect_coverage"], row["maximal_coverage"])
            error = math.sqrt(LOWEST * (1 - LOWEST) / arguments.runs)
            good = setting.between > 0 or least >= LOWEST - 2 * error
            failed |= not good
            rows.append({"name": setting.name, **asdict(setting), **row, "passed": good})
            print(
                f"{setting.name:62} {row['perfect_coverage']:7.1%} {row['maximal_coverage']:8.1%}"
                f" {row['perfect_coverage_if_alpha_is_1']:19.1%}"
                f" {row['maximal_coverage_if_alpha_is_1']:8.1%}"
                f" {row['perfect_doublings_open']:10.1f} {row['maximal_doublings_open']:5.1f}"
                f"{'' if good else '   MISSED'}",
                flush=True,
            )
    claimed = [row for row in rows if not row["between"]]
    if claimed:
        for ending in ("coverage", "coverage_if_alpha_is_1"):
            held = np.mean(
                [row[f"{x}_{ending}"] for row in claimed for x in ("perfect", "maximal")]
            )
            print(f"{ending.replace('_', ' ')}: {held:.1%}")
            failed |= ending == "coverage" and bool(held < LOWEST_OF_ALL)
    if arguments.save:
        known = {row["name"]: row for row in (*saved_rows("prediction/regimes"), *rows)}
        names = [setting.name for setting in SETTINGS if setting.name in known]
        write_results("prediction/regimes", [known[name] for name in names])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
