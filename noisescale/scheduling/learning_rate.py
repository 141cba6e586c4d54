# SPDX-License-Identifier: Apache-2.0
"""The factor on the run's scheduled learning rate, for each batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from noisescale.checks import is_positive
from noisescale.refusal import Refusal
from noisescale.tradeoff.run_sums import gain_of

_Name = Literal[
    "auto",
    "none",
    "linear",
    "sqrt",
    "capped_sqrt",
    "malladi",
    "adascale",
    "saturating",
]
NAMES: tuple[str, ...] = get_args(_Name)

BY_NOISE_SCALE = ("capped_sqrt", "adascale", "saturating")
"""Rules that use the noise scale."""

LearningRateRule = Callable[[float, float, float], float]
"""The factor on the learning rate, from batch size, base batch size and the run's noise scale."""

LearningRateScaling = _Name | LearningRateRule
"""What users give for `lr_scaling`."""


class Factors(NamedTuple):
    """The factors on an optimizer's settings while it steps."""

    learning_rate: float = 1.0
    """Factor on the learning rate."""
    batch_ratio: float | None = None
    """k = B/B0 if betas and eps follow it too (Malladi's rule), else None."""


NO_FACTORS = Factors()
"""Factors that change nothing."""


def factors_for(
    scaling: LearningRateScaling,
    *,
    batch_size: float,
    base_batch_size: float,
    noise_scale: float = 0.0,
) -> Factors:
    """Return the factors on an optimizer's settings at `batch_size`.

    | scaling | factor, k = B/B0 | for |
    |---|---|---|
    | `"none"` | 1 | |
    | `"linear"` | k | SGD far below the critical batch size |
    | `"sqrt"` | √k | Adam |
    | `"capped_sqrt"` | √k or AdaScale's gain, the nearer to 1 | Adam, up to any batch size |
    | `"malladi"` | √k; 1 - k(1 - β) for both betas, eps/√k | Adam, as an SDE |
    | `"adascale"` | (1 + b/B0)/(1 + b/B) | SGD |
    | `"saturating"` | √ of that | Adam, as McCandlish et al. have it |
    | a function | of B, B0 and b | |

    b is the noise scale of the whole run, not of the moment, as the learning rate at B0 was chosen
    for a whole run. One learning rate ε for many steps of curvature h gains
    Σ ε·|G|² - ε²·h·(|G|² + tr(Σ)/B)/2, which is largest at ε ~ 1/(1 + b/B), b = Σ tr(Σ)/Σ |G|²:
    the large gradients of the first steps dominate.

    `"adascale"` has AdaScale's formula. The b that `BatchSizeController` passes differs from
    AdaScale's estimate in:

    1. b is one ratio of sums of the moments over the run, see `weight_in_run`. AdaScale takes
       exponential averages over about the last 1000/k steps.
    2. Single steps are not clamped. AdaScale sets a step's |G|² to zero where it is negative.
    3. Above B0, b is at most the run's critical batch size so far, or, before that is known, the
       low end of the noise scale's interval. AdaScale has no such bound.
    4. b is updated at decisions on the batch size. AdaScale updates its gain in every step.
    5. Under `Find` b is infinite above B0, so that the gain is k: B* is far below b.
    6. All parameter groups have one gain. In fairscale's code each has its own.

    Args:
        scaling: A name from the table, or a function. (`"auto"` is not allowed here, as it depends
            on the optimizers.) The saturating rule is lr_max/(1 + b/B)^α of McCandlish et al., with
            α = 1/2 for Adam; α = 1, for SGD, is AdaScale's gain.
        batch_size: B, global.
        base_batch_size: B0, the global batch that the learning rate was chosen for.
        noise_scale: b, in examples; 0 if it is not known, which makes the gain 1.

    Raises:
        ValueError: If a function does not return a positive, finite number.

    Examples:
        >>> factors_for("adascale", batch_size=64, base_batch_size=16, noise_scale=64.0)
        Factors(learning_rate=2.5, batch_ratio=None)

    References:
        Malladi et al. 2022, arXiv:2205.10287. McCandlish et al. 2018, arXiv:1812.06162, section 2.
        Johnson et al. 2020, arXiv:2007.05105, appendix B.3; fairscale's `AdaScale`.
    """
    ratio = batch_size / base_batch_size
    if scaling == "none":
        return NO_FACTORS
    if scaling == "linear":
        return Factors(ratio)
    if scaling in ("sqrt", "malladi"):
        return Factors(math.sqrt(ratio), ratio if scaling == "malladi" else None)
    if scaling in BY_NOISE_SCALE:
        gain = gain_of(noise_scale, base_batch_size=base_batch_size, batch_size=batch_size)
        if scaling == "capped_sqrt":
            nearer_to_1 = min if ratio > 1 else max
            return Factors(nearer_to_1(math.sqrt(ratio), gain))
        return Factors(gain if scaling == "adascale" else math.sqrt(gain))
    assert callable(scaling)
    factor = scaling(batch_size, base_batch_size, noise_scale)
    if not is_positive(factor):
        raise Refusal(
            "lr_scaling",
            "give a positive, finite factor",
            f"{factor!r} for a batch size of {batch_size:g}",
            "Return 1.0 to leave the learning rate alone.",
        )
    return Factors(float(factor))
