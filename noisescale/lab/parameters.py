# SPDX-License-Identifier: Apache-2.0
"""A parameter that is searched: its values, the kind of its space, and where the search begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from noisescale.checks import is_real, refuse, require_positive
from noisescale.lab.tune.carbs.spaces import (
    LinearSpace,
    LogitSpace,
    LogSpace,
    MomentumSpace,
    PowerOfTwoSpace,
    Space,
)
from noisescale.printable import printable

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from noisescale.lab.tune.carbs.dimensions import Dimension

LEARNING_RATE, BATCH_SIZE = "learning_rate", "batch_size"
MOMENTUM, WEIGHT_DECAY = "momentum", "weight_decay"
EPOCHS, STEPS = "epochs", "steps"
FITTED = (LEARNING_RATE, BATCH_SIZE, WEIGHT_DECAY, MOMENTUM, EPOCHS, STEPS)
"""Parameters of the training. All others are arguments of the function that makes the module."""

LOG, LINEAR, LOGIT, POW2, CHOICE = "log", "linear", "logit", "pow2", "choice"
SPACES: Mapping[str, type[Space]] = {
    LOG: LogSpace,
    LINEAR: LinearSpace,
    LOGIT: LogitSpace,
    MOMENTUM: MomentumSpace,
    POW2: PowerOfTwoSpace,
}
"""Kinds of numbers, and their spaces."""

SWEPT = {LEARNING_RATE: LOG, MOMENTUM: MOMENTUM, WEIGHT_DECAY: LOG}
"""Hyperparameters of optimizers, and the kinds by which a sweep searches them.

Momentum is the first of an Adam's betas, too."""

_WHOLE = (BATCH_SIZE, STEPS)
_REAL = (LEARNING_RATE, WEIGHT_DECAY, MOMENTUM, EPOCHS)

Value = float | int | str | bool


@dataclass(frozen=True)
class Parameter:
    """A parameter, and its values. `range_parameter` and `choice_parameter` make it.

    Examples:
        >>> range_parameter("width", 16, 512, whole=True).middle
        91
    """

    name: str
    kind: str
    """One of `SPACES`, or "choice"."""
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution
    center: Value | None = None
    """Where the search begins; None before it is known."""
    scale: float = 1.0
    """How far the search looks around a good value, relative to the usual distance."""

    def __post_init__(self) -> None:
        """Check where the search begins, and how far it looks."""
        require_positive("scale", self.scale, f"Leave the scale of {printable(self.name)} out.")
        if self.center is not None and not self.has(self.center):
            refuse(
                "center",
                f"be among the values of {self.name}, {self.text()}",
                repr(self.center),
                "Give another one, or another range.",
            )

    @property
    def is_number(self) -> bool:
        """Whether it is a number, and no choice."""
        return self.kind != CHOICE

    @property
    def choices(self) -> tuple[Value, ...]:
        """The choices; empty for a number."""
        if self.is_number:
            return ()
        return cast("tuple[Value, ...]", cast("CategoricalDistribution", self.distribution).choices)

    @property
    def low(self) -> float:
        """The smallest number; NaN for choices."""
        return float(self._range.low) if self.is_number else math.nan

    @property
    def high(self) -> float:
        """The largest number; NaN for choices."""
        return float(self._range.high) if self.is_number else math.nan

    @property
    def whole(self) -> bool:
        """Whether its numbers are whole."""
        return self.is_number and isinstance(self._range.low, int)

    @property
    def _range(self) -> FloatDistribution | IntDistribution:
        return cast("FloatDistribution | IntDistribution", self.distribution)

    @cached_property
    def space(self) -> Space | None:
        """The coordinate in which the search takes steps; None for choices."""
        if not self.is_number:
            return None
        step = 1.0 if self.whole else 0.0
        return SPACES[self.kind].across(self.low, self.high, step, self.scale)

    @cached_property
    def _dimension(self) -> Dimension:
        from noisescale.lab.tune.carbs.dimensions import Dimension

        return Dimension(self.name, self.distribution, self.space)

    @property
    def middle(self) -> Value:
        """The middle of its space."""
        if not self.is_number:
            return self.choices[0]
        return self.nearest(self._dimension.from_basic(self._dimension.middle))

    def nearest(self, value: Any) -> Value:
        """Return its value that is nearest to another one. Numbers have six digits.

        Examples:
            >>> range_parameter("batch_size", 16, 512).nearest(100)
            128
        """
        if not self.is_number:
            return self.choices[self.choices.index(value)]
        inside = np.clip(float(value), self.low, self.high)
        found = float(self._dimension.nearest(inside))
        return int(found) if self.whole else min(max(_short(found), self.low), self.high)

    def has(self, value: Any) -> bool:
        """Return whether a value is one of the parameter's values."""
        if not self.is_number:
            return value in self.choices
        return is_real(value) and self.low <= value <= self.high

    def with_center(self, own: Any) -> Parameter:
        """Return the parameter with a centre: the one it has, else the nearest one to `own`."""
        if self.center is not None:
            return self
        known = own in self.choices or (self.is_number and is_real(own) and math.isfinite(own))
        return replace(self, center=self.nearest(own) if known else self.middle)

    def at(self, share: float) -> float:
        """Return the number at a share of its range, from 0 to 1, to six digits.

        Examples:
            >>> range_parameter("momentum", 0.9, 0.999, "momentum").at(0.5)
            0.99
        """
        assert self.space is not None
        low, high = self.space.to_basic([self.low, self.high])
        return _short(float(self.space.from_basic(low + share * (high - low))))

    def around(self, value: float, share: float) -> Parameter:
        """Return the range around a value, to a share of this range on either side."""
        assert self.space is not None
        at, low, high = self.space.to_basic([value, self.low, self.high])
        ends = self.space.from_basic(at + share * (high - low) * np.array([-1, 1]))
        return range_parameter(self.name, float(ends[0]), float(ends[1]), self.kind)

    def text(self) -> str:
        """Return its values for messages.

        Examples:
            >>> range_parameter("width", 16, 512).text()
            '16 to 512'
        """
        if not self.is_number:
            return ", ".join(map(str, self.choices))
        return f"{self.low:g} to {self.high:g}"

    def as_dict(self) -> dict[str, Any]:
        """Return the parameter as JSON can hold it."""
        return {
            **{name: getattr(self, name) for name in ("name", "kind", "whole", "center", "scale")},
            "low": self.low if self.is_number else None,
            "high": self.high if self.is_number else None,
            "choices": self.choices,
        }

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> Parameter:
        """Return what `as_dict` was called on."""
        fields = dict(read)
        choices = fields.pop("choices")
        if fields["kind"] != CHOICE:
            return range_parameter(**fields)
        return choice_parameter(fields["name"], choices, fields["center"], fields["scale"])


def choice_parameter(
    name: str, choices: Sequence[Value], center: Value | None = None, scale: float = 1.0
) -> Parameter:
    """Return the parameter of choices."""
    from optuna.distributions import CategoricalDistribution

    if name in FITTED or len(set(choices)) < 2:
        refuse(
            "search",
            f"have a range for {name}"
            if name in FITTED
            else f"have two choices or more for {name}",
            repr(list(choices)),
            "Write, for example, optimizer=sgd,adam or learning_rate=0.001..1.",
        )
    return Parameter(name, CHOICE, CategoricalDistribution(tuple(choices)), center, scale)


def range_parameter(
    name: str,
    low: float,
    high: float,
    kind: str | None = None,
    *,
    whole: bool = False,
    center: Value | None = None,
    scale: float = 1.0,
) -> Parameter:
    """Return the parameter of a range, with the kind of space that suits it.

    Batch sizes are powers of two if both ends are. A range of positive numbers over a factor of 10
    or more is searched in logarithms, a momentum by its odds, others as they are.

    Args:
        name: Of the parameter.
        low: The smallest value.
        high: The largest value.
        kind: One of the kinds, or "int" for whole numbers; None for the one that suits.
        whole: Whether the ends were written as whole numbers.
        center: Where the search begins.
        scale: See `Parameter`.

    Raises:
        ValueError: If the kind is unknown, or its space does not have the range.
    """
    from optuna.distributions import FloatDistribution, IntDistribution

    whole = (whole and name not in _REAL) or name in _WHOLE or kind in ("int", POW2)
    if kind in (None, "int"):
        powers = all(end >= 1 and math.log2(end).is_integer() for end in (low, high))
        if name == BATCH_SIZE and powers and kind is None:
            kind = POW2
        elif name == MOMENTUM and 0 < low < high < 1:
            kind = LOGIT  # it averages over 1/(1 - momentum) steps
        else:
            kind = LOG if low > 0 and high / low >= 10 else LINEAR
    _check_range(name, str(kind), low, high, whole=whole)
    log = kind in (LOG, POW2)
    values = (
        IntDistribution(int(low), int(high), log=log)
        if whole
        else FloatDistribution(float(low), float(high), log=log)
    )
    return Parameter(name, str(kind), values, center, scale)


def _check_range(name: str, kind: str, low: float, high: float, *, whole: bool) -> None:
    if kind not in SPACES:
        refuse(
            "search",
            f"have one of the kinds {', '.join(SPACES)} or int for {name}",
            repr(kind),
            f"Write, for example, {name}=0.001..1:log.",
        )
    within = kind in (LOGIT, MOMENTUM)
    positive = kind in (LOG, POW2) or name in (*_WHOLE, EPOCHS, LEARNING_RATE)
    least = 0.0 if positive or within else -math.inf
    fine = least < low < high < (1.0 if within else math.inf)
    if not fine and not (kind == MOMENTUM and low == 0 < high < 1):
        of = "within 0 to 1" if within else "of positive numbers" if positive else ""
        refuse(
            "search",
            f"have a {kind} range {of or 'of finite numbers'}, the smaller one first, for {name}",
            f"{low} to {high}",
            "Give another range, or another kind: linear takes all numbers.",
        )
    powers = low >= 1 and all(math.log2(end).is_integer() for end in (low, high))
    if kind == POW2 and not powers:
        refuse(
            "search",
            f"have powers of two as ends of {name}",
            f"{low:g} to {high:g}",
            f"Write, for example, {name}=16..1024, or add :log.",
        )
    if whole and not (float(low).is_integer() and float(high).is_integer()):
        refuse(
            "search",
            f"have whole numbers as ends of {name}",
            f"{low:g} to {high:g}",
            "Round them.",
        )


def points(parameters: Sequence[Parameter], count: int, seed: int) -> list[Mapping[str, float]]:
    """Return quasi-random points: the first ones of a scrambled Halton sequence.

    References:
        Bousquet et al. 2017, arXiv:1706.03200, who recommend them for the search of
        hyperparameters.
    """
    from scipy.stats.qmc import Halton

    # SciPy before 1.15 does not know `rng`, and the same number as `rng` gives other points.
    shares = Halton(len(parameters), seed=seed).random(count)
    return [{p.name: p.at(x) for p, x in zip(parameters, row, strict=True)} for row in shares]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
