# SPDX-License-Identifier: Apache-2.0
"""Compare the noise scale that is shown in a training with the exact one of its last 40 steps.

Models and settings are other people's, see `_now_workloads.py`. Each run is looked at three or four
times, the last time at its end. At a look the noise scale is shown as `NoiseScaleMonitor` does
after the steps that the cadence had measured by then.

    python benchmarks/accuracy/now.py                        # a minute: replays what was recorded
    python benchmarks/accuracy/now.py --record [--seeds 10]  # hours: trains what was not recorded

A look counts as held if the interval has the exact noise scale in it; an interval without an upper
end has it if it is above the lower bound. All looks count, but those where the exact noise scale is
known to less than 25 % (the ends of some cosine schedules): their number is printed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.accuracy._now_workloads import BATCH_SIZE, LOOKS, WORKLOADS, Recorded, record
from benchmarks.lib.results import FOLDER, write_results
from noisescale import GradientMoments, NoiseScale, NoiseScaleEstimator
from noisescale.meter.cadence import KNOWN_WITHIN, Cadence, Pace, Spent

UNDER_WAY = Path(__file__).resolve().parents[2] / ".cache/now"
RECORDED = FOLDER / "accuracy/now.npz"
HALVES = 0.75
"""What measuring a step by halves costs, in plain steps: as `HalvesCollector.cost`."""
CADENCES: dict[str, float | None] = {
    "default": None,
    "1 %": 0.01,
    "2 %": 0.02,
    "every step": HALVES,
}
"""The share of the run's time that measuring may take. By default the end of the run is known."""
LOG_EVERY = 50
LEAST_KNOWN = 0.25
"""The largest relative standard error of the exact noise scale at a look that counts."""
WITHIN = 1.5
RATIOS = (0, 4, 16, math.inf)
"""Looks are told apart by how many batches the noise scale is."""


class Look(NamedTuple):
    workload: str
    steps: int
    """Of the whole run."""
    seed: int
    at: int
    truth: float
    shown: NoiseScale

    @property
    def held(self) -> bool:
        return self.shown.low <= self.truth <= self.shown.high

    @property
    def near(self) -> bool:
        if not self.shown.resolved:
            return False
        return self.truth / WITHIN <= self.shown.value <= self.truth * WITHIN


def rate_of(workload: str, steps: int, step: int) -> float:
    """The learning rate of a step as a share of the first one's: it is constant, or a cosine."""
    return (1 + math.cos(math.pi * (step - 1) / steps)) / 2 if WORKLOADS[workload].cosine else 1.0


def looks(max_overhead: float | None, *, rates: bool = True) -> Iterator[Look]:
    """Replay all runs at one cadence.

    Args:
        max_overhead: See `CADENCES`.
        rates: Whether the estimator is told the learning rates.
    """
    for (workload, steps, seed), run in recorded_runs().items():
        estimator, last = NoiseScaleEstimator(), 0
        cadence, spent, pace = Cadence("auto", max_overhead), Spent(), Pace()
        truths = zip(LOOKS[steps], run.truth, run.truth_error, strict=True)
        for at, truth, error in truths:
            for step in range(last + 1, at + 1):
                if cadence.due(step, spent, HALVES, pace):
                    spent = spent.plus(HALVES)
                    moments = GradientMoments(run.grad_sq_norm[step - 1], run.noise_trace[step - 1])
                    rate = rate_of(workload, steps, step) if rates else math.nan
                    estimator.update(moments, BATCH_SIZE, step, learning_rate=rate)
                if step % LOG_EVERY == 0:
                    shown = estimator.estimate(step, learning_rate=rate_of(workload, steps, step))
                    known = shown.low > 0 and shown.high <= KNOWN_WITHIN * shown.low
                    pace = pace.at(step, step - LOG_EVERY, math.nan, known=known)
                    pace = pace._replace(last_step=float(steps))
            last = at
            if truth > 0 and error <= LEAST_KNOWN:
                # Of the look's last step: after the last step of a cosine the rate is zero.
                now = rate_of(workload, steps, at) if rates else math.nan
                shown = estimator.estimate(at, learning_rate=now)
                yield Look(workload, steps, seed, at, float(truth), shown)


def summary(found: list[Look]) -> dict[str, float]:
    """Shares of the looks, and the median ratio of the ends of resolved intervals."""
    ratios = [x.shown.high / x.shown.low for x in found if x.shown.resolved and x.shown.low > 0]
    return {
        "looks": len(found),
        "held": round(np.mean([look.held for look in found]), 3),
        "within": round(np.mean([look.near for look in found]), 3),
        "resolved": round(np.mean([look.shown.resolved for look in found]), 3),
        "high_over_low": round(float(np.median(ratios)), 2) if ratios else math.nan,
    }


def report(*, save: bool) -> None:
    """Print the shares of looks, by cadence, length of run and the noise scale in batches."""
    total = sum(len(LOOKS[steps]) for _, steps, _ in recorded_runs())
    rows = []
    for name, max_overhead in CADENCES.items():
        found = list(looks(max_overhead))
        for steps in LOOKS:
            of_length = [look for look in found if look.steps == steps]
            parts = {"all": of_length}
            for low, high in pairwise(RATIOS):
                parts[f"{low} to {high} B"] = [
                    look for look in of_length if low <= look.truth / BATCH_SIZE < high
                ]
            parts |= {w: [look for look in of_length if look.workload == w] for w in WORKLOADS}
            for part, those in parts.items():
                if those:
                    rows.append({"cadence": name, "steps": steps, "of": part} | summary(those))
        print(f"{name}: {total - len(found)} of {total} looks are not known exactly enough")
    for row in rows:
        if row["of"] not in WORKLOADS:
            print(
                f"{row['cadence']:10} {row['steps']:5} steps  {row['of']:12} {row['looks']:4} looks"
                f"  held {row['held']:4.0%}  within {WITHIN} x {row['within']:4.0%}"
                f"  resolved {row['resolved']:4.0%}  high/low {row['high_over_low']:.1f}"
            )
    if save:
        write_results("accuracy/now", rows)


def record_all(seeds: int) -> None:
    """Train what was not trained yet, one seed of all workloads after the other."""
    torch.set_num_threads(1)
    UNDER_WAY.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for workload in WORKLOADS.values():
            for steps in workload.lengths:
                path = UNDER_WAY / f"{workload.name}-{steps}-{seed}.npz"
                if not path.exists():
                    recorded = record(workload, steps, seed)
                    np.savez(path.with_suffix(".new.npz"), **vars(recorded))
                    path.with_suffix(".new.npz").replace(path)  # an interruption leaves no half
                    print(path.stem, recorded.truth.round(1), flush=True)
    pack()


def pack() -> None:
    """Save all runs in one file."""
    arrays = {
        f"{path.stem}/{name}": array.astype(np.float32)
        for path in sorted(UNDER_WAY.glob("*[0-9].npz"))
        for name, array in np.load(path).items()
    }
    np.savez_compressed(RECORDED, **arrays)


def recorded_runs() -> dict[tuple[str, int, int], Recorded]:
    """All runs that were saved, by workload, steps and seed."""
    arrays = np.load(RECORDED)
    runs = sorted({key.partition("/")[0] for key in arrays})
    found = {}
    for run in runs:
        name, steps, seed = run.rsplit("-", 2)
        columns = {key: arrays[f"{run}/{key}"].astype(float) for key in Recorded.__annotations__}
        found[name, int(steps), int(seed)] = Recorded(**columns)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="into results/accuracy/now.json")
    options = parser.parse_args()
    if options.record:
        record_all(options.seeds)
    report(save=options.save)
