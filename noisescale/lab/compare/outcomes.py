# SPDX-License-Identifier: Apache-2.0
"""What came of trials: when each reached its goal, and which of several counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from noisescale.bounded import Bounded
from noisescale.history.metrics import Goal
from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.steps_to_result import Reached, budget_mask, find_result

_IDS = ("id", "pid", "version", "timestamp", "date", "port")
"""Last words of names that tell runs apart, and not trainings."""

_RANKED = (
    *("local", "global", "world", "node", "machine", "process"),
    *("ddp", "dp", "tp", "pp", "data", "parallel"),
)
"""Words before "rank" that make it the number of a process; with no word before it, it is one."""

_OF_RUNS = (
    *("time", "user", "host", "device", "devices", "dir", "folder", "path", "file", "url"),
    *("logdir", "project", "experiment", "run", "tag", "tags", "commit", "note", "notes"),
    *("status", "ended"),
)
"""Last words of names whose texts say where a run was trained, or how it ended. Their numbers are
settings: a share of dropped paths, the devices, the most time."""

_NAMED = ("run", "experiment", "trial", "job", "project", "group", "logger", "log", "user")
"""Words before "name" that make it the name of a run: others name an optimizer or a schedule."""


def is_seed(name: str) -> bool:
    """Return whether a hyperparameter is a seed, in which repetitions of a training differ.

    Examples:
        >>> [is_seed(name) for name in ("seed", "train/manual_seed", "seed_everything", "seeded")]
        [True, True, True, False]
    """
    return "seed" in _words(name)


def is_setting(name: str, value: float | str) -> bool:
    """Return whether different values of a hyperparameter make different trainings.

    Examples:
        >>> [is_setting(name, "one") for name in ("schedule", "optim/name", "run_name", "path")]
        [True, True, False, False]
        >>> is_setting("drop_path", 0.1), is_setting("lora_rank", 8), is_setting("local_rank", 1)
        (True, True, False)
    """
    *before, last = re.split(r"[/._-]", name.lower())
    names_run = last == "name" and (not before or before[-1] in _NAMED)
    of_run = names_run or last in _OF_RUNS
    is_id = last in _IDS or (last == "rank" and (not before or before[-1] in _RANKED))
    return not (is_seed(name) or is_id or (of_run and isinstance(value, str)))


def _words(name: str) -> list[str]:
    """Return the words of a name, without the names that it is nested in."""
    return re.split(r"[/.]", name.lower())[-1].replace("-", "_").split("_")


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trial, and when it reached its goal."""

    trial: Trial
    goal: Goal
    reached: Reached | None
    best: float
    """The value of the metric that was nearest to the goal, or farthest beyond it, within the
    budget; NaN if there was none."""
    best_step: float
    trained: int
    """Number of measurements within the budget."""

    def at(self, clock: str) -> float:
        """Return when the goal was reached, in one of `CLOCKS`.

        It is infinite if the goal was missed, and NaN if the clock is not known.
        """
        return math.inf if self.reached is None else float(getattr(self.reached, clock))

    def after(self, clock: str) -> float:
        """Return the last measurement at which the goal was not reached, in one of `CLOCKS`.

        The goal was reached somewhere between it and `at`; or beyond it, if the goal was missed
        within the budget. It is 0 if there is none, or the clock is not known. How long a run that
        diverged went on without a number says nothing.
        """
        before = self.trained if self.reached is None else self.reached.evaluation
        numbers = np.flatnonzero(np.isfinite(self.trial.measurements.values[:before]))
        before = int(numbers[-1]) + 1 if len(numbers) else 0
        known = self.trial.measurements.clock(clock)
        known = np.empty(0) if known is None else known[:before]
        known = known[np.isfinite(known)]
        return float(known[-1]) if len(known) else 0.0

    def rank(self, clock: str) -> tuple[float, float]:
        """Return what orders outcomes: when the goal was reached, or else how near they came."""
        sign = 1.0 if self.goal.side == "<" else -1.0
        return self.at(clock), math.inf if math.isnan(self.best) else sign * self.best

    @property
    def trained_steps(self) -> float:
        """Step of the last measurement within the budget; 0 without one."""
        return float(self.trial.measurements.steps[self.trained - 1]) if self.trained else 0.0

    @property
    def setting(self) -> tuple[object, ...]:
        """What was set: repetitions of a training have it in common."""
        trial = self.trial
        numbers = {k: v for k, v in trial.hyperparameters.items() if not isinstance(v, str)}
        others = sorted((name, str(v)) for name, v in numbers.items() if is_setting(name, v))
        # NaN is unequal to itself.
        return (str(trial.batch_size), str(trial.learning_rate), *others, *self.words.items())

    @property
    def words(self) -> dict[str, str]:
        """The settings in words by their names, with the optimizer first."""
        trial = self.trial
        named = {"optimizer": trial.optimizer} if trial.optimizer else {}
        texts = {name: v for name, v in trial.hyperparameters.items() if isinstance(v, str)}
        return named | {
            name: texts[name] for name in sorted(texts) if is_setting(name, texts[name])
        }


@dataclass(frozen=True, eq=False)
class Standing:
    """One submission on one workload."""

    submission: str
    workload: str
    outcomes: tuple[Outcome, ...]
    """The outcomes of all its trials."""
    counting: tuple[Outcome, ...]
    """What its time is the middle of: the repetitions of its best setting, or if there are
    several studies, the middle repetition of each study's best setting."""
    best: Outcome
    """The middle one of `counting`."""
    speed_up: Bounded
    """How many times as fast as the reference. Without a value it is only known from the side on
    which one of both missed the goal; unknown if both did."""

    @property
    def settings(self) -> float:
        """Number of settings of hyperparameters that were tried, in the mean over its studies."""
        tried = {(outcome.trial.study, outcome.setting) for outcome in self.outcomes}
        return len(tried) / len({study for study, _ in tried})

    @property
    def reached(self) -> int:
        """Number of trials that reached the goal."""
        return sum(outcome.reached is not None for outcome in self.outcomes)

    @property
    def diverged(self) -> int:
        """Number of trials that ended without a number, or failed by their own record."""
        return sum(outcome.trial.diverged for outcome in self.outcomes)


def outcome_of(trial: Trial, goal: Goal, budget: Mapping[str, float] | None = None) -> Outcome:
    """Return when a trial reached a goal within a budget, see `find_result`."""
    measured = trial.measurements
    in_budget = budget_mask(measured, budget)
    trained = int(in_budget.sum())
    inside = in_budget & np.isfinite(measured.values)
    if not inside.any():
        return Outcome(trial, goal, None, math.nan, math.nan, trained)
    sign = 1.0 if goal.side == "<" else -1.0
    where = int(np.argmin(np.where(inside, sign * measured.values, math.inf)))
    return Outcome(
        trial,
        goal,
        find_result(measured, goal, budget),
        float(measured.values[where]),
        float(measured.steps[where]),
        trained,
    )


def middle(outcomes: Iterable[Outcome], clock: str) -> Outcome:
    """Return the outcome in the middle: of an even number the slower one of both."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.rank(clock))
    return ordered[len(ordered) // 2]


def best_setting(outcomes: Sequence[Outcome], clock: str) -> list[Outcome]:
    """Return all repetitions of the setting that was fastest, by its middle repetition.

    The fastest repetition of all would be the luckiest.
    """
    settings: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        settings.setdefault(outcome.setting, []).append(outcome)
    return min(settings.values(), key=lambda repeated: middle(repeated, clock).rank(clock))
