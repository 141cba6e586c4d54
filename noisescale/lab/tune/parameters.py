# SPDX-License-Identifier: Apache-2.0
"""A parameter that is searched: its range, the kind of its space, and where the search begins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from noisescale.checks import checked_positive, is_real, refuse
from noisescale.lab.sweep.space import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY
from noisescale.printable import printable

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from noisescale.lab.tune.carbs.spaces import Space

LOG, LINEAR, LOGIT, POW2, CHOICE = "log", "linear", "logit", "pow2", "choice"
NUMERIC = (LOG, LINEAR, LOGIT, POW2)
"""Kinds of spaces of numbers."""

BATCH_SIZE, EPOCHS, STEPS = "batch_size", "epochs", "steps"
FITTED = (LEARNING_RATE, BATCH_SIZE, WEIGHT_DECAY, MOMENTUM, EPOCHS, STEPS)
"""Parameters of the training. All others are arguments of the function that makes the module."""

_WHOLE = (BATCH_SIZE, STEPS)
_REAL = (LEARNING_RATE, WEIGHT_DECAY, MOMENTUM, EPOCHS)

Value = float | int | str | bool


@dataclass(frozen=True)
class Parameter:
    """A parameter, and the values that it may take.

    Examples:
        >>> Parameter("width", "log", 16, 512, whole=True).middle
        91
    """

    name: str
    kind: str
    low: float = math.nan
    high: float = math.nan
    choices: tuple[Value, ...] = ()
    whole: bool = False
    center: Value | None = None
    """Where the search begins; None before it is known."""
    scale: float = 1.0
    """How far the search looks around a good value, relative to the usual distance."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.kind == CHOICE:
            if len(set(self.choices)) < 2 or self.name in FITTED:
                refuse(
                    "search",
                    f"have two choices or more for {printable(self.name)}"
                    if self.name not in FITTED
                    else f"have a range for {self.name}",
                    repr(list(self.choices)),
                    "Write, for example, optimizer=sgd,adam or learning_rate=0.001..1.",
                )
        else:
            self._check_range()
        checked_positive("scale", self.scale, f"Leave the scale of {printable(self.name)} out.")
        if self.center is not None and not self.has(self.center):
            refuse(
                "center",
                f"be among the values of {printable(self.name)}, {self.text()}",
                printable(repr(self.center)),
                "Give another one, or another range.",
            )

    def _check_range(self) -> None:
        if self.kind not in NUMERIC:
            refuse(
                "search",
                f"have one of the kinds {', '.join(NUMERIC)} or int for {printable(self.name)}",
                printable(repr(self.kind)),
                f"Write, for example, {printable(self.name)}=0.001..1:log.",
            )
        fine = is_real(self.low) and is_real(self.high) and -math.inf < self.low < self.high
        positive = self.kind in (LOG, POW2) or self.name in (*_WHOLE, EPOCHS, LEARNING_RATE)
        least = 0.0 if positive or self.kind == LOGIT else -math.inf
        most = 1.0 if self.kind == LOGIT else math.inf
        if not (fine and least < self.low and self.high < most):
            of = {0.0: "of positive numbers", -math.inf: "of finite numbers"}[least]
            of = "within 0 to 1" if self.kind == LOGIT else of
            refuse(
                "search",
                f"have a {self.kind} range {of}, the smaller one first, for {printable(self.name)}",
                f"{self.low} to {self.high}",
                "Give another range, or another kind: linear takes all numbers.",
            )
        if self.kind == POW2:
            ends = self.low, self.high
            if any(end < 1 or not (math.log2(end)).is_integer() for end in ends):
                refuse(
                    "search",
                    f"have powers of two as ends of {printable(self.name)}",
                    f"{self.low:g} to {self.high:g}",
                    f"Write, for example, {printable(self.name)}=16..1024, or add :log.",
                )
        elif self.whole and any(not float(end).is_integer() for end in (self.low, self.high)):
            refuse(
                "search",
                f"have whole numbers as ends of {printable(self.name)}",
                f"{self.low:g} to {self.high:g}",
                "Round them.",
            )

    @property
    def is_number(self) -> bool:
        """Whether it is a number, and no choice."""
        return self.kind != CHOICE

    @property
    def middle(self) -> Value:
        """The middle of its space."""
        if not self.is_number:
            return self.choices[0]
        low, high = self.low, self.high
        if self.kind in (LOG, POW2):
            return self.nearest(math.sqrt(low * high))
        if self.kind == LOGIT:
            odds = math.sqrt(low / (1 - low) * high / (1 - high))
            return self.nearest(odds / (1 + odds))
        return self.nearest((low + high) / 2)

    def nearest(self, value: Any) -> Value:
        """Return its value that is nearest to another one. Numbers have six digits.

        Examples:
            >>> Parameter("batch_size", "pow2", 16, 512, whole=True).nearest(100)
            128
        """
        if self.kind == CHOICE:
            return self.choices[self.choices.index(value)]
        found = min(max(float(value), self.low), self.high)
        if self.kind == POW2:
            return int(2 ** round(math.log2(found)))
        if self.whole:
            return round(found)
        return min(max(float(f"{found:.6g}"), self.low), self.high)

    def has(self, value: Any) -> bool:
        """Whether a value is among its own."""
        if self.kind == CHOICE:
            return value in self.choices
        return is_real(value) and self.low <= value <= self.high

    def beginning_at(self, own: Any) -> Parameter:
        """Return the parameter with a centre: the one it has, else the nearest one to `own`."""
        if self.center is not None:
            return self
        if self.kind == CHOICE:
            return replace(self, center=own if own in self.choices else self.middle)
        if not is_real(own) or not math.isfinite(own):
            return replace(self, center=self.middle)
        return replace(self, center=self.nearest(own))

    def distribution(self) -> BaseDistribution:
        """Return the space as samplers of Optuna take it."""
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        if self.kind == CHOICE:
            return CategoricalDistribution(self.choices)
        log = self.kind in (LOG, POW2)
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=log)
        return FloatDistribution(self.low, self.high, log=log)

    def space(self) -> Space | None:
        """Return what the sampler has to know beyond the distribution; None for nothing."""
        from noisescale.lab.tune.carbs.spaces import (
            LinearSpace,
            LogitSpace,
            LogSpace,
            PowerOfTwoSpace,
        )

        if self.kind == CHOICE or (self.kind not in (POW2, LOGIT) and self.scale == 1.0):
            return None
        kind: type[Space] = LinearSpace
        width = self.high - self.low
        if self.kind in (LOG, POW2):
            kind = PowerOfTwoSpace if self.kind == POW2 else LogSpace
            width = math.log10(self.high / self.low)
        elif self.kind == LOGIT:
            kind = LogitSpace
            width = math.log10(self.high / (1 - self.high)) - math.log10(self.low / (1 - self.low))
        usual = width / 2 if self.kind == LINEAR else min(1.0, width / 2)
        return kind(self.low, self.high, self.scale * usual, self.whole)

    def text(self) -> str:
        """Return its values for messages.

        Examples:
            >>> Parameter("width", "log", 16, 512).text()
            '16 to 512'
        """
        if self.kind == CHOICE:
            return ", ".join(map(str, self.choices))
        return f"{self.low:g} to {self.high:g}"

    def as_dict(self) -> dict[str, Any]:
        """Return the parameter as JSON can hold it."""
        found = asdict(self)
        return {k: None if v != v else v for k, v in found.items()}

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> Parameter:
        """Return what `as_dict` was called on."""
        ends = {k: math.nan if read[k] is None else read[k] for k in ("low", "high")}
        return cls(**{**read, **ends, "choices": tuple(read["choices"])})


def made_parameter(
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
    """
    whole = (whole and name not in _REAL) or name in _WHOLE or kind in ("int", POW2)
    if kind in (None, "int"):
        powers = all(end >= 1 and math.log2(end).is_integer() for end in (low, high))
        if name == BATCH_SIZE and powers and kind is None:
            kind = POW2
        elif name == MOMENTUM and 0 < low < high < 1:
            kind = LOGIT  # it averages over 1/(1 - momentum) steps
        else:
            kind = LOG if low > 0 and high / low >= 10 else LINEAR
    return Parameter(name, str(kind), low, high, (), whole, center, scale)
