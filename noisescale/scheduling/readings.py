# SPDX-License-Identifier: Apache-2.0
"""What a controller tells of its state."""

from __future__ import annotations

from noisescale.plan import Plan
from noisescale.scheduling.critical_batch_size_so_far import RunSoFar
from noisescale.scheduling.state import ControllerState


class StateReadings:
    """The fields of a state that are public, to be read alone."""

    _state: ControllerState

    @property
    def plan(self) -> Plan:
        """How a step is made up now."""
        return self._state.plan

    @property
    def base_batch_size(self) -> float:
        """The batch size that the learning rate was chosen for."""
        return self._state.base_batch_size

    @property
    def wanted(self) -> float:
        """What the policy asked for last."""
        return self._state.wanted

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self._state.steps

    @property
    def examples(self) -> float:
        """Examples of all devices in them."""
        return self._state.examples

    @property
    def gain(self) -> float:
        """The steps of the first batch size that one of now is worth: AdaScale's gain."""
        return self._state.gain

    @property
    def lr_factor(self) -> float:
        """The factor on the learning rate of the next step."""
        return self._state.factors.learning_rate

    @property
    def run(self) -> RunSoFar:
        """What the steps so far were worth, and its critical batch size."""
        return self._state.run
