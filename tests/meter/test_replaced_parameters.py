# SPDX-License-Identifier: Apache-2.0
"""Parameters that take the place of measured ones."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fits import network
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter


def model_and_meter() -> tuple[nn.Sequential, NoiseScaleMeter]:
    model = network()
    return model, NoiseScaleMeter(model, small_batch="micro_batch", every_n_steps=1)


def train(model: nn.Module, meter: NoiseScaleMeter, steps: int = 1) -> None:
    for _ in range(2 * steps):
        model.zero_grad()
        for _ in range(2):
            meter.backward(model(torch.randn(3, 8)).square().mean() / 2, 3)
        meter.step()


def test_from_the_first_step_on_they_are_not_measured_and_named_once() -> None:
    model, meter = model_and_meter()
    model[2] = nn.Linear(16, 3)

    with pytest.warns(match=r"others in place of '2\.weight' and 1 more\. `module.to") as told:
        train(model, meter, steps=2)

    assert len(told) == 1
    assert not meter.measuring


def test_in_mid_run_a_warning_names_them_once_and_steps_are_left_out() -> None:
    model, meter = model_and_meter()
    train(model, meter)
    model[0].bias = nn.Parameter(torch.zeros(16))

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


def one_rank_replaces_a_parameter(model: nn.Module, at: int, **options: Any) -> int:
    """Return how many of four steps are measured."""
    meter = NoiseScaleMeter(model, every_n_steps=1, **options)
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            if step == at and dist.get_rank() == 1:
                getattr(model, "module", model)[2] = nn.Linear(16, 3)
            meter.backward((model(torch.randn(6, 8)) - 1).square().mean(), 6)
            meter.step()
            model.zero_grad()
        return meter.measured_steps


def test_the_rank_is_in_the_collectives_of_the_others() -> None:
    """In those that average for the meter, and in those that sum up norms."""

    def trained() -> tuple[int, int]:
        ddp = DistributedDataParallel(network(), find_unused_parameters=True)
        return (
            one_rank_replaces_a_parameter(network(), at=2, averaged=False),
            one_rank_replaces_a_parameter(ddp, at=0),
        )

    assert on_ranks(2, trained) == [(2, 0)] * 2
