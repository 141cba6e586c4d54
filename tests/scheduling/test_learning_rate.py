# SPDX-License-Identifier: Apache-2.0
"""Factors on the learning rate against the papers' formulas and AdaScale's published values."""

import math

import pytest
import torch
from refused import refused

from noisescale import NoiseScaleMeter
from noisescale.scheduling.learning_rate import Factors, factors_for


@pytest.mark.parametrize(
    ("inputs", "gain"),
    [
        (([1.0, 0.0], [0.0, 1.0]), 4 / 3),
        (([-1.0, 1.0], [1.0, -1.0]), 2.0),  # |G|² is estimated to be -2: it counts as zero
        (([1.0, 4.0], [5.0, 0.5]), 1.4688796680),
        (([-0.2, 3.0], [5.0, 0.5]), 1.8472893902),
    ],
)
def test_gain_of_two_micro_batches_is_the_published_one(
    inputs: tuple[list[float], list[float]], gain: float
) -> None:
    """Values of fairscale's tests: Linear(2, 2) with bias, the sum of outputs for a loss."""
    model = torch.nn.Linear(2, 2)
    meter = NoiseScaleMeter(model, small_batch="micro_batch")
    meter.follow()
    for x in inputs:
        meter.backward(model(torch.tensor([x])).sum() / 2, local_batch_size=1)
    meter.step()

    signal, noise = meter.average_moments

    ratio = max(noise, 0.0) / signal if signal > 0 else math.inf
    found = factors_for("adascale", noise_scale=ratio, base_batch_size=1, batch_size=2)
    assert found.learning_rate == pytest.approx(gain, abs=1e-6)


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
    sizes = {"batch_size": 64, "base_batch_size": 8}

    assert factors_for("adascale", **sizes) == Factors(1.0)  # before a measurement
    assert factors_for("adascale", noise_scale=5.0, **sizes) == Factors((13 / 8) / (69 / 64))
    assert factors_for("adascale", noise_scale=math.inf, **sizes) == Factors(8.0)


def test_a_function_is_given_both_batch_sizes_and_the_noise_scale() -> None:
    sizes = {"batch_size": 64, "base_batch_size": 8, "noise_scale": 40.0}

    assert factors_for(lambda *seen: float(seen == (64, 8, 40.0)), **sizes) == Factors(1.0)


@pytest.mark.parametrize("factor", [0, math.nan, math.inf, None, "2"])
def test_a_function_that_gives_no_factor_is_told(factor: object) -> None:
    with refused("lr_scaling", got=f"{factor!r} for a batch size of 64"):
        factors_for(lambda *_: factor, batch_size=64, base_batch_size=8)  # type: ignore[arg-type, return-value]
