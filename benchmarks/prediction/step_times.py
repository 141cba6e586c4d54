# SPDX-License-Identifier: Apache-2.0
"""Count how often the bounds of the step time hold a further timing.

Arithmetic only: plans are "timed" by Pollux's model with known constants and log-normal scatter,
the timings are fitted by `fit_step_time`, and other plans are asked for. Each answer is compared
with one further timing of that plan, scatter and all.

    python benchmarks/prediction/step_times.py [--fits 400] [--processes 2] [--save]

Exits 1 if a setting's coverage leaves 92 to 98.5 %, counted over all of its plans.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results
from noisescale.step_time import StepTiming, fit_step_time

LOWEST, HIGHEST = 0.92, 0.985
"""The standard error of a setting's coverage is up to 1 %."""

Plan = tuple[int, int, int, int]
"""Device batch size, accumulation, devices, nodes."""

CLUSTER = ((1, 1), (2, 1), (8, 1), (16, 2), (32, 4))


@dataclass(frozen=True)
class Setting:
    name: str
    timed: tuple[Plan, ...]
    asked: tuple[Plan, ...]
    """Within what the timings tell: what has to be assumed is no matter of chance."""
    scatter: float
    """Standard deviation of the logarithm of a timing."""
    overlap: float = 2.0
    update: float = 0.010
    share: float = 1.0
    """Of the fits that are asked for: those to many timings take long."""


def plans(sizes: tuple[int, ...], accumulation: tuple[int, ...]) -> tuple[Plan, ...]:
    """On one device."""
    return tuple((b, k, 1, 1) for b, k in itertools.product(sizes, accumulation))


ON_CLUSTER = tuple(
    (b, k, w, n) for b, k, (w, n) in itertools.product((8, 32, 128), (1, 4), CLUSTER)
)
FROM_CLUSTER = ((64, 2, 4, 1), (128, 1, 8, 1), (16, 8, 24, 3))
ONE_DEVICE = plans((4, 8, 16, 32, 64), (1, 2))
FROM_ONE = ((4, 1, 1, 1), (24, 2, 1, 1), (128, 8, 1, 1))

SETTINGS = (
    Setting("a cluster, 5 %", ON_CLUSTER, FROM_CLUSTER, 0.05, share=0.25),
    Setting("a cluster, no overlap, 2 %", ON_CLUSTER, FROM_CLUSTER, 0.02, 1.0, share=0.25),
    Setting("one device, 10 %", ONE_DEVICE, FROM_ONE, 0.10),
    Setting("one device, 2 %", ONE_DEVICE, FROM_ONE, 0.02),
    Setting("one device, no update, 5 %", ONE_DEVICE, FROM_ONE, 0.05, update=0.0),
    Setting("six timings, 2 %", ONE_DEVICE[:6], ((4, 1, 1, 1), (16, 4, 1, 1), (32, 1, 1, 1)), 0.02),
    Setting(
        "two device batches, 3 %", plans((16, 64), (1, 2)), ((32, 1, 1, 1), (64, 4, 1, 1)), 0.03
    ),
)


def seconds(setting: Setting, plan: Plan) -> float:
    """Qiao et al. 2021, section 3.2, with made-up constants, and an update's."""
    size, accumulation, devices, nodes = plan
    grad = 0.020 + 0.001 * size
    farther = max(devices - 2, 0)
    sync = 0.010 + 0.0005 * farther if nodes == 1 else 0.040 + 0.002 * farther
    p = setting.overlap
    last = (grad**p + (sync if devices > 1 else 0.0) ** p) ** (1 / p)
    return (accumulation - 1) * grad + last + setting.update


def fitted(setting: Setting, seed: int) -> list[tuple[float, float, float, float]]:
    """Of each plan asked for: a further timing; value, low and high of the model."""
    rng = np.random.default_rng([seed, SETTINGS.index(setting)])

    def timed(plan: Plan) -> float:
        return seconds(setting, plan) * math.exp(rng.normal(0, setting.scatter))

    model = fit_step_time([StepTiming(*plan, timed(plan)) for plan in setting.timed])
    bands = [model.seconds(*plan) for plan in setting.asked]
    return [
        (timed(plan), band.value, band.low, band.high)
        for plan, band in zip(setting.asked, bands, strict=True)
    ]


def measure(setting: Setting, fits: int, processes: int) -> dict[str, object]:
    with get_context("spawn").Pool(processes) as pool:
        rows = pool.map(functools.partial(fitted, setting), range(fits), chunksize=5)
    further, value, low, high = np.moveaxis(np.array(rows), -1, 0)  # each: fits, plans
    held = (low <= further) & (further <= high)
    return {
        "fits": fits,
        "coverage": round(float(held.mean()), 4),
        "by_plan": [round(float(x), 4) for x in held.mean(axis=0)],
        "below": round(float((further < low).mean()), 4),
        "above": round(float((further > high).mean()), 4),
        "median_relative_width": round(float(np.median((high - low) / value)), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", type=int, default=400)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--save", action="store_true", help="write the results' JSON file")
    arguments = parser.parse_args()
    print(f"{'setting':28} coverage  below  above  width  coverage of each plan")
    results, failed = [], False
    for setting in SETTINGS:
        if arguments.only not in setting.name:
            continue
        started = time.perf_counter()
        fits = math.ceil(arguments.fits * setting.share)
        row = measure(setting, fits, arguments.processes)
        good = LOWEST <= float(str(row["coverage"])) <= HIGHEST
        failed |= not good
        results.append({**asdict(setting), **row, "passed": good})
        print(
            f"{setting.name:28} {row['coverage']:8.1%} {row['below']:6.1%} {row['above']:6.1%}"
            f" {row['median_relative_width']:6.2f}  {row['by_plan']}"
            f"{'' if good else '   OUTSIDE 92 to 98.5 %'}"
            f"   ({time.perf_counter() - started:.0f} s)",
            flush=True,
        )
    if arguments.save:
        write_results("prediction/step_times", results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
