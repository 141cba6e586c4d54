# SPDX-License-Identifier: Apache-2.0
"""Compare the noise scale that is shown in a training with the exact one of its last 40 steps.

    python benchmarks/now.py --record [--seeds 10]    # hours: trains, and saves what was measured
    python benchmarks/now.py                          # seconds: replays what was saved

"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from _now_workloads import WORKLOADS, Recorded, record
from _results import FOLDER

UNDER_WAY = Path(__file__).resolve().parent.parent / ".cache/now"
RECORDED = FOLDER / "now.npz"


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    if options.record:
        record_all(options.seeds)
