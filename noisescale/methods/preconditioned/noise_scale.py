# SPDX-License-Identifier: Apache-2.0
"""PreconditionedNoiseScale: the noise scale of the gradient as Adam scales it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.meter.extra import ExtraMeasurement
from noisescale.meter.options import MeterOptions
from noisescale.methods.preconditioned.preconditioner import AdamPreconditioner


class PreconditionedNoiseScale(ExtraMeasurement):
    """Measure tr(Σ)/|G|² of g/(√v̂ + ε), in the unit of the noise scale. It is not B_simple.

    v̂ is the optimizer's mean of squared gradients, from the steps before. A measured step reads its
    gradients a second time. See the page "Ways of training" for what is known about it.

        monitor = NoiseScaleMonitor(extra=[PreconditionedNoiseScale])
    """

    name = "preconditioned"
    _saved = ("_estimator",)
    title = "Preconditioned noise scale (not B_simple)"

    def __init__(self, options: MeterOptions, optimizer: Optimizer | None) -> None:
        super().__init__(options, optimizer)
        self._estimator = options.new_estimator()

    def entry(self, parameters: Sequence[Parameter]) -> AdamPreconditioner:
        """Return the entry; a ValueError if the optimizer is not of Adam's family."""
        return AdamPreconditioner(self.optimizer)

    def update(
        self, moments: GradientMoments, whole: GradientMoments, weight: float, step: int
    ) -> None:
        """Add one step. Before the optimizer's first there is no v̂, and the step is left out."""
        self._estimator.update(moments, weight, step)

    def estimate(self, noise_scale_at: Callable[[float], NoiseScale], step: int) -> NoiseScale:
        """Return the noise scale now."""
        return self._estimator.estimate(step)
