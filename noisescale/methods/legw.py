# SPDX-License-Identifier: Apache-2.0
"""Linear warm-up that is carried over from one batch size to another."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from noisescale.refusal import Refusal


class LegwWarmUp(LRScheduler):
    """Raise the learning rate linearly, for longer and to a higher peak at larger batches (LEGW).

    At the batch size k·B₀, a learning rate lr₀ and w₀ epochs of warm-up, tuned at B₀, become

        peak = √k·lr₀          warm-up = k·w₀ epochs          decay as before, in epochs

    An epoch at k·B₀ has 1/k of the steps, so k·w₀ epochs have the same number of steps as w₀ epochs
    at B₀. LEGW thus warms up over the same number of steps and k times the examples. Step t, from
    0, has

        lr(t) = √k·lr₀·min((t + 1)/W, 1)          W = k·w₀·steps_per_epoch

    which differs from the paper's t/W in that the first step is not one with a learning rate of 0.

    The optimizer is built with lr₀, in every parameter group. Other schedulers decide what follows
    the warm-up. Make them *after* this one, as it sets the `initial_lr` that they start from to the
    peak. `ChainedScheduler` multiplies a decay whose epochs count from the start of the run, as the
    paper's do; `SequentialLR` begins one at the milestone `warmup_steps`.

    Args:
        optimizer: An optimizer with the learning rates of the base batch size.
        base_batch_size: B₀, global, in examples.
        batch_size: k·B₀, global, in examples.
        base_warmup_epochs: w₀, the epochs of warm-up at the base batch size.
        steps_per_epoch: Optimizer steps in an epoch at `batch_size`.
        last_epoch: Step to continue from, as in every scheduler of torch.

    Raises:
        ValueError: If a number is not positive (`base_warmup_epochs` may be 0) and finite, or
            another scheduler of this optimizer was made before.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> warm_up = LegwWarmUp(
        ...     optimizer,
        ...     base_batch_size=256,
        ...     batch_size=1024,
        ...     base_warmup_epochs=0.5,
        ...     steps_per_epoch=4,
        ... )
        >>> warm_up.warmup_steps, warm_up.base_lrs, warm_up.get_last_lr()
        (8, [0.2], [0.025])
        >>> decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30 * 4)
        >>> scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm_up, decay])

    References:
        You et al. 2019, arXiv:1901.08256.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        base_batch_size: float,
        batch_size: float,
        base_warmup_epochs: float,
        steps_per_epoch: float,
        last_epoch: int = -1,
    ) -> None:
        for name, value, least in (
            ("base_batch_size", base_batch_size, "positive"),
            ("batch_size", batch_size, "positive"),
            ("base_warmup_epochs", base_warmup_epochs, "0 or more"),
            ("steps_per_epoch", steps_per_epoch, "positive"),
        ):
            if not (0 < value < math.inf or (value == 0 and least == "0 or more")):
                raise Refusal(
                    name,
                    f"be {least} and finite",
                    repr(value),
                    "Batch sizes are global, warm-up is counted in epochs, and an epoch in"
                    " optimizer steps.",
                )
        scale = batch_size / base_batch_size
        self.warmup_steps = round(scale * base_warmup_epochs * steps_per_epoch)
        if last_epoch == -1:
            _scale_learning_rates(optimizer, math.sqrt(scale))
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the next learning rates: a factor times the current ones, to allow chaining."""
        factor = self._ramp(self.last_epoch)
        if self.last_epoch > 0:
            factor /= self._ramp(self.last_epoch - 1)
        return [group["lr"] * factor for group in self.optimizer.param_groups]

    def _get_closed_form_lr(self) -> list[float | Tensor]:
        return [peak * self._ramp(self.last_epoch) for peak in self.base_lrs]

    def _ramp(self, step: int) -> float:
        return min((step + 1) / self.warmup_steps, 1.0) if self.warmup_steps else 1.0


def _scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply what the schedulers of `optimizer` will start from."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise Refusal(
            "optimizer",
            "have no scheduler yet",
            "one whose `initial_lr` is set",
            "Make LegwWarmUp before other schedulers, and before a checkpoint is loaded.",
        )
    for group in optimizer.param_groups:
        group["lr"] *= factor
