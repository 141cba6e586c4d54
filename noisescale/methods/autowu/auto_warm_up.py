# SPDX-License-Identifier: Apache-2.0
"""A learning rate that rises until the loss has passed its minimum, then decays (AutoWU)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from noisescale.methods.autowu.epoch_losses import EpochLosses
from noisescale.methods.autowu.loss_minimum import loss_minimum
from noisescale.refusal import Refusal

CONFIGURATION = ("_schedules", "_steps_per_epoch", "_confidence", "_patience")


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


class AutoWarmUp(LRScheduler):
    """Find the peak learning rate while training: rise exponentially, decay when the loss turns.

    The warm-up would take T_w = max_warmup_fraction·total_steps steps. Step t of it, from 0, has

        w(t) = min_lr·(max_lr/min_lr)^(t/T_w)

    After each epoch a Gaussian process is drawn through all losses so far. When it has said
    `patience` times in a row that the minimum has passed with a probability above `confidence`, the
    learning rate goes back to w(t*), where t* is the step of that minimum. From there it falls
    along a cosine to 0 at `total_steps`. If the loss never turns, the warm-up takes all T_w steps.

    Call `observe(loss)` in every step, and `step()` after the optimizer's step. Losses stay on
    their device until the epoch ends. This is the schedule of the whole run: use no other one
    beside it. The learning rates that the optimizer was built with are not used.

    This differs from the authors' code in:

    1. All losses count, averaged in up to 500 stretches; theirs draws 500 at random, five times,
       and takes a vote. Equal losses thus lead to equal decisions, on every rank and on resuming.
    2. The Gaussian process is fitted anew to convergence after each epoch. Theirs goes on from
       the epoch before, by 100 steps of Adam on 100 random losses.
    3. The least variance of a difference is a share of the variance of the losses; theirs is 1e-4.
    4. The parameter groups may have different learning rates.
    5. Past `total_steps` the learning rate stays 0; theirs would rise again.
    6. The peak after a test is w(t*), t* = x·n, with x the place of the minimum from 0 to 1 and n
       the steps so far. Theirs is the mean of w(x·(n - 1)) over the x of its five draws, so that
       it is lower by up to one step's rise.
    7. The peak after a warm-up that no test ended is w(T_w), `max_lr`. Theirs is w(T_w - 1), the
       learning rate of the last step of the warm-up.
    8. The cosine is 1 in its first step and reaches 0 at `total_steps`, after the last step. Theirs
       is a step ahead: it is below 1 in its first step, and the last step has a learning rate of 0.
    9. The cosine begins at once unless `cooldown_fraction` is given, as under their option
       `immediate_cooldown`. By default theirs first stays at the peak, and the cosine takes the
       last 0.2 of the steps.
    10. The step that a cool-down begins with is (1 - `cooldown_fraction`)·`total_steps` rounded to
        the nearest, in theirs rounded up. A cool-down that would begin within the longest warm-up
        is an error, theirs ends the warm-up.
    11. There is no other decay (no factor an epoch, no decay when the loss stays, no half cosine),
        and no other warm-up (linear or by epochs).
    12. Losses are averaged over ranks in here. In theirs the training script does that.

    Args:
        optimizer: Any optimizer, with one learning rate or several.
        total_steps: Optimizer steps of the whole run.
        steps_per_epoch: Optimizer steps between two tests. Where there are no epochs, or fewer
            than a hundred, give a hundredth of `total_steps`: while `patience` tests pass, the
            learning rate rises on, and rises steeply in a warm-up of few tests.
        min_lr: Where the warm-up begins, one for all parameter groups or one for each.
        max_lr: Where the longest warm-up would end, one for all parameter groups or one for each.
        max_warmup_fraction: The longest warm-up, as a share of `total_steps`.
        cooldown_fraction: If given, the learning rate first stays at w(t*), and the cosine takes
            this share of `total_steps` at the end.
        confidence: The probability that a test has to exceed.
        patience: How many tests in a row have to exceed `confidence`.
        group: The ranks that average their losses, where a process group is initialised. Default:
            all ranks. There is one all-reduce in each epoch of the warm-up, and all ranks take the
            same decision.

    Attributes:
        switch_step: The step that the decay began with, None during the warm-up.
        peak_step: t*, the step of the warm-up whose learning rate the decay started from, None
            during the warm-up.
        probabilities: The probability that each test so far found.

    Raises:
        ValueError: If an argument is out of its range, or if the warm-up is too short for
            `patience` tests. From `observe`, if a loss is not a single number.
        RuntimeError: From `step`, if the first epoch of the warm-up ends without a loss. Later
            epochs may have none: under `BatchSizeScheduler` an optimizer step can be worth an epoch
            or more.

    Examples:
        >>> noise = torch.Generator().manual_seed(0)
        >>> weight = torch.full((100,), 2.0, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scheduler = AutoWarmUp(optimizer, 600, steps_per_epoch=5, min_lr=1e-3, max_lr=10.0)
        >>> for _ in range(600):
        ...     loss = (weight - torch.randn(100, generator=noise)).square().sum() / 2
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     scheduler.observe(loss)
        ...     scheduler.step()
        >>> scheduler.peak_step < scheduler.switch_step < scheduler.warmup_steps
        True

        In Lightning, the loss is observed in `training_step`, and `configure_optimizers` returns
        the scheduler with the interval "step":

        >>> def configure_optimizers(self):
        ...     optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        ...     steps = self.trainer.estimated_stepping_batches
        ...     self.warm_up = AutoWarmUp(optimizer, steps, steps_per_epoch=steps // 100)
        ...     return [optimizer], [{"scheduler": self.warm_up, "interval": "step"}]

    References:
        Kim et al. 2021, arXiv:2107.05855; github.com/kakaobrain/autowu.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        steps_per_epoch: int,
        min_lr: float | Sequence[float] = 1e-5,
        max_lr: float | Sequence[float] = 1.0,
        max_warmup_fraction: float = 0.5,
        cooldown_fraction: float | None = None,
        confidence: float = 0.95,
        patience: int = 3,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        groups = len(optimizer.param_groups)
        self._schedules = [
            WarmUpThenCosine(total_steps, low, high, max_warmup_fraction, cooldown_fraction)
            for low, high in zip(
                _for_each_group("min_lr", min_lr, groups),
                _for_each_group("max_lr", max_lr, groups),
                strict=True,
            )
        ]
        if not 0.5 <= confidence < 1:
            raise Refusal(
                "confidence", "lie between 0.5 and 1", repr(confidence), "AutoWU uses 0.95."
            )
        if patience < 1:
            raise Refusal("patience", "be 1 or more", repr(patience), "AutoWU uses 3.")
        if not 0 < patience * steps_per_epoch < self.warmup_steps:
            raise Refusal(
                "steps_per_epoch",
                f"be positive and fit into the {self.warmup_steps} steps of the warm-up more"
                f" than {patience} times (`patience`)",
                repr(steps_per_epoch),
                "Give fewer: the warm-up can end only at a test, and there is one every"
                " `steps_per_epoch` steps.",
            )
        self._steps_per_epoch = steps_per_epoch
        self._confidence = confidence
        self._patience = patience
        self.switch_step: int | None = None
        self.peak_step: float | None = None
        self.probabilities: list[float] = []
        self._losses = torch.empty(0)
        self._epoch = EpochLosses(group)
        super().__init__(optimizer)

    @property
    def warmup_steps(self) -> int:
        """The steps of the longest warm-up, taken if the loss never turns."""
        return self._schedules[0].warmup_steps

    def observe(self, loss: Tensor | float) -> None:
        """Record the loss of the current step, before `step`, without waiting for its value.

        Losses of several micro-batches of one step are averaged. After the warm-up losses are not
        needed, and this does nothing.
        """
        if self.switch_step is None:
            self._epoch.observe(loss)

    def step(self) -> None:  # type: ignore[override]  # as SequentialLR, without an epoch
        """Set the learning rates of the next step; first test the losses if an epoch ends."""
        if self.last_epoch >= 0 and self.switch_step is None:  # else it is the constructor's call
            self._end_warmup_step(self.last_epoch + 1)
        super().step()

    def get_lr(self) -> list[float | Tensor]:
        """Return the next learning rates, from the step and the step of the switch."""
        step, switch, peak = self.last_epoch, self.switch_step, self.peak_step
        if switch is None or peak is None:
            return [schedule.warm_up(step) for schedule in self._schedules]
        return [x.decay(step, switch_step=switch, peak_step=peak) for x in self._schedules]

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs, in builtins and tensors.

        Saving exchanges nothing between ranks. So a state saved in the middle of an epoch has only
        the saving rank's losses of that epoch. At the end of an epoch, or with one rank, resuming
        is exact.
        """
        state = {k: v for k, v in super().state_dict().items() if k not in CONFIGURATION}
        return state | {"probabilities": [*self.probabilities], "_epoch": self._epoch.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the arguments of this scheduler."""
        state, epoch = dict(state_dict), self._epoch
        epoch.load_state_dict(state["_epoch"])
        super().load_state_dict(state | {"_epoch": epoch})
        self.probabilities, self._losses = [*self.probabilities], self._losses.cpu()

    def _end_warmup_step(self, steps: int) -> None:
        self._epoch.end_step()
        if steps >= self.warmup_steps:
            self._switch(steps, peak_step=steps)
        elif steps % self._steps_per_epoch == 0:
            losses = self._epoch.end_epoch()
            self._losses = torch.cat([self._losses, losses])
            if losses.isnan().all():  # there is nothing new to test
                return
            minimum = loss_minimum(self._losses.double().numpy())
            self.probabilities.append(minimum.probability)
            latest = self.probabilities[-self._patience :]
            if len(latest) == self._patience and min(latest) > self._confidence:
                self._switch(steps, peak_step=minimum.position * steps)

    def _switch(self, steps: int, peak_step: float) -> None:
        self.switch_step, self.peak_step = steps, peak_step
        self._losses = torch.empty(0)
        self._epoch.clear()


def _for_each_group(name: str, value: float | Sequence[float], groups: int) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(values) != groups:
        raise Refusal(
            name,
            f"be one number or have one for each of the {groups} parameter groups",
            repr(value),
            "Give them in the optimizer's order.",
        )
    return values
