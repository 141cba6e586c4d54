# SPDX-License-Identifier: Apache-2.0
"""Studies of Optuna for tests of the search: made up, without training."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

SPACE: dict[str, BaseDistribution] = {
    "width": IntDistribution(8, 512, log=True),
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "dropout": FloatDistribution(0.0, 0.8),
}

CENTER = {"width": 16, "lr": 1e-3, "dropout": 0.2}


def loss(params: Mapping[str, Any]) -> float:
    """Falls with the width, which costs; the best rate falls with the width, too."""
    off = math.log10(params["lr"]) + 2 + 0.5 * math.log10(params["width"] / 8)
    return float(params["width"] ** -0.5 + 0.2 * off**2 + (params["dropout"] - 0.3) ** 2)


def ended(
    params: dict[str, Any],
    value: float | None = None,
    state: TrialState = TrialState.COMPLETE,
    space: Mapping[str, BaseDistribution] = SPACE,
    **attributes: Any,
) -> FrozenTrial:
    return create_trial(
        state=state,
        value=value,
        params=params,
        distributions={name: space[name] for name in params},
        user_attrs=attributes,
    )


def study(sampler: Any, trials: Sequence[FrozenTrial] = (), **settings: Any) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = optuna.create_study(sampler=sampler, **settings)
    made.add_trials(trials)
    return made


def train(
    made: optuna.Study,
    count: int,
    value: Callable[[dict[str, Any]], float] = loss,
    space: dict[str, BaseDistribution] = SPACE,
    cost: str | None = "width",
) -> None:
    """Ask and tell so many trials, whose cost is a parameter, or the same for all."""
    for _ in range(count):
        trial = made.ask(space)
        sign = 1 if made.direction.name == "MINIMIZE" else -1
        trial.set_user_attr("cost", 1.0 if cost is None else float(trial.params[cost]))
        made.tell(trial, sign * value(trial.params))


def params_of(made: optuna.Study) -> list[dict[str, Any]]:
    return [trial.params for trial in made.trials]
