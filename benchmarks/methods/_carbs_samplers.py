# SPDX-License-Identifier: Apache-2.0
"""Samplers that carbs.py compares, each by asking for settings and telling what came of them.

All begin with the same first settings. Where a sampler knows no cost, it minimises the loss alone,
as its users have it; those with two objectives minimise the loss and the logarithm of the cost.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import math
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import optuna
import torch

from benchmarks.methods._carbs_problems import Params, Problem
from noisescale import CarbsSampler


class Search(Protocol):
    def ask(self) -> Params: ...

    def tell(self, params: Params, loss: float, cost: float) -> None: ...


class OfOptuna:
    """A study."""

    def __init__(
        self, problem: Problem, sampler: optuna.samplers.BaseSampler, *, two_objectives: bool
    ) -> None:
        directions = ["minimize"] * (2 if two_objectives else 1)
        self.study = optuna.create_study(sampler=sampler, directions=directions)
        self.study.enqueue_trial(problem.center)
        self.space, self.two_objectives = problem.space, two_objectives

    def ask(self) -> Params:
        self.trial = self.study.ask()
        found: Params = {}
        for name, (kind, low, high) in self.space.items():
            if kind == "int":
                found[name] = self.trial.suggest_int(name, int(low), int(high), log=True)
            else:
                found[name] = self.trial.suggest_float(name, low, high, log=kind == "log")
        return found

    def tell(self, params: Params, loss: float, cost: float) -> None:
        self.trial.set_user_attr("cost", cost)
        self.study.tell(self.trial, [loss, math.log(cost)] if self.two_objectives else loss)


class Hebo:
    """HEBO, with its defaults, on the loss."""

    def __init__(self, problem: Problem, seed: int) -> None:
        import pandas
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO

        np.random.seed(seed)
        torch.manual_seed(seed)
        kinds = {"log": "pow", "int": "pow_int", "linear": "num"}
        space = DesignSpace().parse(
            [
                {"name": name, "type": kinds[kind], "lb": low, "ub": high}
                for name, (kind, low, high) in problem.space.items()
            ]
        )
        self.search, self.frame = HEBO(space, scramble_seed=seed), pandas.DataFrame
        self.center: Params | None = problem.center

    def ask(self) -> Params:
        if self.center is not None:
            found, self.center = self.center, None
            return dict(found)
        with contextlib.redirect_stdout(io.StringIO()):
            found = self.search.suggest(1).iloc[0].to_dict()
        return {str(name): value for name, value in found.items()}

    def tell(self, params: Params, loss: float, cost: float) -> None:
        self.search.observe(self.frame([params]), np.array([[loss]]))


class Protein:
    """Protein of PufferLib (its one file), with its defaults."""

    def __init__(self, problem: Problem, seed: int) -> None:
        from benchmarks.lib.peers import load_file

        def unrolled(nested: dict[str, Any]) -> Any:
            for name, value in nested.items():
                if isinstance(value, dict):
                    yield from ((f"{name}/{key}", leaf) for key, leaf in unrolled(value))
                else:
                    yield name, value

        package = ModuleType("pufferlib")  # the real one imports environments of games
        vars(package)["unroll_nested_dict"] = unrolled
        sys.modules["pufferlib"] = package
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.space = problem.space
        kinds = {"log": "log_normal", "int": "log_normal", "linear": "uniform"}
        config: dict[str, Any] = {
            name: {
                "distribution": kinds[kind],
                "min": low,
                "max": high,
                "mean": problem.center[name],
                "scale": "auto",
            }
            for name, (kind, low, high) in problem.space.items()
        }
        with contextlib.redirect_stdout(io.StringIO()):
            file = load_file("pufferlib-core", "pufferlib/sweep.py")
            self.search = file.Protein(
                config | {"metric": "loss", "goal": "maximize"}, max_suggestion_cost=math.inf
            )

    def ask(self) -> Params:
        with contextlib.redirect_stdout(io.StringIO()):
            found, _ = self.search.suggest({})
        return {
            name: round(value) if self.space[name][0] == "int" else value
            for name, value in found.items()
        }

    def tell(self, params: Params, loss: float, cost: float) -> None:
        self.search.observe(params, -loss, cost)


def _carbs(problem: Problem, seed: int) -> Search:
    sampler = CarbsSampler(seed=seed, centers=problem.center)
    return OfOptuna(problem, sampler, two_objectives=False)


def _optuna(
    make: Callable[..., Any], *, two_objectives: bool = False, **settings: Any
) -> Callable[[Problem, int], Search]:
    def made(problem: Problem, seed: int) -> Search:
        return OfOptuna(problem, make(seed=seed, **settings), two_objectives=two_objectives)

    return made


_samplers = optuna.samplers
SEARCHES: dict[str, Callable[[Problem, int], Search]] = {
    "CARBS": _carbs,
    "random": _optuna(_samplers.RandomSampler),
    "TPE": _optuna(_samplers.TPESampler, multivariate=True),
    "TPE, two objectives": _optuna(_samplers.TPESampler, two_objectives=True, multivariate=True),
    "GP": _optuna(_samplers.GPSampler),
    "GP, two objectives": _optuna(_samplers.GPSampler, two_objectives=True),
    "HEBO": Hebo,
    "Protein": Protein,
}
PACKAGES = {"HEBO": "HEBO", "Protein": "pufferlib-core"}


def installed() -> dict[str, str]:
    """The version of each sampler's package; those that are not installed are left out."""
    found = {}
    for name in SEARCHES:
        try:
            package = PACKAGES.get(name, "noisescale" if name == "CARBS" else "optuna")
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
