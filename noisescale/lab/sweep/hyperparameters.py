# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of a module's optimizers: read, and set for one training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from noisescale.lab.parameters import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY
from noisescale.refusal import Refusal
from noisescale.scheduling.learning_rate import Factors
from noisescale.scheduling.scaled_steps import ScaledSteps


def own_values(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return the hyperparameters of a module's optimizers, by the names of `ModuleDefaults`.

    They are the largest learning rate of the schedules, as far as they say it: a schedule that
    begins with a warm-up has a small one at first; the momentum, or the first beta of an Adam; the
    second beta of an Adam; and the largest weight decay. None stands for what no optimizer has.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    pairs = [group["betas"] for group in groups if "betas" in group]
    momenta = [*(pair[0] for pair in pairs), *(g["momentum"] for g in groups if "momentum" in g)]
    seconds = [float(pair[1]) for pair in pairs if len(pair) == 2]
    decays = [float(group["weight_decay"]) for group in groups if "weight_decay" in group]
    rates = (group.get("max_lr", group.get("initial_lr", group["lr"])) for group in groups)
    return {
        LEARNING_RATE: max(map(float, rates)),
        MOMENTUM: float(momenta[0]) if momenta else None,
        "beta2": seconds[0] if seconds else None,
        WEIGHT_DECAY: max(decays, default=None),
    }


def last_as_long(schedules: Sequence[Any], steps: float) -> bool:
    """Return whether there are schedules, and all are known to last this number of steps.

    Some do not say their length.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        >>> last_as_long([schedule], 100), last_as_long([schedule], 200)
        (True, False)
    """
    return bool(schedules) and all(steps in _lengths(schedule) for schedule in schedules)


def _lengths(schedule: Any) -> list[Any]:
    """Return what may be the length of a schedule: torch's arguments, transformers' partials."""
    found = [getattr(schedule, name, None) for name in ("total_steps", "T_max", "total_iters")]
    for rule in getattr(schedule, "lr_lambdas", ()):
        found.append(getattr(rule, "keywords", {}).get("num_training_steps"))
    return found


def set_values(
    optimizers: Sequence[Optimizer], values: Mapping[str, float], beta2: float | None = None
) -> ScaledSteps:
    """Set hyperparameters, and return what scales the learning rate of each step.

    The module's schedule is kept: its peak becomes the given learning rate, and the ratios between
    parameter groups stay.

    Args:
        optimizers: Of the fit.
        values: From names of `SWEPT` to values; what is left out stays the module's own.
            Weight decay is set where there is some, or everywhere if there is none.
        beta2: Of an Adam.

    Raises:
        ValueError: If no optimizer has the hyperparameter, or the module's learning rate is zero.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    refuse_unsearchable(optimizers, (), tuple(values))
    decayed = [group for group in groups if group.get("weight_decay")] or groups
    for group in groups:
        if "betas" in group and len(group["betas"]) == 2:
            beta1, own = group["betas"]
            second = own if beta2 is None else beta2
            group["betas"] = (values.get(MOMENTUM, beta1), second)
        elif "momentum" in group and MOMENTUM in values:
            group["momentum"] = values[MOMENTUM]
    for group in decayed:
        if "weight_decay" in group and WEIGHT_DECAY in values:
            group["weight_decay"] = values[WEIGHT_DECAY]
    own = own_values(optimizers)[LEARNING_RATE]
    if not own > 0:
        raise Refusal(
            "configure_optimizers",
            "set a positive learning rate",
            f"{own:g}",
            "The sweep multiplies it.",
        )
    scaled = ScaledSteps(optimizers)
    scaled.factors = Factors(learning_rate=values.get(LEARNING_RATE, own) / own)
    return scaled


def refuse_unsearchable(
    optimizers: Sequence[Optimizer], schedules: Iterable[Any], names: Sequence[str]
) -> None:
    """Refuse hyperparameters that no optimizer has, or that a schedule sets.

    Raises:
        ValueError: If there is one.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if WEIGHT_DECAY in names:
        _refuse_without(groups, WEIGHT_DECAY, ("weight_decay",))
    if MOMENTUM not in names:
        return
    _refuse_without(groups, MOMENTUM, ("momentum", "betas"))
    for schedule in _flat(schedules):
        if getattr(schedule, "cycle_momentum", False):
            raise Refusal(
                "search",
                "name what no schedule sets",
                f"{MOMENTUM}, which {type(schedule).__name__} sets at each step",
                f"Leave {MOMENTUM} out, or give the schedule `cycle_momentum=False`.",
            )


def _flat(schedules: Iterable[Any]) -> Iterator[Any]:
    """Yield schedules, also those in a chain or a sequence."""
    for schedule in schedules:
        yield schedule
        yield from _flat(getattr(schedule, "_schedulers", ()))


def _refuse_without(groups: Sequence[dict[str, Any]], name: str, keys: Sequence[str]) -> None:
    if not any(key in group for group in groups for key in keys):
        raise Refusal(
            "search",
            "name what the optimizer has",
            f"{name}, which it does not have",
            f"Leave {name} out.",
        )
