# SPDX-License-Identifier: Apache-2.0
"""The space of a search: hyperparameters, and quasi-random points among their values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from noisescale.checks import refuse

LEARNING_RATE = "learning_rate"
MOMENTUM = "momentum"
WEIGHT_DECAY = "weight_decay"

SEARCHABLE = (LEARNING_RATE, MOMENTUM, WEIGHT_DECAY)
"""Momentum is the first of an Adam's betas, too."""

EXAMPLES = {LEARNING_RATE: "0.001..1", MOMENTUM: "0.5..0.99", WEIGHT_DECAY: "1e-5..1e-2"}
"""Of ranges."""


@dataclass(frozen=True)
class Dimension:
    """A hyperparameter that is searched, and the range of its values.

    Learning rates and weight decays are searched in logarithms. So is 1 - momentum: it says over
    how many steps gradients are averaged.

    Examples:
        >>> Dimension("momentum", 0.9, 0.999).at(0.5)
        0.99
    """

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        """Check the range."""
        most = 1.0 if self.name == MOMENTUM else math.inf
        least = 0.0 if self.name == MOMENTUM else math.ulp(0.0)
        if not least <= self.low < self.high < most:
            needed = "from 0 to below 1" if self.name == MOMENTUM else "of positive numbers"
            refuse(
                "search",
                f"have a range {needed}, the smaller one first, for {self.name}",
                f"{self.low:g} to {self.high:g}",
                f"Write, for example, {self.name}={EXAMPLES[self.name]}.",
            )

    def at(self, share: float) -> float:
        """Return the value at a share of the range, from 0 to 1, to six digits."""
        low, high = self._place(self.low), self._place(self.high)
        value = math.exp(low + share * (high - low))
        return float(f"{1 - value if self.name == MOMENTUM else value:.6g}")

    def beyond(self, value: float, factor: float, *, upwards: bool) -> Dimension:
        """Return the range from a value outwards, over a factor."""
        if self.name == MOMENTUM:
            away = 1 - value
            low, high = max(0.0, 1 - away * factor), 1 - away / factor
        else:
            low, high = value / factor, value * factor
        return (
            replace(self, low=value, high=high) if upwards else replace(self, low=low, high=value)
        )

    def around(self, value: float, share: float) -> Dimension:
        """Return the range around a value, to a share of this range on either side."""
        width = math.exp(share * abs(self._place(self.high) - self._place(self.low)))
        if self.name == MOMENTUM:
            away = 1 - value
            return replace(self, low=max(0.0, 1 - away * width), high=1 - away / width)
        return replace(self, low=value / width, high=value * width)

    def _place(self, value: float) -> float:
        return math.log(1 - value if self.name == MOMENTUM else value)


def points(dimensions: Sequence[Dimension], count: int, seed: int) -> list[Mapping[str, float]]:
    """Return quasi-random points: the first ones of a scrambled Halton sequence.

    References:
        Bousquet et al. 2017, arXiv:1706.03200, who recommend them for the search of
        hyperparameters.
    """
    return [
        {d.name: d.at(share) for d, share in zip(dimensions, shares, strict=True)}
        for shares in _shares(len(dimensions), count, seed)
    ]


@lru_cache(maxsize=256)  # a sweep asks for them anew at each look
def _shares(dimensions: int, count: int, seed: int) -> tuple[tuple[float, ...], ...]:
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution
    from optuna.samplers import QMCSampler, RandomSampler

    space: dict[str, BaseDistribution] = {
        str(k): FloatDistribution(0.0, 1.0) for k in range(dimensions)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental
        sampler = QMCSampler(
            qmc_type="halton",
            scramble=True,
            seed=seed,
            independent_sampler=RandomSampler(seed),
            warn_independent_sampling=False,
        )
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(sampler=sampler)
        found = []
        for _ in range(count + 1):
            trial = study.ask(space)
            found.append(tuple(float(trial.params[name]) for name in space))
            study.tell(trial, 0.0)
    finally:
        optuna.logging.set_verbosity(before)
    return tuple(found[1:])  # the first one is random: the sampler does not know the space yet
