# SPDX-License-Identifier: Apache-2.0
"""The memory of a device, as torch's module of the device has it."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from noisescale import NoiseScaleMeter
from noisescale.collectors.devices import Memory, memory_of, reset_peak_memory
from noisescale.meter import run_log
from noisescale.meter.run_log import RunLog


class Accelerator:
    """Counts as torch.cuda does; anything else that is asked of it is an error."""

    def __init__(self) -> None:
        self.peak = 3e9

    def max_memory_allocated(self, device: torch.device) -> int:
        assert device.index == 1
        return int(self.peak)

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=80_000_000_000)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = 0


def test_torchs_own_counts_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("xpu:1")
    monkeypatch.setattr(torch, "xpu", Accelerator())

    assert memory_of(device) == Memory(3e9, 8e10)
    reset_peak_memory(device)
    assert memory_of(device) == Memory(0, 8e10)


def test_no_memory_is_known_of_a_cpu() -> None:
    assert memory_of(torch.device("cpu")) is None
    assert memory_of(torch.device("mps")) is None
    reset_peak_memory(torch.device("cpu"))


def test_the_history_has_the_memory_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for at log steps, not in steps."""
    memory = Mock(side_effect=[None, Memory(3e9, 8e10)])
    monkeypatch.setattr(run_log, "memory_of", memory)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    logged = RunLog(NoiseScaleMeter(model, small_batch="micro_batch"), optimizer)

    for step in range(6):
        for _ in range(2):
            logged.meter.backward(model(torch.randn(6, 8)).square().mean() / 2, 6)
        logged.meter.step()
        logged.note_step()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            assert ("noise_scale/peak_memory" in logged.read().metrics) == (step == 5)

    assert memory.call_count == 2
    for name, last in (("peak_memory", 3e9), ("device_memory", 8e10)):
        assert logged.history[name].tolist() == pytest.approx([math.nan, last], nan_ok=True)
