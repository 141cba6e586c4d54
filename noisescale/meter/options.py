# SPDX-License-Identifier: Apache-2.0
"""MeterOptions: how a `NoiseScaleMeter` measures, checked before there is a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from noisescale.checks import is_whole
from noisescale.collectors.choosing import SmallBatch, checked_cut, checked_small_batch
from noisescale.collectors.groups import Groups, check_groups
from noisescale.collectors.per_example.collector import Layers
from noisescale.estimation.estimator import NoiseScaleEstimator

_WITH_A_PASS = 10
"""One step in so many is measured where that takes a backward pass more, and "auto" decides."""


class Cadence:
    """Measure the first step and every n-th from there.

    Args:
        every_n_steps: n, or "auto": every step, but one in ten where that takes a backward pass
            more.

    Raises:
        ValueError: If n is not a whole number of steps.

    Example:
        >>> cadence = Cadence("auto")
        >>> [steps for steps in range(30) if steps % cadence.every_n_steps(True) == 0]
        [0, 10, 20]
    """

    def __init__(self, every_n_steps: int | Literal["auto"]) -> None:
        if every_n_steps != "auto":
            if not is_whole(every_n_steps) or every_n_steps < 1:
                raise ValueError(
                    f"`every_n_steps` must be at least 1, got {every_n_steps!r}. Pass 1 to measure"
                    ' every step, or "auto".'
                )
            every_n_steps = int(every_n_steps)
        self.asked_for: int | Literal["auto"] = every_n_steps

    def every_n_steps(self, takes_a_pass: bool) -> int:
        """Return n, where a measured step takes a backward pass more or does not."""
        if self.asked_for == "auto":
            return _WITH_A_PASS if takes_a_pass else 1
        return self.asked_for


@dataclass(frozen=True)
class MeterOptions:
    """The arguments of a `NoiseScaleMeter` that are no part of the model. See there.

    Raises:
        ValueError: If one is out of its range, or they contradict each other.
        TypeError: If `groups` has a wrong type.

    Example:
        >>> options = MeterOptions(layers="normalization", every_n_steps=5)
        >>> options.small_batch, options.leaves_choice
        ('example', False)
    """

    window: int | Literal["auto"] = "auto"
    every_n_steps: int | Literal["auto"] = "auto"
    unit: str = "examples"
    groups: Groups | None = None
    confidence: float = 0.95
    small_batch: SmallBatch = "auto"
    layers: Layers = "all"
    preconditioned: bool = False
    """Whether the preconditioned noise scale is measured too."""
    cut: Sequence[str] | None = None

    def __post_init__(self) -> None:
        every_n_steps = Cadence(self.every_n_steps).asked_for
        self.new_estimator()
        small_batch = checked_small_batch(self.small_batch, self.layers, self.preconditioned)
        check_groups(self.groups)
        cut = checked_cut(self.cut, small_batch)
        vars(self).update(  # it is frozen
            every_n_steps=every_n_steps, small_batch=small_batch, cut=cut
        )

    def new_estimator(self) -> NoiseScaleEstimator:
        """Return an estimator that has seen no step."""
        return NoiseScaleEstimator(self.window, self.confidence, self.unit)

    @property
    def leaves_choice(self) -> bool:
        """Whether what is compared is left to us.

        Halves of a batch that turn out not to be comparable are then no error of the user's.
        """
        return self.small_batch == "auto" and self.cut is None

    def arguments(self) -> dict[str, Any]:
        """Return them by name, as the callbacks take them."""
        return dict(vars(self))
