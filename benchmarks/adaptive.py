# SPDX-License-Identifier: Apache-2.0
"""Compare a batch size that follows the noise scale with every fixed one.

python benchmarks/adaptive.py [--budget MINUTES] [--only digits] [--report] [--smoke]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from _results import saved_rows, write_results
from sweeping import Sweep
from workloads import WORKLOADS, Workload

FARTHER = {
    "digits": {"goal": 0.12, "batch_sizes": (2, 8, 32, 128, 512), "seeds": 8, "first_lr": 0.1},
    "mnist": {"goal": 0.13, "batch_sizes": (4, 16, 64, 256, 1024), "seeds": 4, "first_lr": 0.1},
    "characters": {"goal": 1.95, "batch_sizes": (4, 16, 64, 256, 1024), "seeds": 4,
                   "first_lr": 0.002},
}  # fmt: skip

MOST_STEPS = 20_000


def farther(name: str) -> Workload:
    return replace(WORKLOADS[name], **FARTHER[name])


def tune_fixed(sweep: Sweep, names: Iterable[str], deadline: float) -> bool:
    for name in names:
        workload = farther(name)
        start, most_steps = workload.first_lr, MOST_STEPS
        for batch_size in workload.batch_sizes:
            if time.monotonic() > deadline:
                return False
            sweep.tune(workload, batch_size, start, most_steps)
            if best := sweep.best(workload, batch_size):
                start = best["lr"] * math.sqrt(2)
                most_steps = math.ceil(1.5 * min(sweep.tried(workload, batch_size).values()))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=math.inf, help="minutes")
    parser.add_argument("--only", choices=WORKLOADS)
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(WORKLOADS)
    deadline = time.monotonic() + 60 * arguments.budget
    rows = saved_rows("adaptive")

    def save() -> None:
        write_results("adaptive", rows, most_steps=MOST_STEPS, quiet=True)

    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        tune_fixed(Sweep(rows, pool, save), names, deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
