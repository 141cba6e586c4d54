# SPDX-License-Identifier: Apache-2.0
"""Parameters that take the place of measured ones."""

import warnings

import pytest
import torch
from torch import nn

from noisescale import NoiseScaleMeter


def model_and_meter() -> tuple[nn.Sequential, NoiseScaleMeter]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, NoiseScaleMeter(model, small_batch="micro_batch", every_n_steps=1)


def train(model: nn.Module, meter: NoiseScaleMeter, steps: int = 1) -> None:
    for _ in range(2 * steps):
        model.zero_grad()
        for _ in range(2):
            meter.backward(model(torch.randn(3, 4)).square().mean() / 2, 3)
        meter.step()


def test_they_are_refused_by_name() -> None:
    model, meter = model_and_meter()
    model[2] = nn.Linear(5, 1)

    with pytest.raises(ValueError, match=r"others in place of '2\.weight' and 1 more\. `module.to"):
        train(model, meter)


def test_in_mid_run_a_warning_names_them_once_and_steps_are_left_out() -> None:
    model, meter = model_and_meter()
    train(model, meter)
    model[0].bias = nn.Parameter(torch.zeros(5))

    with pytest.warns(UserWarning, match=r"others in place of '0\.bias'\. ") as warned:
        train(model, meter, steps=3)

    assert (meter.measured_steps, meter.skipped_steps, len(warned)) == (2, 6, 1)


def test_parameters_that_are_elsewhere_in_the_model_are_measured() -> None:
    """As modules are wrapped."""
    model, meter = model_and_meter()
    model[0] = nn.Sequential(model[0], nn.Dropout())
    model[1] = nn.ReLU()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, meter, steps=2)

    assert (meter.measured_steps, meter.skipped_steps) == (4, 0)
