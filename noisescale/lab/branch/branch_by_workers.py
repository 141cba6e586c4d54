# SPDX-License-Identifier: Apache-2.0
"""Have branches trained by workers, and save them in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from noisescale.lab.branch.branch_job import BranchJob, branch_name
from noisescale.lab.branch.planning import Branching, BranchOptions
from noisescale.lab.branch.train_branches import begin_branches, say_branch, say_course
from noisescale.lab.jobs.jobs import FAILED, Entry, Task, Training
from noisescale.lab.jobs.train_job import train_by_workers
from noisescale.lab.jobs.workers import WorkersToStart
from noisescale.prediction.branches import Branch, BranchedRun
from noisescale.refusal import Refusal


def branch_by_workers(
    branching: Branching,
    module: Any,
    data: Any,
    output: Path,
    asked: BranchOptions,
    training: Training,
    place: str,
    started: WorkersToStart,
    *,
    loss_examples: int,
    progress: Callable[[str], None],
) -> BranchedRun:
    """Have the missing branches trained by workers, and save each one in the file.

    Raises:
        ValueError: If a branch was given up.
    """
    from noisescale.lab.jobs.ledger import Ledger  # it needs Optuna

    options = training.trainer_options
    found, _ = begin_branches(
        branching, module, data, output, loss_examples=loss_examples, **options
    )
    progress(say_course(found))
    planned = replace(
        asked,
        run=str(Path(asked.run).absolute()),  # type: ignore[arg-type]  # a history was refused
        checkpoint=str(branching.checkpoint.path.absolute()),
        until=str(branching.course[-1].absolute()),
        batch_sizes=[float(plan.batch_size) for plan in branching.plans],
        learning_rate=branching.rule,
    )
    job = BranchJob(training, planned, asdict(replace(found, branches=())), loss_examples)
    ledger = Ledger.begin(place, output.stem, job, started.lease)
    ledger.take(
        (Task(branch_name(b.batch_size, b.order), {}), {"branch": asdict(b)})
        for b in found.branches
    )
    in_order = [
        (order, float(plan.batch_size))
        for order in range(branching.orders)
        for plan in branching.plans
    ]

    def show(entries: Mapping[str, Entry]) -> None:
        nonlocal found
        have = {(b.order, b.batch_size) for b in found.branches}
        for entry in entries.values():
            if "branch" not in entry.result:
                continue
            one = Branch.from_record(entry.result["branch"])
            if (one.order, one.batch_size) not in have:
                branches = [*found.branches, one]
                branches.sort(key=lambda b: in_order.index((b.order, b.batch_size)))
                found = replace(found, branches=tuple(branches))
                found.to_file(output)
                progress(say_branch(one, len(branches), len(in_order)))

    train_by_workers(ledger, job, place, output.parent / f"{output.stem}_trials", started, show)
    for key, result in ledger.results().items():
        if FAILED in result:
            raise Refusal(
                "target",
                "train",
                f"a branch that failed: {key}: {result[FAILED]} Finished branches are kept",
                "Start the same command again to try it again.",
            )
    return found
