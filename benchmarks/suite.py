# SPDX-License-Identifier: Apache-2.0
"""A small AlgoPerf of batch sizes: which methods get to a result sooner, and how sure that is.

    python benchmarks/suite.py [--budget MINUTES] [--only digits ...] [--report] [--smoke]

Four workloads and three variants of each (_suite_workloads.py). First each gets its target: three
algorithms have 8 quasi-random trials each, for 1/4 of the workload's budget; the best of each is
trained with 5 other seeds. Each algorithm's result is the median of their lowest losses, and the
median of the three results is the target. It is set once and saved. Then the submissions are
trained to it (_suite_submissions.py), on a modelled clock (_suite_trials.py), and scored by
`algoperf_score` and `compare` (_suite_scores.py).

All is estimated to take three hours on two idle cores. Results are saved after every training, so
that an interruption loses those under way, one a process. A later call goes on from there.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from _results import saved_rows, write_results
from _suite_scores import report
from _suite_submissions import (
    Key,
    Size,
    key_of,
    missing,
    target_of,
)
from _suite_trials import CLOCK, Row, train
from _suite_workloads import PROBLEMS, VARIANTS
from threadpoolctl import threadpool_limits

SMOKE = Size(
    externals=("sgd", "sgd, tradeoff", "adasum x 2, large", "decentlam x 2, large", "sgd, CARBS"),
    selves=("sgd, untuned",),
    studies=1,
    trials=1,
    long=2,
    target_trials=1,
    reruns=2,
    budget=0.05,
)


class Suite:
    """What is trained and saved."""

    def __init__(self, rows: list[Row], size: Size, *, saved: bool, processes: int) -> None:
        self.rows, self.size, self.saved, self.processes = rows, size, saved, processes

    def run(self, workloads: Sequence[str], deadline: float) -> bool:
        """Train what is missing; return whether nothing is left."""
        busy: dict[Future[Row], Key] = {}
        with ProcessPoolExecutor(self.processes, mp_context=get_context("fork")) as pool:
            while True:
                self._set_targets(workloads)
                tasks = missing(self.rows, workloads, self.size, set(busy.values()))
                while len(busy) < self.processes and time.monotonic() < deadline:
                    if (task := next(tasks, None)) is None:
                        break
                    busy[pool.submit(train, task)] = key_of(task.about)
                if not busy:
                    break
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    self._add(future.result())
                    del busy[future]
        return next(missing(self.rows, workloads, self.size, set()), None) is None

    def _set_targets(self, workloads: Sequence[str]) -> None:
        known = {row["workload"] for row in self.rows if row["kind"] == "target"}
        for workload in workloads:
            if workload not in known and (found := target_of(workload, self.size, self.rows)):
                self._add(found)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        last = row.get("last", [{}])[-1]
        ended = f"{row['ended']} after {last['step']} steps" if last else f"goal {row['goal']:.4g}"
        named = f"{row['workload']}, {row['kind']}, {row['submission']}"
        print(f"{named}, study {row['study']}, trial {row['trial']}: {ended}", flush=True)
        if self.saved:
            write_results("suite", self.rows, clock_devices=CLOCK, variants=VARIANTS, quiet=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=math.inf, help="minutes")
    parser.add_argument("--only", nargs="+", choices=list(PROBLEMS), metavar="WORKLOAD")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="print what is saved, run none")
    parser.add_argument("--smoke", action="store_true", help="a little of each, unsaved")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.budget
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes, too
    rows: list[Row] = [] if given.smoke else saved_rows("suite")
    size = SMOKE if given.smoke else Size()
    workloads = ["regression", "regression_init"] if given.smoke else given.only or list(PROBLEMS)
    suite = Suite(rows, size, saved=not given.smoke, processes=given.processes)
    with threadpool_limits(1):
        done = True if given.report else suite.run(workloads, deadline)
    report(rows, size)
    if not done:
        print("\nNot all is trained: call again to go on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
