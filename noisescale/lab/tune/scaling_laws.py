# SPDX-License-Identifier: Apache-2.0
"""How a parameter grows with the cost along a front: a power law, and how sure its power is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import linregress, t

LEAST = 4
"""Points of a front that a power needs: fewer leave one degree of freedom, or none."""


@dataclass(frozen=True)
class PowerLaw:
    """value = exp(intercept)·cost^power, fitted to logarithms, with a 95 % interval of the power.

    The interval is Student's, for points whose logarithms scatter around the line alike. The points
    of a front were chosen for their results, which hold luck, too: so it is no less than this wide.
    """

    power: float
    low: float
    high: float
    intercept: float
    points: int
    center: float
    """The mean logarithm of the costs."""
    spread: float
    """The sum of squares of the logarithms of the costs around their mean."""
    scatter: float
    """Standard deviation of the logarithms of values around the line."""

    @property
    def resolved(self) -> bool:
        """Whether the interval says that the parameter grows with the cost, or that it falls."""
        return self.low > 0 or self.high < 0

    def value_at(self, cost: float) -> tuple[float, float, float]:
        """Return the value at a cost, and a 95 % interval of the line there."""
        x = math.log(cost)
        middle = self.intercept + self.power * x
        away = (x - self.center) ** 2 / self.spread
        width = _student(self.points) * self.scatter * math.sqrt(1 / self.points + away)
        low, high = middle - width, middle + width
        return math.exp(middle), math.exp(max(low, -700.0)), math.exp(min(high, 700.0))


def power_law(costs: Sequence[float], values: Sequence[float]) -> PowerLaw | None:
    """Fit the power with which values grow with costs, by ordinary least squares on logarithms.

    Args:
        costs: Positive numbers.
        values: Positive numbers, one for each cost.

    Returns:
        The law; None for fewer than four points, values that are not positive, or where costs or
        values are all the same.

    Examples:
        >>> law = power_law([1, 10, 100, 1000], [2, 6.5, 19, 64])
        >>> f"{law.power:.2f} ({law.low:.2f} to {law.high:.2f})"
        '0.50 (0.46 to 0.53)'
    """
    if len(costs) < LEAST or not min(values) > 0 or not min(costs) > 0:
        return None
    x, y = np.log(np.asarray(costs, np.float64)), np.log(np.asarray(values, np.float64))
    spread = float(((x - x.mean()) ** 2).sum())
    if spread < 1e-12 or np.ptp(y) < 1e-12:
        return None
    fit = linregress(x, y)
    width = _student(len(x)) * float(fit.stderr)
    power, intercept = float(fit.slope), float(fit.intercept)
    errors = y - intercept - power * x
    scatter = math.sqrt(float((errors**2).sum()) / (len(x) - 2))
    return PowerLaw(
        power,
        power - width,
        power + width,
        intercept,
        len(x),
        float(x.mean()),
        spread,
        scatter,
    )


def _student(points: int) -> float:
    return float(t.ppf(0.975, points - 2))
