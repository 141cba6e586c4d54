# SPDX-License-Identifier: Apache-2.0
"""The seconds of a step on a device that works behind the host."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from noisescale.meter.step_timer import DeviceStepTimer, StepTimer, step_timer

HOST, DEVICE, EXTRA = 0.001, 0.010, 0.007
"""Seconds that a step takes the host, the device, and a measured one the device on top."""


class Queue:
    """A device whose work is over later than the host has put it into the queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.over = 100.0
        monkeypatch.setattr(torch, "Event", self.event)
        monkeypatch.setattr("noisescale.meter.step_timer.current_stream", lambda _: "stream")
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("noisescale.meter.step_timer.time", clock)

    def event(self, device: torch.device, *, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)

    def work(self, seconds: float) -> None:
        self.now += HOST
        self.over = max(self.over, self.now) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.over)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def record(self, stream: Any) -> None:
        assert stream == "stream"
        self.time = max(self.queue.now, self.queue.over)

    def query(self) -> bool:
        return self.queue.now >= self.time

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "it is an error to ask for a time that is still to come"
        return 1000 * (end.time - self.time)


def not_implemented(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("Backend doesn't support events.")


def no_times(*_: Any) -> Any:
    raise RuntimeError("Backend doesn't support elapsedTime.")


def is_measured(step: int) -> bool:
    return step % 10 == 1


def means(queue: Queue, timer: StepTimer, *, log_every: int, steps: int = 100) -> list[float]:
    """At each log step, where the host waits for the device."""
    found = []
    for step in range(1, steps + 1):
        queue.work(DEVICE + EXTRA * is_measured(step))
        timer.step(measured=is_measured(step))
        if step % log_every == 0:
            queue.wait()
            found.append(timer.mean)
            timer.restart()
    return found


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


@pytest.mark.parametrize("log_every", [10, 25, 50])
def test_a_step_takes_what_the_device_takes_for_it(log_every: int, queue: Queue) -> None:
    """Also where a measured step follows a log step, so that the host waits in that one."""
    found = means(queue, DeviceStepTimer(torch.device("cuda")), log_every=log_every)

    assert len(found) == 100 // log_every
    assert found == pytest.approx([DEVICE] * len(found), rel=0.005)


def test_what_a_measured_step_costs_is_told_in_plain_steps(queue: Queue) -> None:
    timer = DeviceStepTimer(torch.device("cuda"))
    for plain in (DEVICE, DEVICE / 10):
        for step in range(50):
            queue.work(plain * (1 + 0.7 * is_measured(step)) + 3 * (step == 31))
            timer.step(measured=is_measured(step))
        queue.wait()
        assert timer.mean == timer.mean
        costs = sorted(timer.costs)
        timer.restart()

        if plain == DEVICE:  # and else a step is too short
            assert costs[:4] == pytest.approx([0.7] * 4)
            assert costs[4:] == pytest.approx([300.7])
    assert costs == []


def test_nothing_waits_for_events_that_are_to_come(queue: Queue) -> None:
    timer = DeviceStepTimer(torch.device("cuda"))

    for _ in range(60):
        queue.work(DEVICE)
        timer.step()
    early = timer.mean, queue.now
    timer.restart()
    queue.wait()

    assert early == (pytest.approx(DEVICE), pytest.approx(100 + 60 * HOST))
    assert timer.mean == pytest.approx(DEVICE)  # of those that were over later


def test_what_happens_between_two_steps_is_left_out(queue: Queue) -> None:
    timer = DeviceStepTimer(torch.device("cuda"))

    for step in range(9):
        queue.work(DEVICE)
        timer.step()
        if step == 4:
            timer.interrupt()
            queue.work(100.0)  # a validation
    queue.wait()

    assert timer.mean == pytest.approx(DEVICE)


def test_no_event_is_read_before_the_mean_and_few_are_kept(queue: Queue, monkeypatch: Any) -> None:
    """To read one may wait for the device, as on MPS."""
    timer = DeviceStepTimer(torch.device("mps"))

    with monkeypatch.context() as unread:
        unread.setattr(Event, "query", no_times)
        for _ in range(1000):
            queue.work(HOST / 2)
            timer.step()

    assert len(timer._unread) < 100
    assert timer.mean == pytest.approx(HOST)


def test_an_interval_that_cannot_be_timed_is_left_out(queue: Queue, monkeypatch: Any) -> None:
    """On MPS stamps may be in the wrong order."""
    timer = DeviceStepTimer(torch.device("mps"))
    means(queue, timer, log_every=50)

    with monkeypatch.context() as broken:
        broken.setattr(Event, "elapsed_time", no_times)
        means(queue, timer, log_every=10, steps=10)

    assert means(queue, timer, log_every=50) == pytest.approx([DEVICE] * 2, rel=0.05)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch, "Event"), (Event, "record"), (Event, "query"), (Event, "elapsed_time")],
)
def test_no_events_are_one_warning(owner: Any, name: str, queue: Queue, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, name, no_times if name == "elapsed_time" else not_implemented)
    timer = DeviceStepTimer(torch.device("cuda"))

    with pytest.warns(UserWarning, match="Backend") as warned:
        found = means(queue, timer, log_every=10)

    assert all(map(math.isnan, found))
    assert len(warned) == 1


def test_the_clock_is_that_of_the_device() -> None:
    assert type(step_timer(torch.device("cpu"))) is StepTimer
    assert type(step_timer(torch.device("cuda"))) is DeviceStepTimer
