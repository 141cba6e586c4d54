# SPDX-License-Identifier: Apache-2.0
"""An exponential warm-up that may end at any step, and the cosine that follows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from noisescale.refusal import Refusal


@dataclass(frozen=True)
class WarmUpThenCosine:
    """The learning rate of one parameter group, from the step and the step of the switch.

        warm-up     w(t) = min_lr·(max_lr/min_lr)^(t/T_w)         T_w = max_warmup_fraction·T
        decay       w(t*)·(1 + cos(π·(t - t₀)/(T - t₀)))/2        T = total_steps

    The decay starts from the learning rate of some step t* of the warm-up. Its cosine begins where
    the warm-up was left (t₀ = switch_step). With a `cooldown_fraction` it begins at t₀ = (1 -
    cooldown_fraction)·T, and the learning rate stays at w(t*) until then.

    Args:
        total_steps: T, the optimizer steps of the whole run.
        min_lr: The learning rate of the first step.
        max_lr: Where the warm-up would end.
        max_warmup_fraction: The longest warm-up, as a share of `total_steps`.
        cooldown_fraction: The share of `total_steps`, at their end, that the cosine takes.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> schedule = WarmUpThenCosine(total_steps=100, min_lr=0.01, max_lr=1.0)
        >>> schedule.warm_up(0), schedule.warm_up(25)
        (0.01, 0.1)
        >>> [schedule.decay(step, switch_step=40, peak_step=25) for step in (40, 70, 100)]
        [0.1, 0.05, 0.0]

    References:
        Kim et al. 2021, arXiv:2107.05855.
    """

    total_steps: int
    min_lr: float = 1e-5
    max_lr: float = 1.0
    max_warmup_fraction: float = 0.5
    cooldown_fraction: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.total_steps < math.inf:
            raise Refusal(
                "total_steps",
                "be 1 or more",
                repr(self.total_steps),
                "Count the optimizer steps of the whole run.",
            )
        if not 0 < self.min_lr < self.max_lr < math.inf:
            raise Refusal(
                "max_lr",
                "be finite and exceed `min_lr`, which must be positive",
                f"{self.max_lr!r} and {self.min_lr!r}",
                "Both replace the learning rates of the optimizer.",
            )
        if not 0 < self.max_warmup_fraction < 1:
            raise Refusal(
                "max_warmup_fraction",
                "lie between 0 and 1",
                repr(self.max_warmup_fraction),
                "The rest of the steps is for the decay.",
            )
        if (
            self.cooldown_fraction is not None
            and not 0 < self.cooldown_fraction <= 1 - self.max_warmup_fraction
        ):
            raise Refusal(
                "cooldown_fraction",
                "be positive and leave room for the warm-up's share of"
                f" {self.max_warmup_fraction!r}",
                repr(self.cooldown_fraction),
                "Leave it out for a cosine that begins where the warm-up ends.",
            )

    @property
    def warmup_steps(self) -> int:
        """T_w, the steps of the longest warm-up."""
        return int(self.max_warmup_fraction * self.total_steps)

    def warm_up(self, step: float) -> float:
        """Return w(t), the learning rate of `step` if it belongs to the warm-up."""
        return self.min_lr * float((self.max_lr / self.min_lr) ** (step / self.warmup_steps))

    def decay(self, step: int, *, switch_step: int, peak_step: float) -> float:
        """Return the learning rate of `step` in the decay, 0 from `total_steps` on."""
        begin = switch_step
        if self.cooldown_fraction is not None:
            begin = max(begin, round((1 - self.cooldown_fraction) * self.total_steps))
        progress = (step - begin) / (self.total_steps - begin)
        factor = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return factor * self.warm_up(peak_step)
