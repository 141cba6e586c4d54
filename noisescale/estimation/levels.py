# SPDX-License-Identifier: Apache-2.0
"""Two levels of noise: between groups of rows, and between the rows of one group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from noisescale.bounded import Bounded
from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.recent import RecentSteps
from noisescale.state import State


@dataclass(frozen=True)
class Levels:
    """The noise scale in two parts: between groups (prompts, images) and within (their rows).

    A step of P groups with n rows each has the noise scale b(n) = between + within/n, in groups.
    At another n the noise within goes as 1/n, or as 1/(n - 1) if advantages are centred.

    Examples:
        >>> one = NoiseScale(6.0, 4.0, 8.0, 0.1, 0.6, steps=200, unit="groups")
        >>> other = NoiseScale(240.0, 180.0, 300.0, 0.1, 24.0, steps=200, unit="rows")
        >>> levels = Levels(one, other, Bounded(40.0, 25.0, 70.0), groups=16.0, rows_per_group=8.0)
        >>> levels.noise_scale(8), levels.noise_scale(4), levels.noise_scale(4, centred=True)
        (36.0, 66.0, 76.0)
        >>> levels.share_within
        Bounded(value=0.833, low=0.758, high=0.897)
    """

    between: NoiseScale
    """The noise scale of the mean gradients of groups, in groups."""
    within: NoiseScale
    """The noise scale of the gradients of rows given their group, in rows."""
    balance: Bounded
    """`within` over `between`: the rows of a group at which both parts are equal.

    At equal rows a step, more rows of a group than this waste them: other groups tell more.
    """
    groups: float
    """P, the groups of a step; of unequal ones, those that would have as much noise."""
    rows_per_group: float
    """n."""
    still: float = 0.0
    """The share of groups whose rows have no gradient: those of one reward, for example."""

    def noise_scale(self, rows_per_group: float, *, centred: bool = False) -> float:
        """Return the noise scale in groups at n rows of each.

        Args:
            rows_per_group: n.
            centred: Whether rows have an advantage less the mean over their group, as in GRPO and
                RLOO. The mean has noise of its own, so that the noise within goes as 1/(n - 1).
        """
        times = rows_per_group / self.rows_per_group
        within = self.within.value / self.rows_per_group
        return self.between.value + within * self.remaining_noise(times, centred=centred)

    def remaining_noise(self, times: float, *, centred: bool = False) -> float:
        """Return the noise within at so many times the rows of a group, over that at n rows.

        It is infinite if advantages are centred and there would be one row.
        """
        if not centred:
            return 1 / times
        others = times * self.rows_per_group - 1
        return (self.rows_per_group - 1) / others if others > 0 else math.inf

    @property
    def bounds(self) -> dict[str, Bounded]:
        """`between`, `within` and `balance` with their bounds, by name."""
        parts = {"between": self.between, "within": self.within}
        found = {name: Bounded(of.value, of.low, of.high) for name, of in parts.items()}
        return {**found, "balance": self.balance}

    def columns(self) -> dict[str, float]:
        """Return the columns of a `History`."""
        found: dict[str, float] = {}
        for name, of in self.bounds.items():
            found |= {name: of.value, f"{name}_low": of.low, f"{name}_high": of.high}
        counts = {"groups": self.groups, "rows_per_group": self.rows_per_group}
        return found | counts | {"still": self.still}

    @classmethod
    def from_columns(cls, row: Mapping[str, float], confidence: float = 0.95) -> Levels | None:
        """Return what `columns` returned; None where nothing is known."""
        if math.isnan(row["groups"]):
            return None

        def bounds(name: str) -> tuple[float, float, float]:
            high = row[f"{name}_high"]
            return row[name], row[f"{name}_low"], math.inf if math.isnan(high) else high

        nan = math.nan
        parts = {"between": "groups", "within": "rows"}
        return cls(
            **{n: NoiseScale(*bounds(n), nan, nan, nan, confidence, u) for n, u in parts.items()},
            balance=Bounded(*bounds("balance")),
            groups=row["groups"],
            rows_per_group=row["rows_per_group"],
            still=row["still"],
        )

    @property
    def share_within(self) -> Bounded:
        """The share of a step's noise that more rows of each group would lessen."""
        low, value, high = (
            x / (x + self.rows_per_group) if math.isfinite(x) else 1.0 if x > 0 else x
            for x in (self.balance.low, self.balance.value, self.balance.high)
        )
        return Bounded(value, low, high)

    def best_rows_per_group(
        self, cost_per_group: float, cost_per_row: float, *, centred: bool = False
    ) -> Bounded:
        """Return the n of the least cost at equal noise, 1 at least.

        It is √(c_p·within/(c_g·between)) where rows are independent. Where they have an advantage
        less the mean over their group, it is 1 + √((c_p + c_g)·w/(c_g·between)) with w, the noise
        within times n - 1. Without a cost of groups this is the n of the least noise at as many
        rows a step.

        Args:
            cost_per_group: c_p, the cost of a group beside that of its rows, in any unit.
            cost_per_row: c_g, the cost of a row.
            centred: See `noise_scale`.
        """
        n, costs = self.rows_per_group, cost_per_group / cost_per_row
        ends = self.balance.value, self.balance.low, self.balance.high
        if centred:
            return Bounded(*(1 + math.sqrt((costs + 1) * x * (n - 1) / n) for x in ends))
        return Bounded(*(max(math.sqrt(costs * x), 1.0) for x in ends))


class LevelSteps(State):
    """Average the levels of the last measured steps, as `RecentSteps` does the noise scale.

    Args:
        window: See `NoiseScaleEstimator`.
        confidence: Coverage of the intervals.
    """

    _saved = ("_level", "_groups", "_rows", "_still", "_steps", "_between", "_within", "_balance")

    def __init__(self, window: int | Literal["auto"] = "auto", confidence: float = 0.95) -> None:
        self._level = Level()
        self._groups = self._rows = self._still = 0.0
        self._steps = 0
        self._between, self._within, self._balance = (
            RecentSteps(window, confidence, unit) for unit in ("groups", "rows", "rows")
        )

    def update(
        self,
        whole: GradientMoments,
        variance: float,
        noise_within: float,
        shares: tuple[float, float, float],
        weight: float,
        step: int,
        learning_rate: float = math.nan,
    ) -> None:
        """Add one step. The first one only sets the level of |g|².

        Args:
            whole: The moments of the step.
            variance: Of the step's gradient.
            noise_within: The trace of the noise of a row given its group.
            shares: One over the rows of the step, one over its groups, and the share of groups
                without a gradient.
            weight: The global batch size of the step.
            step: Optimizer steps of the run up to this one.
            learning_rate: The step's; NaN if it is not known.
        """
        of_rows, of_groups, still = shares
        level = self._level.divisor(whole, weight)
        _, self._level = self._level.step(whole, weight)
        self._steps += 1
        share = max(1 / self._steps, 0.02)
        self._rows += share * (1 / of_rows - self._rows)
        self._groups += share * (1 / of_groups - self._groups)
        self._still += share * (still - self._still)
        if level is None:
            return
        within = noise_within / level
        between = (variance - noise_within * of_rows) / of_groups / level
        signal = whole.grad_sq_norm / level
        for steps, moments in (
            (self._between, GradientMoments(signal, between)),
            (self._within, GradientMoments(signal, within)),
            (self._balance, GradientMoments(between, within)),
        ):
            steps.add_relative(moments, weight, step, learning_rate=learning_rate)

    def estimate(self, step: int, learning_rate: float = math.nan) -> Levels | None:
        """Return the levels now; None before two measured steps.

        Args:
            step: Optimizer steps of the run up to now.
            learning_rate: That of now. If it has fallen, |G|² has, too, and both noise scales have
                wider intervals. Their balance does not depend on |G|².
        """
        if len(self._between) < 2:
            return None
        balance = self._balance.estimate(step)
        return Levels(
            self._between.estimate(step, learning_rate=learning_rate),
            self._within.estimate(step, learning_rate=learning_rate),
            Bounded(balance.value, balance.low, balance.high),
            self._groups,
            self._rows / self._groups,
            self._still,
        )
