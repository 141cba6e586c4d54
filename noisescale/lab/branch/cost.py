# SPDX-License-Identifier: Apache-2.0
"""What branches will cost: the record, its document, and the same in builtin types."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from noisescale._version import __version__
from noisescale.bounded import Bounded
from noisescale.lab.branch.planning import Branching
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table, cell_of
from noisescale.report.numbers import count, duration_for, number, with_bounds
from noisescale.report.records import finite

_USED = (
    "the module's code, the optimizer's state and the learning rate schedule of the run, but not"
    " its callbacks. Settings of the Trainer are those that you give here"
)


@dataclass(frozen=True)
class BranchCost(Answer):
    """Branches before they are trained."""

    branching: Branching
    loss_examples: int
    """Examples in each evaluation of the loss."""

    @property
    def device_hours(self) -> Bounded:
        """Device-hours of all branches at the run's speed; NaN if its steps were not timed."""
        return self.branching.device_hours(self.loss_examples)

    def document(self) -> Document:
        """Return the cost of all branches, and the expected steps at each batch size."""
        branching, hours = self.branching, self.device_hours
        headline = "The cost of the branches is not known: the run's steps were not timed"
        if not math.isnan(hours.value):
            unit = duration_for([hours])
            about = with_bounds(unit.convert(hours))
            headline = f"Branches cost about {about} device-{unit.name} at the run's speed"
        sizes = ", ".join(count(plan.batch_size) for plan in branching.plans)
        return Document(
            title="Cost of branches - noisescale",
            headline=headline,
            answers=[
                Statement(
                    "Branches",
                    f"start at step {branching.checkpoint.step:,} and train until the loss of step"
                    f" {branching.end:,}, {branching.orders} at each batch size: {sizes}",
                ),
                Statement("They use", _USED),
            ],
            tables=[
                Table(
                    "Branches to train",
                    ["batch size", "learning rate", "steps"],
                    [
                        Line(
                            [
                                Cell(count(plan.batch_size)),
                                Cell(f"x {number(branching.factor(plan.batch_size))}"),
                                cell_of(branching.steps_at(plan.batch_size)),
                            ]
                        )
                        for plan in branching.plans
                    ],
                    ["steps: by the noise scale. The cost includes evaluations of the loss."],
                )
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the cost in builtin types. Bounds and None are as in `Prediction.to_dict`."""
        branching = self.branching
        record: dict[str, Any] = finite(
            {
                "version": __version__,
                "start": branching.checkpoint.step,
                "end": branching.end,
                "rule": branching.rule,
                "orders": branching.orders,
                "device_hours": self.device_hours,
                "branches": [
                    {
                        "batch_size": plan.batch_size,
                        "learning_rate_factor": branching.factor(plan.batch_size),
                        "steps": branching.steps_at(plan.batch_size),
                    }
                    for plan in branching.plans
                ],
            }
        )
        return record
