# SPDX-License-Identifier: Apache-2.0
"""The inner-product and orthogonality tests of Bollapragada et al. (2018)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from noisescale.checks import require_positive
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.methods.inner_product.along_gradient import NoiseAlongGradient
from noisescale.plan import Plan
from noisescale.scheduling.gate import Gate
from noisescale.scheduling.policies import RatioRule
from noisescale.scheduling.policy import Policy, Progress, Wanted

WIDEST = math.tan(math.radians(80))
"""ν of the orthogonality test: noise turns a step by at most 80 degrees."""


class InnerProductTest(Policy):
    """b_ip/θ²: the noise along the gradient is at most θ times the gradient.

    The norm test bounds all noise, tr(Σ)/B. Noise across the gradient hardly changes whether a step
    goes down. The inner-product test bounds only b_ip = G'ΣG/|G|⁴, which is far below B_simple:

        G'ΣG/B <= θ²·|G|⁴, so B >= b_ip/θ²

    With ν the noise across the gradient is bounded, too (the orthogonality test; the two together
    are the augmented inner-product test):

        (tr(Σ) - G'ΣG/|G|²)/B <= ν²·|G|², so B >= (B_simple - b_ip)/ν²

    As in the paper a batch never shrinks. Early in training b_ip is below one example, and a batch
    that had shrunk to that would never see the gradient again.

    The tests in the paper take a step's own gradient for G, which is biased: with all of its noise
    in both, its variance along itself is too large or, where its norm is mostly noise, the ratio is
    far too small. Here gradients are taken along the optimizer's momentum, whose noise is of
    earlier steps, and moments are averaged without bias, see `NoiseAlongGradient`.

        scheduler = BatchSizeScheduler(InnerProductTest(nu=WIDEST))

    Args:
        theta: θ. At 0.9 one standard deviation of noise leaves a tenth of the descent.
        nu: ν; None: only the inner-product test. `WIDEST`, tan(80°) = 5.67, lets the root mean
            square of the noise across the gradient turn a step by 80° from it.
        gate: Arguments of the `Gate` that decides.

    Raises:
        ValueError: If an argument is not a positive number.

    Examples:
        >>> along = NoiseScale(8.1, 6.48, 9.72, grad_sq_norm=1.0, noise_trace=8.1, steps=50)
        >>> whole = NoiseScale(408.1, 306.48, 509.72, 1.0, 408.1, steps=50)
        >>> half = Progress(50, 200.0, extra={"along_gradient": along})
        >>> print(InnerProductTest()(whole, Plan(4, 1), half).reason)
        noise along the gradient 10 (8 to 12) asks for 10
        >>> print(InnerProductTest(nu=5.0)(whole, Plan(4, 1), half).reason)
        noise along and across the gradient 16 (11.9 to 20.1) asks for 16

    References:
        Bollapragada, Byrd, Nocedal 2018, "Adaptive sampling strategies for stochastic
        optimization", arXiv:1710.11258. Ostroukhov et al. 2024, "AdaBatchGrad", arXiv:2402.05264.
    """

    needs_noise_scale = True
    extra = NoiseAlongGradient
    by_reduced_values = True

    def __init__(self, theta: float = 0.9, nu: float | None = None, **gate: Any) -> None:
        self._theta = require_positive("theta", theta, "Leave it at 0.9.")
        self._nu = nu if nu is None else require_positive("nu", nu, "Leave it out, or give 5.67.")
        self._gate = Gate(RatioRule(), **gate)
        across = "" if nu is None else "and across "
        self._gate.seen = f"noise along {across}the gradient"

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return the wanted batch size with a reason; the plan's own batch size to stay."""
        unknown = NoiseScale.unknown(noise_scale.confidence)
        along = progress.extra.get(NoiseAlongGradient.name, unknown)
        wanted = self._gate(self._required_batch_size(noise_scale, along), plan, progress)
        if wanted < plan.batch_size:
            return Wanted(plan.batch_size, f"{wanted.reason}, and the tests hold")
        return wanted

    def _required_batch_size(self, whole: NoiseScale, along: NoiseScale) -> NoiseScale:
        """Return the batch size that the tests need, with the interval that follows from both."""
        low, value, high = (x / self._theta**2 for x in (along.low, along.value, along.high))
        if self._nu is not None:
            across = self._nu**2
            low = max(low, (whole.low - along.high) / across)
            high = max(high, (whole.high - along.low) / across)
            value = max(value, (whole.value - along.value) / across)
        low, value, high = (x if math.isnan(x) else max(x, 0.0) for x in (low, value, high))
        return replace(along, low=low, value=value, high=high)
