# SPDX-License-Identifier: Apache-2.0
"""The Pareto set of a study: what performed best at its cost."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from noisescale.checks import refuse, require_choice
from noisescale.lab.tune.carbs.trials import cost_of, is_success, one_direction

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

CHEAPEST = 0.2
"""The first member is the best one among this share of the observations, by cost."""


@dataclass(frozen=True)
class Group:
    """Observations at the same parameters."""

    key: Hashable
    costs: tuple[float, ...]
    outputs: tuple[float, ...]
    """Larger is better."""

    @property
    def cost(self) -> float:
        """The mean over the observations."""
        return math.fsum(self.costs) / len(self.costs)

    @property
    def output(self) -> float:
        """The mean over the observations."""
        return math.fsum(self.outputs) / len(self.outputs)


@dataclass(frozen=True)
class ParetoPoint:
    """A member of the Pareto set of a study."""

    params: dict[str, Any]
    cost: float
    """Mean over the trials."""
    value: float
    """Mean over the trials, as the study has it."""
    trials: tuple[int, ...]
    """Numbers of the trials with these parameters."""


def group_by_key(
    keys: Iterable[Hashable], costs: Sequence[float], outputs: Sequence[float]
) -> list[Group]:
    """Return a group for each key, in the order in which the keys first come."""
    rows: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return [
        Group(key, tuple(costs[i] for i in at), tuple(outputs[i] for i in at))
        for key, at in rows.items()
    ]


def front_of(
    groups: Sequence[Group], *, conservative: bool = True, cheapest: float = CHEAPEST
) -> list[Group]:
    """Return the groups of the Pareto set, by rising cost.

    The first is the best among the cheapest 20 % of the observations. Each further one, by rising
    cost, is better than the last one accepted. In the conservative set several observations count
    for more than one: the first is one that was repeated, if the cheapest have any, and a group of
    one observation must be better than all observations of the last group accepted. So luck alone
    does not move the set.

    Args:
        groups: The observations; none gives an empty set.
        conservative: Whether to return the conservative set.
        cheapest: The share of the observations that the first member is the best of. At 0 the first
            member is the cheapest one.

    Examples:
        Four groups at costs of 1, 2, 3 and 4. The second is better than the mean of the first, but
        not than its better observation.

        >>> groups = [
        ...     Group("A", (1, 1), (0, 1)),
        ...     Group("B", (2,), (0.6,)),
        ...     Group("C", (3, 3), (0.55, 0.75)),
        ...     Group("D", (4,), (0.8,)),
        ... ]
        >>> [group.key for group in front_of(groups)]
        ['A', 'C', 'D']
        >>> [group.key for group in front_of(groups, conservative=False)]
        ['A', 'B', 'C', 'D']

    References:
        Fetterman et al. 2023, arXiv:2306.08055, section 3.
    """
    if not groups:
        return []
    limit = np.quantile([cost for group in groups for cost in group.costs], cheapest)
    # A group's mean may lie above the costs that it has below the limit.
    limit = max(float(limit), min(group.cost for group in groups))
    cheap = [group for group in groups if group.cost <= limit]
    repeated = [group for group in cheap if len(group.outputs) > 1]
    best = max(repeated if conservative and repeated else cheap, key=lambda group: group.output)
    front = [best]
    for group in sorted((g for g in groups if g.cost > limit), key=lambda group: group.cost):
        alone = conservative and len(group.outputs) == 1
        if group.output > (max(front[-1].outputs) if alone else front[-1].output):
            front.append(group)
    return front


def pareto_front(
    study_or_trials: Study | Iterable[FrozenTrial],
    *,
    conservative: bool = True,
    cost: str = "cost",
    direction: str | None = None,
) -> list[ParetoPoint]:
    """Return the Pareto set of a study: the best parameters at each cost, by rising cost.

    Trials with the same parameters are one point. See `front_of` for what a member is.

    Args:
        study_or_trials: A study of Optuna with one objective, or its trials.
        conservative: Whether a point of a single trial must be better than each trial of the last
            point. It guards against noise.
        cost: Name of the user attribute with the cost of a trial. A trial without it costs its
            duration in seconds.
        direction: "minimize" or "maximize". Needed with trials alone.

    Returns:
        The points. Trials that failed, were pruned or have no finite value are left out; if no
        trial is left, there are none.

    Raises:
        ValueError: If a trial has no cost, or the direction is not known or contradicts the
            study's.
    """
    study: Any = study_or_trials
    if hasattr(study, "directions"):
        of_study = one_direction(study)
        if direction not in (None, of_study):
            refuse("direction", f'be the study\'s, "{of_study}", or left out', repr(direction))
        direction, trials = of_study, study.get_trials(deepcopy=False)
    else:
        remedy = "Pass the direction in which the trials were optimized."
        require_choice("direction", direction, ["minimize", "maximize"], remedy)
        trials = list(study)
    sign = 1 if direction == "maximize" else -1
    done: list[Any] = [trial for trial in trials if is_success(trial)]
    keys: list[Hashable] = [tuple(sorted((k, repr(v)) for k, v in t.params.items())) for t in done]
    costs = [cost_of(trial, cost) for trial in done]
    numbers: dict[Hashable, list[int]] = {}
    for key, trial in zip(keys, done, strict=True):
        numbers.setdefault(key, []).append(trial.number)
    params = dict(zip(keys, (trial.params for trial in done), strict=True))
    front = front_of(
        group_by_key(keys, costs, [sign * trial.value for trial in done]),
        conservative=conservative,
    )
    return [
        ParetoPoint(
            dict(params[group.key]), group.cost, sign * group.output, tuple(numbers[group.key])
        )
        for group in front
    ]
