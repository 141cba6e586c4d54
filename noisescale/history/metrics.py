# SPDX-License-Identifier: Apache-2.0
"""Any metric of a logged run, by optimizer steps, and when it reached a goal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Goal:
    """A metric's value to be reached, from above or from below.

    Example:
        >>> Goal.read("val_loss=0.25")
        Goal(metric='val_loss', value=0.25)
    """

    metric: str
    value: float

    @classmethod
    def read(cls, text: str) -> Goal:
        """Read "metric=value".

        Raises:
            ValueError: If it is not of that form.
        """
        metric, _, value = text.rpartition("=")
        metric = metric.rstrip("<>")  # where the run begins tells the side
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (metric.strip() and math.isfinite(number)):
            raise ValueError(
                f"`goal` must be a metric's name and its value, got {text!r}."
                " Write for instance `val_loss=0.25`."
            )
        return cls(metric.strip(), number)

    def __str__(self) -> str:
        return f"{self.metric} = {self.value:g}"

    def reached_at(self, steps: Array, values: Array) -> float | None:
        """Return the step at which a metric reached the goal for good; None if it never did.

        Single values are noisy: those that would let the metric come back are averaged, by
        isotonic regression, which has no width to choose. Between two steps the metric is taken
        to be linear.

        Args:
            steps: That it was logged at, rising.
            values: Of the metric. Where they begin tells the side from which the goal is reached.
        """
        sign = 1.0 if values[0] >= self.value else -1.0
        course = -_rising(-sign * values)
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
