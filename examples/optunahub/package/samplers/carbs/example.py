# SPDX-License-Identifier: Apache-2.0
"""Search the width and the learning rate of a made-up network whose cost is its width."""

import math

import optuna
import optunahub


def objective(trial: optuna.Trial) -> float:
    width = trial.suggest_int("width", 8, 1024, log=True)
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    trial.set_user_attr("cost", float(width))
    return width**-0.5 + (math.log10(lr) + 2 + 0.5 * math.log10(width / 8)) ** 2


if __name__ == "__main__":
    carbs = optunahub.load_module("samplers/carbs")
    sampler = carbs.CarbsSampler(
        seed=0, centers={"width": 32, "lr": 1e-3}, spaces={"width": carbs.PowerOfTwoSpace()}
    )
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=40)
    for point in carbs.pareto_front(study):
        print(f"cost {point.cost:5.0f}: loss {point.value:.3f} with {point.params}")
