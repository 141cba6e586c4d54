# SPDX-License-Identifier: Apache-2.0
"""When a metric of a logged run reached a goal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from noisescale.refusal import Refusal

Array = NDArray[np.float64]


_WRITTEN = re.compile(r"\s*(.*?)\s*([<>]?=|[<>])\s*([^=<>]+)")


_ROUNDING = 2.0**-24
"""The relative error of a number that was rounded to single precision."""


@dataclass(frozen=True)
class Goal:
    """A value that a metric is to reach, from above or from below.

    Examples:
        >>> print(Goal.read("val_loss=0.25"), Goal.read("accuracy>0.9"), sep=", ")
        val_loss = 0.25, accuracy > 0.9
    """

    metric: str
    value: float
    side: str = ""
    """"<" if the metric falls to the value, ">" if it rises; "" if its first value decides."""
    strict: bool = False
    """Whether the value itself does not reach the goal, as with "<" and ">"."""

    @classmethod
    def read(cls, text: str) -> Goal:
        """Read "metric=value", "metric<=value", "metric>=value", or one with "<" or ">".

        Raises:
            ValueError: If the text has another form.
        """
        found = _WRITTEN.fullmatch(text)
        metric, sign, value = found.groups() if found else ("", "", "")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (metric and math.isfinite(number)):
            raise Refusal(
                "goal",
                "be a metric's name and its value",
                repr(text),
                "Write, for example, `val_loss=0.25`.",
            )
        return cls(metric, number, sign.strip("="), strict="=" not in sign)

    def __str__(self) -> str:
        return f"{self.metric} {self.side}{'' if self.strict else '='} {self.value:g}"

    def with_side(self, values: Array) -> Goal:
        """Return the goal with its side. The first of the metric's values decides, if needed."""
        return replace(self, side=self.side or ("<" if values[0] >= self.value else ">"))

    def is_past(self, value: float) -> bool:
        """Return whether a value is beyond the goal. The goal's side must be known."""
        return value < self.value if self.side == "<" else value > self.value

    def is_reached_by(self, values: Array) -> NDArray[np.bool_]:
        """Return which values reach the goal, each on its own. The goal's side must be known.

        Values that are not finite do not. Loggers store numbers with 24 bits: a value that is the
        goal's to this precision is equal to the goal.
        """
        ahead = self.value - values if self.side == "<" else values - self.value
        equal = np.abs(ahead) <= _ROUNDING * abs(self.value)
        return np.asarray(
            np.isfinite(values) & ((ahead > 0) & ~equal if self.strict else (ahead > 0) | equal)
        )

    def first_step(self, steps: Array, values: Array) -> float | None:
        """Return the step at which a metric reached the goal for good; None if it never did.

        Single values are noisy. Isotonic regression averages the values that would let the metric
        move back; it has no window to choose. Between two steps the metric is assumed to be linear.
        Values after the best running median of three do not count: a validation loss that rises
        again has still reached the goal.

        Args:
            steps: The steps at which the metric was logged, in rising order.
            values: The values of the metric. The first value decides the side, if the goal has
                none.
        """
        sign = 1.0 if self.with_side(values).side == "<" else -1.0
        middle = np.median(sliding_window_view(np.pad(sign * values, 1, mode="edge"), 3), axis=1)
        last = len(middle) - int(np.argmin(middle[::-1]))
        course = -_rising(-sign * values[: last + 1])
        where = int(np.argmax(course <= sign * self.value))
        if course[where] > sign * self.value:
            return None
        if where == 0:
            return float(steps[0])
        above, below = course[where - 1], course[where]
        share = (above - sign * self.value) / (above - below)
        return float(steps[where - 1] + share * (steps[where] - steps[where - 1]))


def _rising(values: Array) -> Array:
    """Return the nearest rising sequence to values, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] >= mean:
            before, many = pools.pop()
            mean, size = (before * many + mean * size) / (many + size), many + size
        pools.append((mean, size))
    means, sizes = zip(*pools, strict=True)
    return np.repeat(np.array(means), sizes)
