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
from noisescale.meter.meter import Meter
from noisescale.meter.options import MeterOptions
from noisescale.meter.run_log import Metrics, RunLog

DEVICE = torch.device("fake:1")
OPTIONS = MeterOptions(every_n_steps=2, small_batch="micro_batch")


class Training:
    """Of a linear layer, in steps of two micro-batches."""

    def __init__(self, device: torch.device | str) -> None:
        self.model = nn.Linear(8, 4).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, foreach=False)
        meter = Meter.from_options(self.model, OPTIONS, self.optimizer)
        self.logged = RunLog(meter, self.optimizer)

    def after(self, steps: int) -> RunLog:
        """What logs, after some more steps."""
        for _ in range(steps):
            for _ in range(2):
                x = torch.randn(6, 8).to(self.model.weight.device)
                self.logged.meter.backward(self.model(x).square().mean() / 2, len(x))
            self.logged.meter.step()
            self.logged.note_step()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.logged


def seconds(metrics: Metrics) -> float:
    return metrics.metrics["noise_scale/seconds_per_step"]


def test_the_time_is_kept_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock stands still."""
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr("noisescale.meter.step_timer.time", clock)

    assert 0 < seconds(Training(DEVICE).after(12).read()) < 10
    assert seconds(Training("cpu").after(12).read()) == 0


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
        metrics = Training(DEVICE).after(12).read()

    assert math.isnan(seconds(metrics))
    assert math.isfinite(metrics.estimate.low)  # it was measured
    assert len(warned) == 1, [str(w.message) for w in warned]


def test_another_device_is_timed_from_the_next_log_step_on() -> None:
    training = Training("fake:0")

    for device, timed in (("fake:0", "fake:0"), ("fake:1", "fake:0"), ("fake:1", "fake:1")):
        training.model.to(device)
        assert training.after(4).timer.device == torch.device(timed)
        assert seconds(training.logged.read()) > 0


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
