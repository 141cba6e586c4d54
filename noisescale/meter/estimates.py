# SPDX-License-Identifier: Apache-2.0
"""The noise scales of one run: of the whole gradient, of its groups, of the preconditioned one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from noisescale.estimation.estimator import NoiseScaleEstimator
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.recent import RecentSteps
from noisescale.history.increments import Increments
from noisescale.meter.options import MeterOptions


class MomentSums(NamedTuple):
    """Over steps of batch size B: Σ B, and the sums of the steps' own moments times B."""

    sum_weight: float
    sum_grad_sq_norm: float
    sum_noise_trace: float

    @property
    def mean(self) -> GradientMoments | None:
        """Moments averaged over the steps, weighted by batch size; None before the first."""
        if not self.sum_weight:
            return None
        return GradientMoments(
            grad_sq_norm=self.sum_grad_sq_norm / self.sum_weight,
            noise_trace=self.sum_noise_trace / self.sum_weight,
        )

    def plus(self, moments: GradientMoments, weight: float) -> MomentSums:
        """Return the sums with one step more."""
        return MomentSums(
            sum_weight=self.sum_weight + weight,
            sum_grad_sq_norm=self.sum_grad_sq_norm + weight * moments.grad_sq_norm,
            sum_noise_trace=self.sum_noise_trace + weight * moments.noise_trace,
        )


class Estimates:
    """An estimator for each of them, all with the same options.

    Args:
        groups: Names of the parameter groups.
        options: Of the meter.
    """

    def __init__(self, groups: Sequence[str], options: MeterOptions) -> None:
        self.sums = MomentSums(0.0, 0.0, 0.0)
        """Of the whole gradient, over all steps."""
        self.increments = Increments()
        """Of the whole gradient, since the last row of the history."""
        self.recent: RecentSteps | None = None
        """The last steps of the whole gradient, where decisions are taken on them."""
        self.whole = options.new_estimator()
        self.groups = {name: options.new_estimator() for name in groups}
        self.preconditioned: NoiseScaleEstimator | None = None
        """Of the gradient as Adam scales it, which is not B_simple."""
        if options.preconditioned:
            self.preconditioned = options.new_estimator()

    def update(
        self,
        whole: GradientMoments,
        entries: Sequence[GradientMoments],
        weight: float,
        steps: int = 1,
    ) -> bool:
        """Add one step; False if it is left out, see `NoiseScaleEstimator.update`.

        Args:
            whole: The moments of the whole gradient.
            entries: Those of the groups, of the rest and of the preconditioned gradient if any.
            weight: See `NoiseScaleEstimator.update`.
            steps: See `Increments.add`.
        """
        if not self.whole.update(whole, weight):
            return False
        self.sums = self.sums.plus(whole, weight)
        self.increments.add(whole, weight, steps)
        if self.recent is not None:
            self.recent.add(whole, weight)
        for estimator, moments in zip(self.groups.values(), entries, strict=False):
            estimator.update(moments, weight)
        if self.preconditioned is not None:
            self.preconditioned.update(entries[-1], weight)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return everything `load_state_dict` needs, in builtins."""
        return {
            "sums": list(self.sums),
            "increments": self.increments.state_dict(),
            "whole": self.whole.state_dict(),
            "groups": {name: estimator.state_dict() for name, estimator in self.groups.items()},
            "preconditioned": self.preconditioned and self.preconditioned.state_dict(),
            "recent": None if self.recent is None else self.recent.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Groups go by name: a new one begins with no steps."""
        self.sums = MomentSums(*state["sums"])
        if "increments" in state:  # earlier versions saved none
            self.increments.load_state_dict(state["increments"])
        self.whole.load_state_dict(state["whole"])
        if self.recent is not None and state["recent"] is not None:
            self.recent.load_state_dict(state["recent"])
        for name, estimator in self.groups.items():
            if name in state["groups"]:
                estimator.load_state_dict(state["groups"][name])
        if self.preconditioned is not None and state["preconditioned"] is not None:
            self.preconditioned.load_state_dict(state["preconditioned"])
