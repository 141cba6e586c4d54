# SPDX-License-Identifier: Apache-2.0
"""All that changes about the batch size along a run, and is saved."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from noisescale.checks import checked_state
from noisescale.plan import Plan
from noisescale.scheduling.critical_batch_size_so_far import RunSoFar
from noisescale.scheduling.learning_rate import NO_FACTORS, Factors
from noisescale.scheduling.policy import Progress

FIRST_DECISION = 4
"""Steps that two moments' scatter can be told from."""


@dataclass(frozen=True)
class ControllerState:
    """How far a run is, and how its steps are made up.

    Example:
        >>> state = ControllerState(Plan(8, 4), base_batch_size=32.0, wanted=32.0)
        >>> ControllerState.loaded(state.state_dict()).plan
        Plan(device_batch_size=8, accumulation=4, devices=1, nodes=1)
    """

    plan: Plan
    """How a step is made up now."""
    base_batch_size: float
    """The batch size that the learning rate was chosen for."""
    wanted: float
    """What the policy asked for last."""
    steps: int = 0
    """Optimizer steps taken."""
    examples: float = 0.0
    """Examples of all devices in them."""
    examples_at_move: float = -math.inf
    """Likewise when the batch size changed last."""
    next_decision: int = FIRST_DECISION
    """The step from which the policy is asked again, if it goes by the noise scale."""
    peak_learning_rate: float = 0.0
    """The largest that the run's own schedule has given."""
    lowered_to: int | None = None
    """Rows of the largest micro-batch that memory may suffice for; None: as the user said."""
    gain: float = 1.0
    """The steps of the first batch size that one of now is worth: AdaScale's gain."""
    factors: Factors = NO_FACTORS
    """What the optimizer's settings are changed by while it steps."""
    run: RunSoFar = field(default_factory=RunSoFar)
    """What the steps so far were worth, and its critical batch size."""
    steps_observed: int = 0
    """Those that `run` has seen."""
    low: float = 0.0
    """What the noise scale was above at the last decision."""

    def progress(self, learning_rate: float) -> Progress:
        """Return what a policy is told of the run, at the learning rate of its own schedule."""
        return Progress(
            self.steps,
            self.examples,
            self.examples - self.examples_at_move,
            self.run.critical_batch_size,
            learning_rate,
            self.peak_learning_rate,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `loaded` makes it from, in builtins, but for the nodes, which are of now."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {
            "plan": [self.plan.device_batch_size, self.plan.accumulation, self.plan.devices],
            "factors": list(self.factors),
            "run": self.run.state_dict(),
        }

    @classmethod
    def loaded(cls, state: dict[str, Any]) -> ControllerState:
        """Return the record of a `state_dict`, which may have more in it.

        Raises:
            ValueError: If something is missing.
        """
        run = RunSoFar()
        checked_state("BatchSizeController, `run`,", state["run"], run.state_dict())
        run.load_state_dict(state["run"])
        made: dict[str, Any] = {
            "plan": Plan(*state["plan"]),
            "factors": Factors(*state["factors"]),
            "run": run,
        }
        return cls(**{one.name: made.get(one.name, state[one.name]) for one in fields(cls)})
