# SPDX-License-Identifier: Apache-2.0
"""The trials of a study as points in basic coordinates: observed, failed and running."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from noisescale.checks import refuse
from noisescale.lab.tune.carbs.dimensions import Dimension
from noisescale.lab.tune.carbs.spaces import Array
from noisescale.lab.tune.carbs.trials import (
    CURVE,
    cost_of,
    curve_of,
    is_failure,
    is_success,
    is_unrelated,
    state_of,
)

SUGGESTED = "carbs:suggested"
"""System attribute of a trial: parameters that were suggested but not yet asked for."""

CURVE_POINTS = 5
"""The points that are taken from a curve, evenly in log cost. Neighbours say the same twice."""

Key = tuple[float, ...]
"""A point, rounded: equal for the same parameters."""


@dataclass(frozen=True)
class Observations:
    """What the trials of a study say.

    Points are rows of basic coordinates.
    """

    points: Array
    """The points of successes, and points on curves."""
    costs: Array
    outputs: Array
    """Larger is better."""
    whole: tuple[bool, ...]
    """False for a point on a curve."""
    failures: Array
    running: Array
    retries: Array
    """Where a trial ended for another reason than its parameters, and none was begun since."""

    @property
    def successes(self) -> int:
        """Number of trials that succeeded."""
        return sum(self.whole)


def observe(
    trials: Sequence[FrozenTrial],
    dimensions: Sequence[Dimension],
    *,
    sign: int,
    cost: str,
    length: str | None,
    before: int,
    attempts: int,
) -> Observations:
    """Read the trials of a study.

    Args:
        trials: All of them.
        dimensions: Of the search. Trials without one of these parameters are left out.
        sign: 1 if larger values are better, -1 if smaller ones are.
        cost: Name of the user attribute with the cost.
        length: Name of the parameter that says how long a run is.
        before: Number of the trial that is about to be suggested.
        attempts: A trial that ends for another reason than its parameters is repeated until it
            was tried so often.
    """
    points: list[Array] = []
    costs: list[float] = []
    outputs: list[float] = []
    whole: list[bool] = []
    failures, running = [], []
    tries: dict[Key, list[bool]] = {}
    at: dict[Key, Array] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        params = params_of(trial)
        if trial.number == before or any(d.name not in params for d in dimensions):
            continue
        point = point_of(params, dimensions, trial.number)
        key = key_of(point)
        at[key] = point
        if state_of(trial) != "WAITING":
            tries.setdefault(key, []).append(is_unrelated(trial))
        if state_of(trial) == "RUNNING":
            running.append(point)
        elif is_success(trial):
            points.append(point)
            costs.append(cost_of(trial, cost))
            assert trial.value is not None
            outputs.append(sign * trial.value)
            whole.append(True)
        elif is_failure(trial):
            failures.append(point)
        if trial.state.is_finished() and not is_unrelated(trial):
            for shorter, spent, value in _on_the_way(trial, params, cost, length):
                points.append(point_of(shorter, dimensions, trial.number))
                costs.append(spent)
                outputs.append(sign * value)
                whole.append(False)
    again = [
        at[key]
        for key, ended in tries.items()
        if ended[-1] and len(ended) < attempts and all(ended)
    ]
    width = sum(dimension.width for dimension in dimensions)

    def rows(found: list[Array]) -> Array:
        return np.array(found, np.float64).reshape(-1, width)

    return Observations(
        rows(points),
        np.array(costs),
        np.array(outputs),
        tuple(whole),
        rows(failures),
        rows(running),
        rows(again),
    )


def params_of(trial: FrozenTrial) -> dict[str, Any]:
    """Return the parameters of a trial, including parameters that it has not yet asked for."""
    if trial.state.is_finished() or SUGGESTED not in trial.system_attrs:
        return trial.params
    return {**json.loads(trial.system_attrs[SUGGESTED]), **trial.params}


def point_of(params: dict[str, Any], dimensions: Sequence[Dimension], number: int) -> Array:
    """Return the coordinates of parameters.

    Raises:
        ValueError: If a parameter has none, as a negative one has none in a `LogSpace`.
    """
    parts = []
    for dimension in dimensions:
        part = dimension.to_basic([params[dimension.name]])[0]
        if not np.isfinite(part).all():
            space = dimension.space
            refuse(
                "spaces",
                f"have a space for {dimension.name!r} that contains its value in each trial",
                f"{params[dimension.name]!r} in trial {number} for a {type(space).__name__}",
                "Pass another space, or begin a new study.",
            )
        parts.append(part)
    return np.concatenate(parts)


def key_of(point: Array) -> Key:
    """Return what is equal for equal parameters."""
    return tuple(np.round(point, 9).tolist())


def _on_the_way(
    trial: FrozenTrial, params: dict[str, Any], cost: str, length: str | None
) -> list[tuple[dict[str, Any], float, float]]:
    """Return parameters, cost and value of shorter runs that a trial has been on its way.

    A point without a length, at a share s of the trial's cost, counts as a run of s times the
    trial's length. Of a run that was stopped early nobody knows the whole cost, so its points need
    lengths.
    """
    curve = curve_of(trial)
    if not curve:
        return []
    if length is None or length not in params:
        refuse(
            "length",
            "name the parameter that says how long a run is, where trials have a curve",
            f"{length!r} in trial {trial.number}",
            f'Pass, for example, `length="steps"`, or set no user attribute "{CURVE}".',
        )
    whole = cost_of(trial, cost) if is_success(trial) else None
    shorter = []
    for spent, value, at in curve:
        if at is None and whole is not None:
            at = params[length] * spent / whole
        if at is not None and at < params[length] * (1 - 1e-9):
            shorter.append(({**params, length: at}, spent, value))
    if len(shorter) <= CURVE_POINTS:
        return shorter
    costs = np.log([spent for _, spent, _ in shorter])
    wanted = np.linspace(costs[0], costs[-1], CURVE_POINTS)
    return [shorter[i] for i in sorted({int(np.abs(costs - one).argmin()) for one in wanted})]
