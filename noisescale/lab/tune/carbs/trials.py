# SPDX-License-Identifier: Apache-2.0
"""What a search reads from one trial of Optuna: whether it succeeded, its cost, its curve."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from noisescale.checks import is_positive, is_real, refuse

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

UNRELATED = "unrelated_failure"
"""User attribute of a trial whose failure is not its parameters' fault."""

CURVE = "curve"
"""User attribute with points of a run on its way: [cost, value] or [cost, value, length] each."""


def state_of(trial: FrozenTrial) -> str:
    """Return "COMPLETE", "FAIL", "PRUNED", "RUNNING" or "WAITING"."""
    return str(trial.state.name)


def is_success(trial: FrozenTrial) -> bool:
    """Return whether the trial has completed with a finite value."""
    if state_of(trial) != "COMPLETE" or trial.user_attrs.get(UNRELATED):
        return False
    return trial.value is not None and math.isfinite(trial.value)


def is_failure(trial: FrozenTrial) -> bool:
    """Return whether the trial's parameters are to be avoided."""
    if trial.user_attrs.get(UNRELATED):
        return False
    return state_of(trial) in ("COMPLETE", "FAIL", "PRUNED") and not is_success(trial)


def is_unrelated(trial: FrozenTrial) -> bool:
    """Return whether the trial has ended in a way that says nothing about its parameters."""
    return trial.state.is_finished() and bool(trial.user_attrs.get(UNRELATED))


def cost_of(trial: FrozenTrial, name: str) -> float:
    """Return the cost of a trial: its user attribute, else its duration in seconds.

    Raises:
        ValueError: If it has neither, or the cost is not a positive number.
    """
    if name in trial.user_attrs:
        found = trial.user_attrs[name]
    else:
        found = trial.duration.total_seconds() if trial.duration is not None else None
    if not is_positive(found):
        which = "user attribute" if name in trial.user_attrs else "duration in seconds"
        refuse(
            name,
            "be a positive number in each completed trial, as a user attribute, or else the"
            " trial's duration must be above 0",
            f"{found!r} as the {which} of trial {trial.number}",
            f'Call `trial.set_user_attr("{name}", ...)` in the objective.',
        )
    return float(found)


def curve_of(trial: FrozenTrial) -> list[tuple[float, float, float | None]]:
    """Return cost, value and length of the points of a trial's curve, by rising cost.

    Points whose value is not finite are left out. The length is None where none is given.

    Raises:
        ValueError: If the curve is no list of [cost, value] or [cost, value, length] with positive
            costs and lengths.
    """
    found = []
    curve: Any = trial.user_attrs.get(CURVE) or []
    points: list[Any] = list(curve) if isinstance(curve, (list, tuple)) else [None]
    for point in points:
        cost, value, length = [*point, None][:3] if _is_point(point) else [None, None, None]
        if not (is_positive(cost) and is_real(value) and (length is None or is_positive(length))):
            refuse(
                CURVE,
                "be a list of [cost, value] or [cost, value, length], costs and lengths positive",
                f"{curve!r} in trial {trial.number}",
                'Call, for example, `trial.set_user_attr("curve", [[10.0, 0.8], [20.0, 0.6]])`.',
            )
        if math.isfinite(value):
            found.append((float(cost), float(value), length))
    return sorted(found, key=lambda point: point[0])


def _is_point(point: Any) -> bool:
    return isinstance(point, (list, tuple)) and len(point) in (2, 3)


def one_direction(study: Any) -> str:
    """Return "minimize" or "maximize".

    Raises:
        ValueError: If the study has several objectives.
    """
    directions = study.directions
    if len(directions) != 1:
        refuse(
            "study",
            "have one objective",
            f"{len(directions)} directions",
            "The cost is no objective: set it as a user attribute of the trial,"
            ' `trial.set_user_attr("cost", ...)`.',
        )
    return str(directions[0].name).lower()
