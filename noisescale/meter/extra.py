# SPDX-License-Identifier: Apache-2.0
"""ExtraMeasurement: what a method needs measured beside the noise scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from noisescale.collectors.gradient_norms import ExtraEntry
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.state import State


class ExtraMeasurement(State, ABC):
    """A noise scale of a meter from moments of its own, by a further entry of each row.

    A meter makes one from each of its `extra`. All parts of a step are measured alike, so that the
    two moments of the entry follow from it as those of the gradient do.

    Args:
        options: The `MeterOptions` of the meter.
        optimizer: The optimizer that steps, if it is known.
    """

    name: str
    """The key in `NoiseScaleMeter.extra_noise_scales` and in states."""
    title: str | None = None
    """The title of its chart. Only with a title it is logged, as `noise_scale/<name>`."""

    def __init__(self, options: object, optimizer: Optimizer | None) -> None:
        self.optimizer = optimizer
        """None also once the meter is closed."""

    @abstractmethod
    def entry(self, parameters: Sequence[Parameter]) -> ExtraEntry:
        """Return the entry, for the measured parameters.

        Raises:
            ValueError: If it cannot be measured in this training.
        """

    @abstractmethod
    def update(
        self, moments: GradientMoments, whole: GradientMoments, weight: float, step: int
    ) -> None:
        """Add one step.

        Args:
            moments: The moments of the entry.
            whole: The moments of the whole gradient.
            weight: The global batch size of the step.
            step: Optimizer steps of the run up to this one.
        """

    @abstractmethod
    def estimate(self, noise_scale_at: Callable[[float], NoiseScale], step: int) -> NoiseScale:
        """Return the noise scale now.

        Args:
            noise_scale_at: The noise scale of the whole gradient, with a confidence.
            step: Optimizer steps of the run up to now.
        """

    def close(self) -> None:
        """Let go of the optimizer."""
        self.optimizer = None


Extra = Callable[[Any, Optimizer | None], ExtraMeasurement]
"""What users give: a subclass of `ExtraMeasurement`, or a function with the same arguments."""
