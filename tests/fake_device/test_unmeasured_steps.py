# SPDX-License-Identifier: Apache-2.0
"""Most steps are not measured. In these the host neither reads from the device nor copies to it."""

from typing import Any

import pytest
import torch
from torch import nn

from fake_device.transfers import Transfers
from noisescale import NoiseScaleMeter

LATER = 24
"""By then what is found out in the first steps has been."""


@pytest.mark.parametrize("small_batch", ["half", "micro_batch", "example"])
def test_a_step_that_is_not_measured_transfers_nothing(
    device: torch.device, small_batch: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    meter = NoiseScaleMeter(model, every_n_steps=3, small_batch=small_batch)
    transfers = []
    for _ in range(LATER + 9):
        batches = [torch.randn(8, 4).to(device) for _ in range(2)]
        due = meter._capture.due
        model.zero_grad()
        with Transfers() as counted:
            for x in batches:
                meter.backward(model(x).square().mean() / 2, 8)
            meter.step()
        transfers.append((due, counted))

    later = transfers[LATER:]
    assert sum(due for due, _ in later) == 3
    assert [counted.of_package() for due, counted in later if not due] == [{}] * 6
    assert all(counted.launched for _, counted in later)
