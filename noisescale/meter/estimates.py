# SPDX-License-Identifier: Apache-2.0
"""The noise scales of a run: of the whole gradient, of its groups, and extra ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from noisescale.collectors.rows.step_rows import MeasuredStep
from noisescale.estimation.levels import LevelSteps
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.pair_shares import PairShares
from noisescale.history.increments import Increments
from noisescale.meter.extra import ExtraMeasurement
from noisescale.meter.options import MeterOptions
from noisescale.state import State
from noisescale.tradeoff.run_sums import gain_of


class MomentSums(NamedTuple):
    """Sums over steps of weight w, as their batch size: Σ w, and the steps' own moments times w."""

    sum_weight: float = 0.0
    sum_grad_sq_norm: float = 0.0
    sum_noise_trace: float = 0.0

    @property
    def mean(self) -> GradientMoments | None:
        """Moments averaged over the steps, by weight; None before the first."""
        if not self.sum_weight:
            return None
        return GradientMoments(
            grad_sq_norm=self.sum_grad_sq_norm / self.sum_weight,
            noise_trace=self.sum_noise_trace / self.sum_weight,
        )

    def plus(self, moments: GradientMoments, weight: float) -> MomentSums:
        """Return the sums after one more step."""
        return MomentSums(
            sum_weight=self.sum_weight + weight,
            sum_grad_sq_norm=self.sum_grad_sq_norm + weight * moments.grad_sq_norm,
            sum_noise_trace=self.sum_noise_trace + weight * moments.noise_trace,
        )


def weight_in_run(so_far: MomentSums, batch_size: float, base_batch_size: float) -> float:
    """Return the weight of a step in the average over a run, for the run's learning rate.

    A step of batch size B weighs as much as the steps at the first batch size B0 that are worth the
    same: (1 + b/B0)/(1 + b/B)·B0, with b the ratio of the averages before it. Weights by batch size
    alone would let the few steps before a batch shrinks dominate the average for long.

    Examples:
        >>> run = MomentSums().plus(GradientMoments(1.0, noise_trace=6.0), weight=2.0)
        >>> weight_in_run(run, batch_size=6.0, base_batch_size=2.0)  # 2·(1 + 6/2)/(1 + 6/6)
        4.0
    """
    noise, signal = max(so_far.sum_noise_trace, 0.0), so_far.sum_grad_sq_norm
    b = noise / signal if signal > 0 else math.inf
    return base_batch_size * gain_of(b, base_batch_size=base_batch_size, batch_size=batch_size)


class Estimates(State):
    """The estimators of a run, all with the same options.

    Args:
        groups: Names of the parameter groups.
        options: Options of the meter.
        extra: What is measured beside.
    """

    _saved = (
        *("sums", "run", "base_batch_size", "increments", "whole", "step"),
        *("pair_shares", "groups", "extra", "levels"),
    )

    def __init__(
        self, groups: Sequence[str], options: MeterOptions, extra: Sequence[ExtraMeasurement] = ()
    ) -> None:
        self.sums = MomentSums()
        """Sums of the whole gradient's moments over all measured steps."""
        self.run = MomentSums()
        """Sums of the same moments, weighted for the run's learning rate: see `weight_in_run`."""
        self.base_batch_size = 0.0
        """The first measured step's batch size; 0 before it."""
        self.increments = Increments()
        """Increments of the whole gradient since the last row of the history."""
        self.whole = options.new_estimator()
        """The noise scale that is shown, and that decisions go by."""
        self.step = 0
        """Steps of the run up to the last measured one, also if that was left out."""
        self.groups = {name: options.new_estimator() for name in groups}
        self.extra = {one.name: one for one in extra}
        self.pair_shares = PairShares()
        """The mean shares of steps whose parts weigh unequally."""
        self.levels = LevelSteps(options.window, options.confidence)
        """The noise between and within groups of rows."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`, or from one before there were levels."""
        super().load_state_dict({"levels": self.levels.state_dict()} | state)

    def take(self, step: MeasuredStep, *, sound: bool, learning_rate: float = math.nan) -> bool:
        """Take in a measured step; False if it is left out, as it is if it is not `sound`."""
        norms, share = step.norms, None
        self.step += 1 + step.unmeasured_steps
        if sound and norms.weighted and norms.big_batch == norms.examples:  # no mean of means
            share = self.pair_shares.mean(norms.examples, norms.pair_share)
        if not sound:
            return False
        whole = norms.moments(share)
        taken = self.update(
            whole,
            [entry.moments(share) for entry in step.entries],
            weight=norms.examples,
            steps=1 + step.unmeasured_steps,
            learning_rate=learning_rate,
            loss=step.loss,
        )
        if taken and (levels := step.levels) is not None:
            shares = levels.row_share, levels.group_share, levels.still
            variance = whole.noise_trace / norms.big_batch
            of_rows = levels.noise_within
            self.levels.update(
                whole, variance, of_rows, shares, norms.examples, self.step, learning_rate
            )
        return taken

    def update(
        self,
        whole: GradientMoments,
        entries: Sequence[GradientMoments],
        weight: float,
        steps: int = 1,
        learning_rate: float = math.nan,
        loss: float = math.nan,
    ) -> bool:
        """Add one step; False if it is left out, see `NoiseScaleEstimator.update`.

        Args:
            whole: The moments of the whole gradient.
            entries: The moments of the groups, of the rest, and of what is measured beside.
            weight: See `NoiseScaleEstimator.update`.
            steps: The steps that it stands for, see `Increments.add`.
            learning_rate: The step's; NaN if it is not known.
            loss: Its mean loss; NaN if it is not known.
        """
        if not self.whole.update(whole, weight, self.step, learning_rate=learning_rate):
            return False
        self.sums = self.sums.plus(whole, weight)
        self.base_batch_size = self.base_batch_size or weight
        of_run = weight_in_run(self.run, weight, self.base_batch_size)
        self.run = self.run.plus(whole, of_run * steps)
        self.increments.add(whole, weight, steps, loss)
        for estimator, moments in zip(self.groups.values(), entries, strict=False):
            estimator.update(moments, weight, self.step, learning_rate=learning_rate)
        beside = entries[len(self.groups) + 1 :]
        for one, moments in zip(self.extra.values(), beside, strict=True):
            one.update(moments, whole, weight, self.step)
        return True
