# SPDX-License-Identifier: Apache-2.0
"""Sentences about branches while they are trained."""

from __future__ import annotations

from noisescale.prediction.branches import Branch, BranchedRun


def say_course(found: BranchedRun) -> str:
    """Return where branches start, and what loss they train for."""
    return (
        f"The loss of the run is {found.course[0][1]:.4g} at step {found.start:,.0f} and"
        f" {found.goal:.4g} at step {found.end:,.0f}. Branches train until they reach the"
        " second one."
    )


def say_branch(branch: Branch, done: int, many: int) -> str:
    """Return how a branch ended, and how many of all branches are done."""
    diverged = ""
    if branch.diverged_at:
        tried = ", ".join(f"{factor:.3g}" for factor in branch.diverged_at)
        diverged = (
            f"; learning rate x {branch.learning_rate_factor:.3g}, after it diverged at x {tried}"
        )
    return (
        f"Branch {done} of {many}: batch size {branch.batch_size:,.4g}, order {branch.order + 1}:"
        f" loss {branch.losses[-1]:.4g} after {branch.steps[-1]:,.0f} steps,"
        f" {branch.seconds:,.0f} s{diverged}"
    )
