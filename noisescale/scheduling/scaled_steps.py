# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step with a scaled learning rate, and keep the scheduled one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from noisescale.refusal import Refusal
from noisescale.scheduling.learning_rate import NO_FACTORS, Factors


class ScaledSteps:
    """Multiply the learning rate during `optimizer.step()`, and put it back after it.

    Schedules read and write `lr` between steps, and some compute the next from the last one
    (`ExponentialLR`, `ReduceLROnPlateau`). They never see the factor. So schedules, chains of
    schedules and their checkpoints are the same as without it.

    If a GradScaler skips a step, nothing is changed. If `step` runs a closure, as in Lightning, the
    factor is put aside while the closure runs. So `training_step` sees the scheduled learning rate,
    and a learning rate that it sets is scaled, too.

    Args:
        optimizers: The optimizers whose steps are scaled.

    Examples:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.1)
        >>> scaled = ScaledSteps([optimizer])
        >>> scaled.factors = Factors(learning_rate=2.0)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.item(), optimizer.param_groups[0]["lr"]
        (0.800000011920929, 0.1)
        >>> scaled.close()
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.factors = NO_FACTORS
        """The factors on the next steps."""
        self._optimizers = list(optimizers)
        self._groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
        self._kept: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._handles = [
            handle
            for optimizer in self._optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._scale_before_step),
                optimizer.register_step_post_hook(self._restore_after_step),
            )
        ]

    @property
    def learning_rate(self) -> float:
        """The scheduled learning rate, without the factor.

        It is the mean of the parameter groups that there were at first: unfreezing adds others.
        """
        rates = [
            float(group["lr"])
            for optimizer, number in zip(self._optimizers, self._groups, strict=True)
            for group in optimizer.param_groups[:number]
        ]
        return sum(rates) / len(rates)

    def close(self) -> None:
        """Remove the hooks, and restore what a failed step has left changed."""
        self._restore()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _scale_before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._restore()  # what a step that failed has left
        if self.factors == NO_FACTORS:
            return None
        self._scale(optimizer)  # some optimizers read it before their closure runs, as LBFGS does
        closure = kwargs.get("closure")
        if closure is not None:
            return args, {**kwargs, "closure": self._scaling_after(optimizer, closure)}
        own, *given = args  # the optimizer comes first
        if given and callable(given[0]):
            return (own, self._scaling_after(optimizer, given[0]), *given[1:]), kwargs
        return None

    def _scaling_after(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        def run() -> Any:
            self._restore()
            loss = closure()
            self._scale(optimizer)
            return loss

        return run

    def _scale(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for name, value in _scale_settings(group, self.factors).items():
                self._kept.append((group, name, group[name], value))
                group[name] = value

    def _restore_after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for group, name, kept, scaled in self._kept:
            if group[name] is scaled:  # else the step has set it
                group[name] = kept
        self._kept = []


def check_betas(optimizers: Iterable[Optimizer], largest_ratio: float) -> None:
    """Raise if betas cannot follow batches `largest_ratio` times the base.

    Raises:
        ValueError: If 1 - k(1 - β) is not positive, or there are no betas.
    """
    for optimizer in optimizers:
        betas = [beta for group in optimizer.param_groups for beta in group.get("betas", ())]
        if not betas:
            raise Refusal(
                'lr_scaling="malladi"',
                "be used with an optimizer that has betas",
                type(optimizer).__name__,
                'Choose "adascale" or "linear".',
            )
        most = 1 / (1 - min(betas)) if min(betas) < 1 else math.inf
        if not largest_ratio < most:
            raise Refusal(
                "max_batch_size",
                'stay below 1/(1 - β) times the first batch size for `lr_scaling="malladi"`',
                f"{largest_ratio:g} times for β = {min(betas):g}",
                f'Lower it to less than {most:.3g} times, or choose "sqrt".',
            )


def _scale_settings(group: dict[str, Any], factors: Factors) -> dict[str, Any]:
    """Return the settings of a group that change. A learning rate on the device stays there."""
    scaled = {"lr": group["lr"] * factors.learning_rate}
    if (ratio := factors.batch_ratio) is not None:
        scaled["betas"] = tuple(1 - ratio * (1 - beta) for beta in group["betas"])
        if "eps" in group:
            scaled["eps"] = group["eps"] / math.sqrt(ratio)
    return scaled
