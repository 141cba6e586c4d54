# SPDX-License-Identifier: Apache-2.0
"""Have branches trained by workers, and save them in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.lab.branch.sentences import say_branch, say_course
from noisescale.lab.jobs.train_job import train_by_workers
from noisescale.lab.jobs.workers import WorkersToStart
from noisescale.refusal import Refusal

if TYPE_CHECKING:
    from noisescale.lab.branch.branch_job import BranchJob
    from noisescale.lab.branch.planning import Branching
    from noisescale.lab.jobs.jobs import Entry, Training
    from noisescale.prediction.branches import Branch, BranchedRun


def branch_by_workers(
    branching: Branching,
    module: Any,
    examples: Any,
    output: Path,
    training: Training,
    *,
    run: Path,
    monitor: str | None,
    orders: int,
    max_device_batch_size: int | None,
    loss_examples: int,
    place: str,
    to_start: WorkersToStart,
    progress: Callable[[str], None],
) -> BranchedRun:
    """Have the missing branches trained by workers, and save each one in the file.

    Raises:
        ValueError: If a branch was given up.
    """
    from noisescale.lab.branch.branch_job import BranchJob
    from noisescale.lab.branch.train_branches import begin_branches

    branched = begin_branches(
        branching,
        module,
        examples,
        output,
        loss_examples=loss_examples,
        **training.trainer_options,
    )
    progress(say_course(branched))
    sizes = tuple(float(plan.batch_size) for plan in branching.plans)
    job = BranchJob(
        training,
        {
            "run": str(run.absolute()),
            "monitor": monitor,
            "checkpoint": str(branching.checkpoint.path.absolute()),
            "until": str(branching.course[-1].absolute()),
            "batch_sizes": list(sizes),
            "orders": orders,
            "rule": branching.rule,
            "devices": training.devices,
            "max_device_batch_size": max_device_batch_size,
        },
        asdict(replace(branched, branches=())),
        sizes,
        orders,
        loss_examples,
    )
    return _train(job, branched, output, place, to_start, progress)


def _train(
    job: BranchJob,
    branched: BranchedRun,
    output: Path,
    place: str,
    to_start: WorkersToStart,
    progress: Callable[[str], None],
) -> BranchedRun:
    from noisescale.lab.branch.branch_job import branch_name
    from noisescale.lab.jobs.jobs import FAILED, Task
    from noisescale.lab.jobs.ledger import Ledger
    from noisescale.prediction.branches import Branch

    ledger = Ledger.begin(place, output.stem, job, to_start.lease)
    ledger.take(
        (Task(branch_name(b.batch_size, b.order), {}), {"branch": asdict(b)})
        for b in branched.branches
    )
    found = branched

    def show(entries: Mapping[str, Entry]) -> None:
        nonlocal found
        have = {(b.batch_size, b.order) for b in found.branches}
        for entry in entries.values():
            if "branch" not in entry.result:
                continue
            one = Branch.from_record(entry.result["branch"])
            if (one.batch_size, one.order) not in have:
                found = replace(found, branches=_in_order((*found.branches, one), job.sizes))
                found.to_file(output)
                progress(say_branch(one, len(found.branches), len(job.sizes) * job.orders))

    folder = output.parent / f"{output.stem}_trials"
    train_by_workers(ledger, job, place, folder, to_start, show)
    for key, result in ledger.results().items():
        if FAILED in result:
            raise Refusal(
                "target",
                "train",
                f"a branch that failed: {key}: {result[FAILED]} Finished branches are kept",
                "Start the same command again to try it again.",
            )
    return found


def _in_order(branches: Sequence[Branch], sizes: Sequence[float]) -> tuple[Branch, ...]:
    """Sort branches as they are trained one after the other."""
    return tuple(sorted(branches, key=lambda b: (b.order, sizes.index(b.batch_size))))
