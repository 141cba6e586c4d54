# SPDX-License-Identifier: Apache-2.0
"""What a run was timed at, and on how many nodes devices are."""

import math
from typing import Any

import numpy as np
import pytest
import reported_runs

from noisescale.prediction.run_hardware import (
    devices_of,
    largest_fitting,
    nodes_of,
    peaks_in,
    timed_plans,
)
from noisescale.step_time import StepTiming


def history(**changed: Any) -> dict[str, np.ndarray]:
    """1,000 steps of 64 examples on two devices in two micro-batches, 0.1 s each."""
    about = {"rows": 100, "every": 10, "seconds": 0.1, "accumulation": 2, **changed}
    size = changed.get("batch_size", 64) * np.ones(100)
    return reported_runs.history(**{**about, "batch_size": size, "examples": np.cumsum(10 * size)})


def timings_of(run: dict[str, np.ndarray]) -> list[StepTiming]:
    return [plan.timing for plan in timed_plans(run)]


def test_devices_and_micro_batches_share_a_batch() -> None:
    assert timings_of(history()) == [StepTiming(16, 2, devices=2, nodes=1, seconds=0.1)]
    unknown = history(devices=math.nan)
    assert timings_of(unknown) == [StepTiming(32, 2, devices=1, nodes=1, seconds=0.1)]


def test_batches_of_nearly_one_size_are_one_configuration_with_the_median_time() -> None:
    """Of tokens, say; a checkpoint was written in one row."""
    sizes = 64 * np.random.default_rng(0).uniform(0.97, 1.03, 100)
    seconds = np.where(np.arange(100) == 7, 30, 0.1)

    (timing,) = timings_of(history(batch_size=sizes, seconds_per_step=seconds))

    assert timing.device_batch_size == pytest.approx(16, rel=0.01)
    assert timing.seconds == pytest.approx(0.1)


def test_a_configuration_counts_from_a_twentieth_of_the_steps_on() -> None:
    for rows, known in ((10, 2), (4, 1)):
        size = np.where(np.arange(100) < rows, 32, 64)
        assert len(timings_of(history(batch_size=size))) == known


def test_rows_that_were_not_timed_are_left_out() -> None:
    seconds = np.where(np.arange(100) < 30, math.nan, 0.1)
    seconds[30:80] = 0

    (timing,) = timings_of(history(seconds_per_step=seconds))

    assert timing.seconds == pytest.approx(0.1)
    assert timings_of(history(seconds_per_step=math.nan)) == []


def test_a_run_that_went_on_with_more_devices_has_those_of_its_end() -> None:
    devices = np.where(np.arange(100) < 50, 2.0, 4.0)
    devices[[0, 99]] = math.nan  # not recorded there

    assert devices_of(history(devices=devices)) == 4
    assert devices_of(history(devices=math.nan)) is None
    plans = [(t.device_batch_size, t.devices) for t in timings_of(history(devices=devices))]
    assert sorted(plans) == [(8, 4), (16, 2)]
    # Those beyond one node are spread over whole nodes.
    assert [nodes_of(devices, 8) for devices in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    assert nodes_of(10**6, math.inf) == 1


def test_times_of_nearly_one_device_batch_are_one_timing() -> None:
    """The mean of ten steps with an epoch's short last one is 30.3: its time differs by noise."""
    sizes = np.array([32.0, 32.0, 30.3, 32.0, 30.3, 16.0, 16.0])
    seconds = np.array([0.1, 0.1, 0.2, 0.1, 0.2, 0.06, 0.06])
    run = reported_runs.history(
        rows=7, every=10, examples=np.cumsum(20 * sizes), seconds_per_step=seconds
    )

    small, large = timings_of(run)

    assert (small.device_batch_size, small.seconds) == (16, 0.06)
    assert (large.device_batch_size, large.seconds) == (32, 0.1)


GB = 1e9


@pytest.mark.parametrize(
    ("peaks", "most", "bounds"),
    [
        # 2 GB, and 0.1 GB an example: 0.9 x 80 GB take 700 examples.
        ([(10, 3), (30, 5), (20, 4)], None, (700, 620, 780)),
        ([(10, 8)], None, (math.nan, 90, math.inf)),  # one size: nothing is fixed at the bound
        ([(10, 80)], None, (math.nan, 10, math.inf)),  # full
        ([(10, 75)], None, (math.nan, 10, math.inf)),
        ([(10, 3), (20, 4)], 500, (500, 500, 500)),  # what did not fit is the most
        ([(10, 3)], 500, (math.nan, 240, 500)),
    ],
)
def test_peaks_of_memory_say_what_fits(
    peaks: list[tuple[int, float]], most: int | None, bounds: tuple[float, float, float]
) -> None:
    found = largest_fitting([(size, peak * GB) for size, peak in peaks], 80 * GB, too_large=most)

    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx(bounds, nan_ok=True)


def test_the_most_memory_so_far_is_of_a_size_if_no_larger_one_came_before() -> None:
    size = np.repeat([64.0, 256.0, 128.0, 512.0], 25)  # of two devices, in two micro-batches
    peak = np.repeat([2 * GB, 4 * GB, 4 * GB, 7 * GB], 25)
    peak[0] = 1 * GB

    found = peaks_in(history(batch_size=size, peak_memory=peak))

    assert found == ((16, 2 * GB), (64, 4 * GB), (128, 7 * GB))
    assert peaks_in(history()) == ()
    for peaks in ([], [(10, 4 * GB), (20, 3.9 * GB)]):  # memory that does not grow
        assert largest_fitting(peaks, 80 * GB) is None
