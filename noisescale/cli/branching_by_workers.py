# SPDX-License-Identifier: Apache-2.0
"""`noisescale branch --launcher`: branches trained by workers, saved in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noisescale.cli.workers import stopped, trained_by_workers

if TYPE_CHECKING:
    from rich.status import Status

    from noisescale.prediction.branches import Branch, BranchedRun
    from noisescale.tuning.branch_job import BranchJob
    from noisescale.tuning.ledger import Entry


def branched_by_workers(
    job: BranchJob,
    branched: BranchedRun,
    output: Path,
    place: str,
    *,
    workers: int,
    launcher: str,
    options: dict[str, Any],
    lease: float,
    status: Status,
    on_branch: Callable[[Branch], None],
) -> BranchedRun:
    """Have the missing branches trained by workers, and save each one in the file.

    Raises:
        ValueError: If a branch was given up.
    """
    from noisescale.prediction.branches import Branch
    from noisescale.tuning.branch_job import branch_name
    from noisescale.tuning.jobs import FAILED
    from noisescale.tuning.ledger import Ledger

    ledger = Ledger.begin(place, output.stem, job, lease)
    known = {branch_name(b.batch_size, b.order): {"branch": asdict(b)} for b in branched.branches}
    ledger.take(known)
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
                on_branch(one)
        status.update(f"{len(found.branches)} of {len(job.sizes) * job.orders} branches trained")

    with stopped(place):
        folder = output.parent / f"{output.stem}_trials"
        trained_by_workers(
            ledger,
            job,
            place,
            folder,
            workers=workers,
            launcher=launcher,
            options=options,
            accelerator=job.training.accelerator,
            show=show,
        )
    for key, result in ledger.results().items():
        if FAILED in result:
            raise ValueError(
                f"`target` must train, got a branch that failed: {key}: {result[FAILED]} Finished"
                " branches are kept. Start the same command again to try it again."
            )
    return found


def _in_order(branches: Sequence[Branch], sizes: Sequence[float]) -> tuple[Branch, ...]:
    """Sort branches as they are trained one after the other."""
    return tuple(sorted(branches, key=lambda b: (b.order, sizes.index(b.batch_size))))
