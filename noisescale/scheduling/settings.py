# SPDX-License-Identifier: Apache-2.0
"""What a user chooses of a scheduler, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import SGD, Optimizer

from noisescale.checks import checked_bounds, checked_choice, checked_count, checked_positive
from noisescale.plan import Bounds
from noisescale.scheduling.gate import Gate
from noisescale.scheduling.learning_rate import BY_NOISE_SCALE, NAMES, LearningRateScaling
from noisescale.scheduling.policies import (
    DoublingRule,
    Given,
    InsteadOfDecay,
    NormTestRule,
    PolicyLike,
    RatioRule,
    TradeoffRule,
)
from noisescale.scheduling.policy import FunctionPolicy, Policy

_NAMED: dict[str, Callable[[], Policy]] = {
    "tradeoff": lambda: Gate(TradeoffRule()),
    "ratio": lambda: Gate(RatioRule()),
    "norm_test": lambda: Gate(NormTestRule()),
    "doubling": lambda: Gate(DoublingRule()),
    "seesaw": InsteadOfDecay,
    "smith": InsteadOfDecay,
}

_SCALINGS: dict[str, LearningRateScaling] = {"seesaw": "sqrt", "smith": "linear"}
"""What makes a policy the published one."""

DECIDE_EVERY_N_STEPS = 8
"""Steps from one decision to the next; early in a run they are nearer."""


class Settings:
    """What a user chooses of a scheduler, see `BatchSizeController`.

    Args:
        optimizers: That `lr_scaling="auto"` goes by. None: it stays "auto".
        min_accumulation: Least micro-batches a step, which only a controller knows.
        examples_per_row: Likewise.

    Raises:
        ValueError: If one of them is out of its range.
        TypeError: If one has a wrong type.
    """

    def __init__(
        self,
        *,
        policy: PolicyLike,
        lr_scaling: LearningRateScaling,
        min_batch_size: float | None,
        max_batch_size: float | None,
        max_device_batch_size: int | None,
        decide_every_n_steps: int,
        optimizers: Iterable[Optimizer] | None = None,
        min_accumulation: int = 1,
        examples_per_row: float = 1.0,
    ) -> None:
        self.policy: Any = policy
        """A function as it was given; what a name or a mapping stands for."""
        if isinstance(policy, str):
            otherwise = ", a mapping from steps to batch sizes or a function"
            remedy = 'Leave it at "tradeoff".'
            checked_choice("policy", policy, _NAMED, remedy, or_else=otherwise)
            right = _SCALINGS.get(policy, lr_scaling)
            if lr_scaling not in ("auto", right):
                raise ValueError(
                    f'`lr_scaling` must be "{right}" with `policy="{policy}"`, got'
                    f' {lr_scaling!r}. Leave it at "auto".'
                )
            lr_scaling = right
            self.policy = _NAMED[policy]()
        elif isinstance(policy, Mapping):
            self.policy = Given(policy)
        elif not callable(policy):
            raise TypeError(
                f"`policy` must be a name, a mapping or a function, got {policy!r}."
                ' Leave it at "tradeoff".'
            )
        self.asked = self.policy if isinstance(self.policy, Policy) else FunctionPolicy(self.policy)
        """The policy, with all that a policy has, which a function need not have."""
        remedy = "Leave it out for the default."
        if max_device_batch_size is not None:
            checked_count("max_device_batch_size", max_device_batch_size, remedy)
        if not callable(lr_scaling):
            hint = 'Leave it at "auto".'
            checked_choice("lr_scaling", lr_scaling, NAMES, hint, or_else=" or a function")
        self.lr_scaling = lr_scaling
        least, most = checked_bounds(min_batch_size, max_batch_size)
        checked_count("min_accumulation", min_accumulation, "Leave it at 1.")
        self.bounds = Bounds(least or 0.0, most or math.inf, min_accumulation)
        """What plans keep to."""
        self.examples_per_row = checked_positive(
            "examples_per_row", examples_per_row, "Leave it at 1."
        )
        self.max_device_batch_size = max_device_batch_size
        every = checked_count("decide_every_n_steps", decide_every_n_steps, remedy)
        self.decide_every_n_steps = every
        if optimizers is not None and self.lr_scaling == "auto":
            self.lr_scaling = scaling_for(optimizers, measured=self.needs_noise_scale)

    @property
    def needs_noise_scale(self) -> bool:
        """Whether the policy, or the learning rate, is told by the noise scale."""
        return self.asked.needs_noise_scale or self.lr_scaling in BY_NOISE_SCALE

    @property
    def takes_noise_scale(self) -> bool:
        """Whether a noise scale makes a difference. A function may do without, but takes one."""
        by_policy = self.asked.takes_noise_scale or self.needs_noise_scale
        return by_policy or callable(self.lr_scaling)


def scaling_for(optimizers: Iterable[Optimizer], *, measured: bool) -> LearningRateScaling:
    """Return what `"auto"` is: `"sqrt"` or, where b is measured anyway, what goes by that.

    Then it is `"adascale"` for SGD and `"capped_sqrt"` for all else.

    Example:
        >>> import torch
        >>> parameters = [torch.nn.Parameter(torch.ones(1))]
        >>> scaling_for([torch.optim.SGD(parameters)], measured=True)
        'adascale'
        >>> scaling_for([torch.optim.AdamW(parameters)], measured=True)
        'capped_sqrt'
    """
    if not measured:
        return "sqrt"
    return "adascale" if all(isinstance(one, SGD) for one in optimizers) else "capped_sqrt"
