# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step, by the events of the device or without any."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fake_device.streams import SYNC_DEVICE, Streams
from noisescale.collectors import devices
from noisescale.lab.sweep.timed_run import TimedRun
from noisescale.meter.logged_meter import LoggedMeter, Metrics
from noisescale.meter.meter import Meter
from noisescale.meter.options import MeterOptions

DEVICE = torch.device("fake:1")
OPTIONS = MeterOptions(every_n_steps=2, small_batch="micro_batch")


def trained(model: nn.Module, steps: int = 12) -> Metrics:
    """What is logged after some steps of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    logged = LoggedMeter(Meter.from_options(model, OPTIONS, optimizer), optimizer)
    for _ in range(steps):
        train(logged, model, optimizer)
    assert logged.meter.measured_steps == steps / 2
    return logged.read()


def train(logged: LoggedMeter, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        x = torch.randn(6, 8).to(model.weight.device)
        logged.meter.backward(model(x).square().mean() / 2, len(x))
    logged.step()
    optimizer.step()
    optimizer.zero_grad()


def seconds(metrics: Metrics) -> float:
    return metrics.all["noise_scale/seconds_per_step"]


def test_the_time_is_kept_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock stands still."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr("noisescale.meter.step_timer.time", clock)

    assert 0 < seconds(trained(nn.Linear(8, 4).to(DEVICE))) < 10
    assert seconds(trained(nn.Linear(8, 4))) == 0


@pytest.mark.parametrize("lacks", ["events", "streams"])
def test_without_events_or_streams_training_is_measured_with_one_warning(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the backend has no {lacks}")

    devices._has_streams.cache_clear()  # of this process, which is the test's own
    if lacks == "streams":
        monkeypatch.setattr(torch.accelerator, "current_stream", none)
    monkeypatch.setattr(torch, "Event", none)

    with pytest.warns(UserWarning, match=f"not known on this device .*no {lacks}") as warned:
        metrics = trained(nn.Linear(8, 4).to(DEVICE))

    assert math.isnan(seconds(metrics))
    assert math.isfinite(metrics.estimate.low)
    assert len(warned) == 1, [str(w.message) for w in warned]


def test_another_device_is_timed_from_the_next_log_step_on() -> None:
    model = nn.Linear(8, 4).to("fake:0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    logged = LoggedMeter(Meter.from_options(model, OPTIONS, optimizer), optimizer)
    found = []

    for device in ("fake:0", "fake:1", "fake:1"):
        model.to(device)
        for _ in range(4):
            train(logged, model, optimizer)
        found.append((str(logged.timer.device), seconds(logged.read()) > 0))

    assert found == [("fake:0", True), ("fake:0", True), ("fake:1", True)]


@pytest.mark.parametrize(("device", "waits_for"), [("fake:0", [0]), ("fake:1", [1]), ("cpu", [])])
def test_a_timed_training_waits_for_its_device_before_it_looks_at_the_clock(
    device: str, waits_for: list[int]
) -> None:
    strategy = SimpleNamespace(root_device=torch.device(device))
    run = TimedRun({}, "loss")
    torch.ones(1, device=device)  # torch waits only for what has been used

    with Streams() as streams:
        run._pause(SimpleNamespace(strategy=strategy))  # type: ignore[arg-type]

    assert [index for kind, _, index, _ in streams.entries if kind == SYNC_DEVICE] == waits_for
    assert run._paused > 0
