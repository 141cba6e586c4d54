# SPDX-License-Identifier: Apache-2.0
"""What `noisescale branch` prints: the cost before, each branch, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from noisescale.lab.branch.tables import Planned, branches_table, cost_lines, headline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from noisescale.history.history import History
    from noisescale.lab.branch.planning import Branching
    from noisescale.plan import Plan
    from noisescale.prediction.branches import Branch, BranchedRun

OF_THE_RUN = (
    "Branches use the module's code, the optimizer's state and the learning rate schedule of the"
    " run. They do not use the run's callbacks, and only the Trainer settings that you give here."
)


def print_costs(console: Console, branching: Branching, orders: int, loss_examples: int) -> None:
    """Print what the branches will cost, and what they use of the run."""
    planned = [
        Planned(size, branching.steps_at(size), branching.factor(size))
        for size in (plan.batch_size for plan in branching.plans)
    ]
    steps = branching.checkpoint.step, branching.end
    for line in cost_lines(*steps, planned, orders, branching.device_hours(loss_examples)):
        console.print(line, markup=False)
    console.print(OF_THE_RUN, markup=False)


@dataclass(frozen=True)
class Told:
    """What is said while branches are trained."""

    console: Console
    status: Status
    orders: int
    """Branches at each batch size."""

    def course(self, found: BranchedRun) -> None:
        """Print where branches start, and what they train for."""
        self.console.print(
            f"The loss of the run is {found.course[0][1]:.4g} at step {found.start:,.0f} and"
            f" {found.goal:.4g} at step {found.end:,.0f}. Branches train until they reach the"
            " second one.",
            markup=False,
        )

    def start(self, plan: Plan, order: int) -> None:
        """Show which branch is trained."""
        self.status.update(
            f"Training a branch at {plan.batch_size:,.4g}, order {order + 1} of {self.orders}..."
        )

    def branch(self, one: Branch) -> None:
        """Print how a branch ended."""
        self.console.print(
            f"{one.batch_size:,.4g}, order {one.order + 1}: loss {one.losses[-1]:.4g} after"
            f" {one.steps[-1]:,.0f} steps, {one.seconds:,.0f} s{_diverged(one)}",
            markup=False,
        )


def _diverged(branch: Branch) -> str:
    """Return the learning rates at which a branch diverged before, as text."""
    if not branch.diverged_at:
        return ""
    tried = ", ".join(f"{factor:.3g}" for factor in branch.diverged_at)
    return f"; learning rate x {branch.learning_rate_factor:.3g}, after it diverged at x {tried}"


def print_result(branched: BranchedRun, history: History) -> None:
    """Print the critical batch size, the table of the branches and the warnings."""
    from rich.console import Console

    from noisescale.report.text import Section, bullets, pairs

    out = Console(highlight=False)
    out.print(pairs(headline(branched, history)), Section(branches_table(branched)), sep="\n")
    if branched.doubts:
        out.print(*bullets("Warnings", branched.doubts, "! ", "bold"), sep="\n")
