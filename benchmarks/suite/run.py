# SPDX-License-Identifier: Apache-2.0
"""A small AlgoPerf of batch sizes: which methods get to a result sooner, and how sure that is.

    python benchmarks/suite/run.py [--budget MINUTES] [--only digits ...] [--report]

Four workloads and three variants of each (_workloads.py). First each gets its target: three
algorithms have 8 quasi-random trials each, for 1/4 of the workload's budget; the best of each is
trained with 5 other seeds. Each algorithm's result is the median of their lowest losses, and the
median of the three results is the target. It is set once and saved. Then the submissions are
trained to it (_submissions.py), on a modelled clock (_trials.py), and scored by
`algoperf_score` and `compare` (_scores.py, _report.py).

All is estimated to take three hours on two idle cores. Results are saved after every training. An
interruption (Ctrl-C, SIGTERM) waits for those under way, one a process, and saves them. A later
call goes on from there. It refuses results of another protocol, or of other versions.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved, saved_rows, versions, write_results
from benchmarks.suite._report import report, write_page
from benchmarks.suite._submissions import (
    Key,
    Size,
    key_of,
    missing,
    protocol,
    target_of,
)
from benchmarks.suite._trials import Row, train
from benchmarks.suite._workloads import PROBLEMS

NAME = "suite/trainings"
PACKAGES = ("optuna", "scikit-learn")
"""Of the quasi-random points, CARBS and the digits, beside those of every benchmark."""

SMOKE = Size(
    externals=("sgd", "sgd, tradeoff", "adasum x 4, large", "decentlam x 4, large", "sgd, CARBS"),
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
        fork = get_context("fork")
        with ProcessPoolExecutor(self.processes, fork, initializer=_leave_signals) as pool:
            try:
                self._run(pool, busy, workloads, deadline)
            except BaseException:  # an interruption, or an error of one training
                for future in as_completed(busy):
                    if future.exception() is None:
                        self._add(future.result())
                raise
        return next(missing(self.rows, workloads, self.size, set()), None) is None

    def _run(
        self,
        pool: ProcessPoolExecutor,
        busy: dict[Future[Row], Key],
        workloads: Sequence[str],
        deadline: float,
    ) -> None:
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
                row = future.result()
                del busy[future]
                self._add(row)

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
            write_results(NAME, self.rows, packages=PACKAGES, protocol=protocol(), quiet=True)


def _leave_signals() -> None:
    """An interruption is for the first process alone, which waits for what is under way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def check_saved() -> None:
    """End unless the saved rows are of this protocol, with these versions."""
    if not (before := saved(NAME)):
        return
    now = {"protocol": json.loads(json.dumps(protocol())), "versions": versions(PACKAGES)}
    for what, value in now.items():
        if not _agree(value, before.get(what, {})):
            sys.exit(
                f"results/{NAME}.json has results with another `{what}`, which cannot be compared"
                " with new ones. Move the file away to begin anew."
            )


def _agree(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether both say the same; workloads and submissions may have been added."""
    if now.keys() != before.keys():
        return False
    return all(
        all(now[what][name] == value for name, value in before[what].items() if name in now[what])
        if what in ("budgets", "spaces", "first_studies")
        else now[what] == before[what]
        for what in now
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=math.inf, help="minutes")
    parser.add_argument("--only", nargs="+", choices=list(PROBLEMS), metavar="WORKLOAD")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="print what is saved, run none")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page of the comparison")
    parser.add_argument("--smoke", action="store_true", help="a little of each, unsaved")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.budget
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    rows: list[Row] = [] if given.smoke else saved_rows("suite/trainings")
    size = SMOKE if given.smoke else Size()
    if not (given.smoke or given.report):
        check_saved()
    workloads = ["regression", "regression_init"] if given.smoke else given.only or list(PROBLEMS)
    suite = Suite(rows, size, saved=not given.smoke, processes=given.processes)
    try:
        with threadpool_limits(1):
            done = True if given.report else suite.run(workloads, deadline)
    except KeyboardInterrupt:
        print("\nStopped. Call again to go on.")
        return 130
    found = report(rows, size)
    if given.html:
        write_page(rows, size, given.html)
    if not given.smoke:
        write_results("suite/scores", found, packages=PACKAGES)
    if not done:
        print("\nNot all is trained: call again to go on.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
