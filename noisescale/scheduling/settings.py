# SPDX-License-Identifier: Apache-2.0
"""The user's settings of a scheduler, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from torch.optim import SGD, Optimizer

from noisescale.checks import require_bounds, require_choice, require_count, require_positive
from noisescale.plan import Bounds, Plan
from noisescale.refusal import Refusal, TypeRefusal
from noisescale.scheduling.find import Find
from noisescale.scheduling.gate import Gate
from noisescale.scheduling.learning_rate import BY_NOISE_SCALE, NAMES, LearningRateScaling
from noisescale.scheduling.policies import (
    NANOCHAT,
    DoublingRule,
    Given,
    GivenByShare,
    InsteadOfDecay,
    NormTestRule,
    PolicyLike,
    RatioRule,
    TradeoffRule,
    given_by_examples,
    given_in_words,
)
from noisescale.scheduling.policy import FunctionPolicy, Policy

_NAMED: dict[str, Callable[[], Policy]] = {
    "auto": Find,
    "tradeoff": lambda: Gate(TradeoffRule()),
    "ratio": lambda: Gate(RatioRule()),
    "norm_test": lambda: Gate(NormTestRule()),
    "doubling": lambda: Gate(DoublingRule()),
    "seesaw": InsteadOfDecay,
    "smith": InsteadOfDecay,
    "find": Find,
    "nanochat": lambda: GivenByShare(NANOCHAT),
}

_SCALINGS: dict[str, LearningRateScaling] = {
    "seesaw": "sqrt",
    "smith": "linear",
    "doubling": "sqrt",
}
"""The `lr_scaling` of the published rule, for `"auto"`."""

_FIXED = ("seesaw", "smith")
"""Policies that are another rule with another `lr_scaling`."""

LEAST_STEPS = 50
"""The steps that a run would have at the largest batch size, without `max_batch_size`."""

CONFIDENCE = 0.8
"""Coverage of the interval that a move waits for.

At 0.95 the first move of a small transformer under "tradeoff" came after 225 and 289 steps, at 0.8
after 169 and 177.
"""

DECIDE_EVERY_N_STEPS = 8
"""Steps from one decision to the next; early in a run there are fewer."""


@dataclass(frozen=True)
class SchedulerOptions:
    """The options of a scheduler as the user gave them, see `BatchSizeController`.

    Policies keep a state, so that each run makes `Settings` of its own from this.
    """

    policy: PolicyLike = "auto"
    lr_scaling: LearningRateScaling = "auto"
    min_batch_size: float | None = None
    max_batch_size: float | None = None
    max_device_batch_size: int | None = None
    decide_every_n_steps: int = DECIDE_EVERY_N_STEPS


@dataclass(frozen=True)
class Settings:
    """The settings of a run, made from the user's options by `from_options`."""

    policy: Policy
    """The policy: made from a name or a mapping, or wrapping a function."""
    lr_scaling: LearningRateScaling
    bounds: Bounds
    """The limits of plans."""
    max_device_batch_size: int | None
    decide_every_n_steps: int
    examples_per_row: float

    @classmethod
    def from_options(
        cls,
        options: SchedulerOptions,
        optimizers: Iterable[Optimizer] | None = None,
        *,
        min_accumulation: int = 1,
        examples_per_row: float = 1.0,
    ) -> Settings:
        """Return the settings of a run.

        Args:
            options: The options that the user chose.
            optimizers: The optimizers that `lr_scaling="auto"` depends on. None: it stays "auto".
            min_accumulation: Least micro-batches a step, which only a controller knows.
            examples_per_row: Examples in a row of the data, which only a controller knows.

        Raises:
            ValueError: If an option is out of its range.
            TypeError: If an option has a wrong type.
        """
        policy, lr_scaling = _policy_of(options.policy), _scaling_of(options)
        remedy = "Leave it out for the default."
        if options.max_device_batch_size is not None:
            require_count("max_device_batch_size", options.max_device_batch_size, remedy)
        least, most = require_bounds(options.min_batch_size, options.max_batch_size)
        require_count("min_accumulation", min_accumulation, "Leave it at 1.")
        per_row = require_positive("examples_per_row", examples_per_row, "Leave it at 1.")
        every = require_count("decide_every_n_steps", options.decide_every_n_steps, remedy)
        if optimizers is not None and lr_scaling == "auto":
            lr_scaling = scaling_for(optimizers, policy)
        return cls(
            policy,
            lr_scaling,
            Bounds(least or 0.0, most or math.inf, min_accumulation),
            options.max_device_batch_size,
            every,
            per_row,
        )

    @property
    def needs_noise_scale(self) -> bool:
        """Whether the policy or the learning rate needs the noise scale."""
        return self.policy.needs_noise_scale or self.lr_scaling in BY_NOISE_SCALE

    @property
    def takes_noise_scale(self) -> bool:
        """Whether the policy or the learning rate can use a noise scale, needed or not."""
        by_policy = self.policy.takes_noise_scale or self.needs_noise_scale
        return by_policy or callable(self.lr_scaling)


def default_cap(examples: float, plan: Plan) -> float | None:
    """Return the largest batch size of a run, and at least the first one; None for no maximum.

    Args:
        examples: Of the whole run, as far as its end is known; infinite if it is not.
        plan: The plan that the run starts with.

    Examples:
        >>> default_cap(60_000, Plan(32, 1)), default_cap(100, Plan(32, 1))
        (1200.0, 32)
    """
    return max(examples / LEAST_STEPS, plan.batch_size) if math.isfinite(examples) else None


def scaling_for(optimizers: Iterable[Optimizer], policy: Policy) -> LearningRateScaling:
    """Return what `"auto"` stands for.

    It is `"adascale"` for SGD if the policy needs the noise scale; else `"sqrt"`.

    Examples:
        >>> import torch
        >>> parameters = [torch.nn.Parameter(torch.ones(1))]
        >>> scaling_for([torch.optim.SGD(parameters)], Find())
        'adascale'
        >>> scaling_for([torch.optim.AdamW(parameters)], Find())
        'sqrt'
    """
    if policy.needs_noise_scale and all(isinstance(one, SGD) for one in optimizers):
        return "adascale"
    return "sqrt"


def _policy_of(policy: PolicyLike) -> Policy:
    if isinstance(policy, str):
        if ":" in policy:
            return given_in_words(policy)
        otherwise = ', "0:64 500k:128" or the like, a mapping from steps or a function'
        remedy = 'Leave it at "auto".'
        require_choice("policy", policy, _NAMED, remedy, or_else=otherwise)
        return _NAMED[policy]()
    if isinstance(policy, Mapping):
        by_examples = {since: size for since, size in policy.items() if isinstance(since, str)}
        if by_examples and len(by_examples) == len(policy):
            return given_by_examples(by_examples)
        return Given(cast(Mapping[int, float], policy))
    if not callable(policy):
        raise TypeRefusal(
            "policy", "be a name, a mapping or a function", repr(policy), 'Leave it at "auto".'
        )
    return policy if isinstance(policy, Policy) else FunctionPolicy(policy)


def _scaling_of(options: SchedulerOptions) -> LearningRateScaling:
    policy, lr_scaling = options.policy, options.lr_scaling
    if isinstance(policy, str) and policy in _SCALINGS:
        right = _SCALINGS[policy]
        if policy in _FIXED and lr_scaling not in ("auto", right):
            raise Refusal(
                "lr_scaling",
                f'be "{right}" with `policy="{policy}"`',
                repr(lr_scaling),
                'Leave it at "auto".',
            )
        if lr_scaling == "auto":
            return right
    if not callable(lr_scaling):
        hint = 'Leave it at "auto".'
        require_choice("lr_scaling", lr_scaling, NAMES, hint, or_else=" or a function")
    return lr_scaling
