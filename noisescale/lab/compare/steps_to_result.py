# SPDX-License-Identifier: Apache-2.0
"""When a trial reached a goal: in steps, examples, epochs and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescale.checks import refuse, require_choice
from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import CLOCKS, Measurements
from noisescale.refusal import Refusal

Columns = Mapping[str, ArrayLike]

MODES = ("min", "max")
"""Whether the metric is to fall or to rise, as for Lightning's EarlyStopping."""

_STEPS = ("steps", "step")
_SINGULAR = {"example": "examples", "epoch": "epochs", "second": "seconds"}


class Reached(NamedTuple):
    """The evaluation at which a trial first reached a goal. What is not known is NaN."""

    evaluation: int
    """The number of the measurement, from 0."""
    steps: float
    examples: float
    epochs: float
    seconds: float
    value: float
    """The value of the metric."""
    for_good: bool
    """Whether every later evaluation reached the goal too."""


def find_result(
    measurements: Measurements, goal: Goal, budget: Mapping[str, float] | None = None
) -> Reached | None:
    """Return the first evaluation that reaches a goal within a budget, or None.

    Args:
        measurements: Of one trial.
        goal: With its side, see `Goal`.
        budget: The most "steps", "examples", "epochs" or "seconds", or several of these. An
            evaluation at the budget itself counts.

    Raises:
        ValueError: If the budget is in another unit, not positive, or in one that the
            measurements do not have at each evaluation.

    Examples:
        >>> measured = Measurements([100, 200, 300], [0.5, 0.2, 0.3], seconds=[10, 20, 30])
        >>> find_result(measured, Goal.read("val_loss<=0.2")).seconds
        20.0
    """
    reached = goal.is_reached_by(measurements.values) & budget_mask(measurements, budget)
    if not reached.any():
        return None
    k = int(np.argmax(reached))
    clocks = {name: measurements.clock(name) for name in CLOCKS}
    at = {name: math.nan if clock is None else float(clock[k]) for name, clock in clocks.items()}
    value, for_good = (
        float(measurements.values[k]),
        bool(goal.is_reached_by(measurements.values[k:]).all()),
    )
    return Reached(evaluation=k, value=value, for_good=for_good, **at)


def budget_mask(
    measurements: Measurements, budget: Mapping[str, float] | None
) -> NDArray[np.bool_]:
    """Return which evaluations are within a budget, see `find_result`."""
    check_budget(budget or {})
    inside = np.ones(len(measurements), dtype=bool)
    for name, most in (budget or {}).items():
        clock = measurements.clock(name)
        if not len(measurements):  # as of a run that failed: nothing was within the budget
            continue
        if clock is None:
            raise Refusal(
                "budget",
                "be in a unit that was measured",
                f"{name}, which these measurements do not have",
                f"Give the {name} of each evaluation, or a budget in steps.",
            )
        before, after = _bounds_of(clock)
        unknown = (before <= most) & (most < after)
        if unknown.any():
            at = measurements.steps[np.argmax(unknown)]
            raise Refusal(
                "budget",
                "be in a unit that is known of each evaluation",
                f"{name}, which are not known at step {at:,.0f}",
                "Correct the log, or give a budget in steps.",
            )
        inside &= after <= most
    return inside


def check_budget(budget: Mapping[str, float]) -> None:
    """Refuse a budget in another unit, or one that is not positive."""
    for name, most in budget.items():
        require_choice("budget", name, CLOCKS, "Give a limit in one of these units.")
        if not most > 0:
            raise Refusal(
                "budget", "be positive", f"{most} {name}", f"Leave {name} out for no limit."
            )


def _bounds_of(clock: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what a clock is at least and at most at each evaluation, as it never runs back."""
    known = np.isfinite(clock)
    before = np.maximum.accumulate(np.where(known, clock, 0.0))
    after = np.minimum.accumulate(np.where(known, clock, math.inf)[::-1])[::-1]
    return before, after


def steps_to_result(
    measurements: Measurements | Columns | Iterable[Measurements | Columns],
    goal: float,
    mode: str = "min",
    *,
    strict: bool = True,
    budget: Mapping[str, float] | None = None,
) -> float:
    """Return the fewest steps at which any trial is beyond a goal.

    Args:
        measurements: Of one trial or of several: `Measurements`, or columns with "step" and one
            metric, and maybe "examples", "epochs" and "seconds".
        goal: Value of the metric.
        mode: "min" if the metric is to fall to the goal, "max" if it is to rise.
        strict: Whether a value equal to the goal does not reach it, as in Shallue et al. AlgoPerf
            lets it reach the goal.
        budget: The most steps, examples, epochs or seconds, for example `{"epochs": 10}`.

    Returns:
        Steps; infinite if no trial reached the goal.

    Raises:
        ValueError: If the measurements have another form, the goal is not finite, or the mode or
            the budget is unknown.

    Examples:
        >>> trials = [
        ...     {"step": [100, 200, 300], "val_error": [0.04, 0.02, 0.01]},
        ...     {"step": [100, 200, 300], "val_error": [0.05, 0.01, 0.009]},
        ... ]
        >>> steps_to_result(trials, 0.01), steps_to_result(trials, 0.01, strict=False)
        (300.0, 200.0)

    References:
        Shallue et al. 2019, arXiv:1811.03600, section 3.2.
    """
    require_choice("mode", mode, MODES, "Is the metric to fall or to rise?")
    if not math.isfinite(goal):
        raise Refusal("goal", "be finite", goal, "Give a value of the metric.")
    wanted = Goal("metric", float(goal), "<" if mode == "min" else ">", strict)
    found = (find_result(trial, wanted, budget) for trial in _trials(measurements))
    return min((reached.steps for reached in found if reached is not None), default=math.inf)


def _trials(
    given: Measurements | Columns | Iterable[Measurements | Columns],
) -> list[Measurements]:
    if isinstance(given, Measurements):
        return [given]
    trials = [_measurements(each) for each in ([given] if isinstance(given, Mapping) else given)]
    if not trials:
        refuse("measurements", "have one trial at least", "none", "Give those of each trial.")
    return trials


def _measurements(given: Measurements | Columns) -> Measurements:
    if isinstance(given, Measurements):
        return given
    if not isinstance(given, Mapping):
        raise Refusal(
            "measurements",
            "be Measurements or columns of a trial, or several of them",
            f"a trial of type {type(given).__name__}",
            'Give, for example, {"step": [100, 200], "val_loss": [0.5, 0.3]}.',
        )
    columns = {_SINGULAR.get(name, name): column for name, column in given.items()}
    steps = [columns.pop(name) for name in _STEPS if name in columns]
    clocks = {name: columns.pop(name) for name in CLOCKS if name in columns}
    if len(steps) != 1 or len(columns) != 1:
        raise Refusal(
            "measurements",
            "have a column `step` and one metric",
            f"the columns {', '.join(given) or 'none'}",
            "Leave the other metrics out.",
        )
    (values,) = columns.values()
    return Measurements(steps[0], values, **clocks)
