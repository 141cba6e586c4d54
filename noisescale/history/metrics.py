# SPDX-License-Identifier: Apache-2.0
"""Any metric of a logged run, by optimizer steps, and when it reached a goal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float64]


_WRITTEN = re.compile(r"\s*(.*?)\s*([<>]?=|[<>])\s*([^=<>]+)")


@dataclass(frozen=True)
class Goal:
    """A metric's value to be reached, from above or from below.

    Example:
        >>> Goal.read("val_loss=0.25"), Goal.read("accuracy>=0.9")
        (Goal(metric='val_loss', value=0.25, side=''), Goal(metric='accuracy', value=0.9, side='>'))
    """

    metric: str
    value: float
    side: str = ""
    """"<" if it is to fall to the value, ">" if it is to rise; "": away from where it begins."""

    @classmethod
    def read(cls, text: str) -> Goal:
        """Read "metric=value", or with "<=" or ">=".

        Raises:
            ValueError: If it is not of that form.
        """
        found = _WRITTEN.fullmatch(text)
        metric, sign, value = found.groups() if found else ("", "", "")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (metric and math.isfinite(number)):
            raise ValueError(
                f"`goal` must be a metric's name and its value, got {text!r}."
                " Write for instance `val_loss=0.25`."
            )
        return cls(metric, number, sign.strip("="))

    def __str__(self) -> str:
        return f"{self.metric} {self.side}= {self.value:g}"

    def from_where(self, values: Array) -> Goal:
        """Return the goal with the side from which a metric of these values is to reach it."""
        return replace(self, side=self.side or ("<" if values[0] >= self.value else ">"))

    def past(self, value: float) -> bool:
        """Whether a value is beyond the goal, where its side is known."""
        return value < self.value if self.side == "<" else value > self.value

    def reached_at(self, steps: Array, values: Array) -> float | None:
        """Return the step at which a metric reached the goal for good; None if it never did.

        Single values are noisy: those that would let the metric come back are averaged, by
        isotonic regression, which has no width to choose. Between two steps the metric is taken
        to be linear. What comes after the best of its running medians of three does not count: a
        validation loss that rises again had been reached.

        Args:
            steps: That it was logged at, rising.
            values: Of the metric. Where they begin tells the side, if the goal does not.
        """
        sign = 1.0 if self.from_where(values).side == "<" else -1.0
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
    """The rising course that is nearest to values: pools of adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] >= mean:
            before, many = pools.pop()
            mean, size = (before * many + mean * size) / (many + size), many + size
        pools.append((mean, size))
    means, sizes = zip(*pools, strict=True)
    return np.repeat(np.array(means), sizes)
