# SPDX-License-Identifier: Apache-2.0
"""MeterOptions: the options of a `NoiseScaleMeter`, checked before there is a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from noisescale.checks import check_confidence
from noisescale.collectors.choosing import SmallBatch, checked_cut, checked_small_batch
from noisescale.collectors.groups import Groups, check_groups
from noisescale.collectors.per_example.collector import Layers
from noisescale.estimation.estimator import NoiseScaleEstimator, check_unit, check_window
from noisescale.meter.cadence import checked_cost, checked_every_n_steps


@dataclass(frozen=True)
class MeterOptions:
    """The arguments of a `NoiseScaleMeter` that do not depend on the model.

    Raises:
        ValueError: If an option is out of its range, or options contradict each other.
        TypeError: If `groups` has a wrong type.

    Examples:
        >>> options = MeterOptions(layers="normalization", every_n_steps=5)
        >>> options.small_batch, options.leaves_choice
        ('example', False)
    """

    window: int | Literal["auto"] = "auto"
    every_n_steps: int | Literal["auto"] = "auto"
    cost: float | None = None
    unit: str = "examples"
    groups: Groups | None = None
    confidence: float = 0.95
    small_batch: SmallBatch = "auto"
    layers: Layers = "all"
    preconditioned: bool = False
    """Whether the preconditioned noise scale is measured too."""
    cut: Sequence[str] | None = None
    along_gradient: bool = False
    """Whether the noise along the optimizer's momentum is measured too."""

    def __post_init__(self) -> None:
        every_n_steps = checked_every_n_steps(self.every_n_steps)
        cost = None if self.cost is None else checked_cost(self.cost)
        check_window(self.window)
        check_confidence(self.confidence)
        check_unit(self.unit)
        small_batch = checked_small_batch(self.small_batch, self.layers, self.preconditioned)
        check_groups(self.groups)
        cut = checked_cut(self.cut, small_batch)
        as_checked = {"every_n_steps": every_n_steps, "cost": cost}
        for name, value in (as_checked | {"small_batch": small_batch, "cut": cut}).items():
            object.__setattr__(self, name, value)  # the record is frozen

    def new_estimator(self) -> NoiseScaleEstimator:
        """Return an estimator that has seen no step."""
        return NoiseScaleEstimator(self.window, self.confidence, self.unit)

    @property
    def leaves_choice(self) -> bool:
        """Whether `small_batch` is "auto", so that the package chooses what is compared.

        Then it is no error if the halves of a batch turn out not to be comparable.
        """
        return self.small_batch == "auto" and self.cut is None
