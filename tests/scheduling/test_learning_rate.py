# SPDX-License-Identifier: Apache-2.0
"""Factors on the learning rate against the papers' formulas and AdaScale's published values."""

import math
import re

import pytest
import torch

from noisescale import NoiseScaleMeter
from noisescale.estimation.moments import GradientMoments
from noisescale.scheduling.learning_rate import (
    Factors,
    adascale_gain,
    factors_for,
)


@pytest.mark.parametrize(
    ("inputs", "gain"),
    [
        (([1.0, 0.0], [0.0, 1.0]), 4 / 3),
        (([1.0, 1.0], [1.0, 1.0]), 1.0),
        (([-1.0, 1.0], [1.0, -1.0]), 2.0),  # |G|² is estimated to be -2: it counts as zero
        (([1.0, 4.0], [5.0, 0.5]), 1.4688796680),
        (([-0.2, 3.0], [5.0, 0.5]), 1.8472893902),
    ],
)
@pytest.mark.filterwarnings("ignore:All ranks or micro-batches had the same gradient")
def test_gain_of_two_micro_batches_is_the_published_one(
    inputs: tuple[list[float], list[float]], gain: float
) -> None:
    """Values of fairscale's tests: Linear(2, 2) with bias, the sum of outputs for a loss."""
    model = torch.nn.Linear(2, 2)
    meter = NoiseScaleMeter(model, small_batch="micro_batch")
    meter.follow()
    gradients = []
    for x in inputs:
        before = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
        ]
        meter.backward(model(torch.tensor([x])).sum() / 2, local_batch_size=1)
        gradients.append(
            [2 * (p.grad - b) for p, b in zip(model.parameters(), before, strict=True)]
        )
    meter.step()

    moments = meter.average_moments
    if inputs[0] == inputs[1]:  # the meter leaves out what it takes for copies
        assert moments is None
        moments = GradientMoments(grad_sq_norm=6.0, noise_trace=0.0)

    assert adascale_gain(
        moments.noise_trace, moments.grad_sq_norm, base_batch_size=1, batch_size=2
    ) == pytest.approx(gain, abs=1e-6)
    # By hand, from the two gradients: S = Σ|g_i - ḡ|², |G|² = |ḡ|² - S/2, clamped at zero.
    first, second = (torch.cat([g.flatten() for g in one]).double() for one in gradients)
    mean = (first + second) / 2
    noise = (first - mean).norm() ** 2 + (second - mean).norm() ** 2
    signal = (mean.norm() ** 2 - noise / 2).clamp(min=0)
    assert float((noise + signal) / (noise / 2 + signal)) == pytest.approx(gain, abs=1e-5)


@pytest.mark.parametrize("batch_size", [4, 16, 64, 1024])
def test_factors_are_the_papers(batch_size: int) -> None:
    k, b = batch_size / 16, 40.0
    rules = {
        "none": 1.0,
        "linear": k,
        "sqrt": math.sqrt(k),
        "malladi": math.sqrt(k),
        "adascale": (1 + b / 16) / (1 + b / batch_size),
        "saturating": math.sqrt((1 + b / 16) / (1 + b / batch_size)),
        "capped_sqrt": {4: 0.5, 16: 1.0, 64: 2.0, 1024: (1 + b / 16) / (1 + b / 1024)}[batch_size],
    }

    for name, factor in rules.items():
        found = factors_for(name, batch_size=batch_size, base_batch_size=16, noise_scale=40.0)  # type: ignore[arg-type]
        assert found.learning_rate == pytest.approx(factor), name
        assert found.batch_ratio == (k if name == "malladi" else None)


def test_the_gain_lies_between_one_and_the_ratio_of_batch_sizes() -> None:
    sizes = {"base_batch_size": 8, "batch_size": 64}

    assert adascale_gain(1.0, 0.0, **sizes) == pytest.approx(8)
    assert adascale_gain(0.0, 1.0, **sizes) == pytest.approx(1)
    assert adascale_gain(-1.0, -1.0, **sizes) == pytest.approx(8)
    assert 1 < adascale_gain(5.0, 1.0, **sizes) < 8


def test_before_anything_is_measured_the_gain_is_one() -> None:
    assert factors_for("adascale", batch_size=64, base_batch_size=8) == Factors(1.0)


def test_a_function_is_given_both_batch_sizes_and_the_noise_scale() -> None:
    seen = []

    def rule(batch_size: float, base_batch_size: float, noise_scale: float) -> float:
        seen.append((batch_size, base_batch_size, noise_scale))
        return 3.0

    found = factors_for(rule, batch_size=64, base_batch_size=8, noise_scale=40.0)

    assert found == Factors(3.0)
    assert seen == [(64, 8, 40.0)]


def test_where_the_noise_scale_has_no_end_the_gain_is_the_ratio_of_batch_sizes() -> None:
    found = factors_for("adascale", batch_size=64, base_batch_size=8, noise_scale=math.inf)

    assert found == Factors(8.0)


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, None, "2"])
def test_a_function_that_gives_no_factor_is_told(factor: object) -> None:
    message = (
        f"`lr_scaling` must give a positive, finite factor, got {factor!r} for a batch size of 64."
        " Return 1.0 to leave the learning rate alone."
    )

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        factors_for(lambda *_: factor, batch_size=64, base_batch_size=8)  # type: ignore[arg-type, return-value]
