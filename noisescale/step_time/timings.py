# SPDX-License-Identifier: Apache-2.0
"""Measured seconds a step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from noisescale.checks import require_positive
from noisescale.plan import Plan
from noisescale.refusal import Refusal


@dataclass(frozen=True)
class StepTiming:
    """How long an optimizer step took in one configuration.

    Args:
        device_batch_size: Examples of one device in one micro-batch.
        accumulation: Micro-batches of a step.
        devices: Devices that train together, on all nodes.
        nodes: Nodes that the devices are on.
        seconds: Seconds of a step, with all its micro-batches.

    Raises:
        ValueError: If a number is not positive and finite, a count is not whole, or there are more
            nodes than devices.
    """

    device_batch_size: float
    accumulation: int
    devices: int
    nodes: int
    seconds: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            remedy = "Leave the configuration out if it was not measured."
            require_positive(field.name, value, remedy)
            if field.type == "int" and value != int(value):
                raise Refusal(str(field.name), "be a whole number", repr(value), "Give one.")
        _ = self.plan  # which has no more nodes than devices

    @property
    def plan(self) -> Plan:
        """How the step was made up."""
        counts = int(self.accumulation), int(self.devices), int(self.nodes)
        return Plan(self.device_batch_size, *counts)

    @property
    def examples_per_second(self) -> float:
        """Examples per second of all devices together.

        Examples:
            >>> StepTiming(8, 2, devices=4, nodes=1, seconds=0.5).examples_per_second
            128.0
        """
        return self.plan.batch_size / self.seconds
