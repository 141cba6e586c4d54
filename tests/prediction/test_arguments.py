# SPDX-License-Identifier: Apache-2.0
"""What `predict` takes where it is given nothing."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from reported_runs import history

from noisescale import History, Prediction, predict
from noisescale.refusal import TypeRefusal
from noisescale.step_time import StepTiming, fit_step_time

STEP = np.arange(20.0, 1001, 20)


def predicted(batch_size: Any = 64.0, noise_scale: float = 192.0, **options: Any) -> Prediction:
    """From 1,000 steps at this noise scale on two devices."""
    size = batch_size * np.ones(50)
    columns = {"noise_scale": noise_scale, "low": 128, "high": math.inf, "seconds_per_step": 0.1}
    if math.isfinite(noise_scale):
        columns |= {"low": 0.9 * noise_scale, "high": 1.1 * noise_scale}
    rows = {name: value * np.ones(50) for name, value in {**columns, "devices": 2}.items()}
    history = {"step": STEP, "examples": np.cumsum(20 * size), "batch_size": size, **rows}
    return predict(history, **options)


def sizes(prediction: Prediction, devices: int = 2) -> list[float]:
    return [row.batch_size for row in prediction.rows_for(devices)]


def test_the_ladder_is_of_what_matters_up_to_eight_times_off_the_run() -> None:
    above, below = predicted(noise_scale=192), predicted(noise_scale=20)

    assert sizes(above) == [16, 32, 64, 128, 256, 512]  # 64/4 to 8·64
    assert sizes(below) == [8, 16, 32, 64, 128, 256, 512]  # 64/8 to 8·64


def test_the_runs_own_batch_size_is_on_the_ladder_whatever_it_is() -> None:
    prediction = predicted(batch_size=48)

    assert prediction.own_batch_size == 48
    assert sizes(prediction) == [8, 16, 32, 48, 64, 128, 256]


def test_where_only_a_bound_is_known_the_ladder_is_around_that() -> None:
    assert sizes(predicted(noise_scale=math.nan)) == [16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize(("first", "own"), [(26, 64), (24, 256), (25, None)])
def test_a_runs_own_batch_size_is_that_of_more_than_half_of_its_steps(
    first: int, own: float | None
) -> None:
    assert predicted(np.where(np.arange(50) < first, 64, 256)).own_batch_size == own


def test_a_run_whose_batch_size_changed_has_its_ladder_around_the_mean() -> None:
    prediction = predicted(np.where(np.arange(50) < 25, 64, 448), noise_scale=256)

    assert sizes(prediction) == [64, 128, 256, 512, 1024, 2048]


def test_devices_are_doubled_three_times() -> None:
    assert sorted({row.devices for row in predicted().rows}) == [2, 4, 8, 16]


def test_batch_sizes_and_devices_come_in_order_and_once() -> None:
    prediction = predicted(batch_sizes=[512, 64, 128, 64], devices=[4, 1, 4])

    assert [row.devices for row in prediction.rows] == [1, 1, 1, 4, 4, 4]
    assert sizes(prediction, 4) == [64, 128, 512]


@pytest.mark.parametrize("noise_scale", [1e14, 1e200])
def test_the_ladder_stays_near_the_run_however_large_a_noise_scale_is_read(
    noise_scale: float,
) -> None:
    prediction = predicted(noise_scale=noise_scale)

    assert sizes(prediction) == [16, 32, 64, 128, 256, 512]
    said = "is more than 8 times off the run's own: batch sizes around it are not shown"
    assert said in " ".join(prediction.warnings)


@pytest.mark.parametrize("batch_size", [4, 64, 1024])
@pytest.mark.parametrize("noise_scale", [3, 100, 3000, 30000])
def test_more_devices_are_never_dominated(noise_scale: float, batch_size: float) -> None:
    p = predicted(batch_size, noise_scale=noise_scale, devices=[2, 4, 16])

    if (best := p.on_more_devices) is not None:
        assert not any(
            row.hours.value < 0.999 * best.hours.value
            and row.device_hours.value < 0.999 * best.device_hours.value
            for row in p.rows
        )


@pytest.mark.parametrize("noise_scale", [3, 100, 3000])
def test_the_fastest_of_the_timed_batch_sizes_is_recommended(noise_scale: float) -> None:
    timings = [StepTiming(size, 1, 2, 1, 0.01 + size / 1000) for size in (8, 32, 128)]
    p = predicted(noise_scale=noise_scale, devices=[2], step_times=fit_step_time(timings))

    timed = [row for row in p.rows if row.basis == "timed"]

    assert len(timed) > 1
    assert p.recommended.hours.value == min(row.hours.value for row in timed)


def test_endless_batch_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^`batch_sizes` must be at most 256 values, got more"):
        predicted(batch_sizes=itertools.count(1))


def test_a_monitor_is_taken_for_its_history() -> None:
    class Monitor:
        history = History.from_columns(history())

    by_monitor, by_history = predict(Monitor()), predict(Monitor.history)

    assert by_monitor.to_dict() == by_history.to_dict()


def test_one_number_needs_no_list() -> None:
    single = predict(history(), batch_sizes=128, devices=2)

    assert single.to_dict() == predict(history(), batch_sizes=[128], devices=[2]).to_dict()


@pytest.mark.parametrize("given", [None, 42, object()])
def test_what_is_no_run_is_refused(given: Any) -> None:
    with pytest.raises(TypeRefusal) as refused:
        predict(given)

    assert refused.value.arguments == ("run",)
    assert refused.value.got == repr(given)
