# SPDX-License-Identifier: Apache-2.0
"""What `predict` takes where it is given nothing."""

import math
from typing import Any

import numpy as np
import pytest
from refused import refused
from reported_runs import history

from noisescale import History, Prediction, predict
from noisescale.step_time import StepTiming, fit_step_time


def predicted(batch_size: Any = 64.0, noise_scale: float = 192.0, **options: Any) -> Prediction:
    """From 1,000 steps at this noise scale on two devices."""
    size, resolved = batch_size * np.ones(50), math.isfinite(noise_scale)
    ends = (0.9 * noise_scale, 1.1 * noise_scale) if resolved else (128, math.inf)
    scales = {"noise_scale": noise_scale, "low": ends[0], "high": ends[1], "seconds": 0.1}
    sizes = {"batch_size": size, "examples": np.cumsum(20 * size)}
    return predict(history(rows=50, every=20, **scales, **sizes), **options)


def sizes(prediction: Prediction, devices: int = 2) -> list[float]:
    return [row.batch_size for row in prediction.rows_for(devices)]


@pytest.mark.parametrize(
    ("run", "ladder"),
    [
        ({"noise_scale": 192}, [16, 32, 64, 128, 256, 512]),  # 64/4 to 8·64
        ({"noise_scale": 20}, [8, 16, 32, 64, 128, 256, 512]),  # 64/8 to 8·64
        ({"batch_size": 48}, [8, 16, 32, 48, 64, 128, 256]),  # the run's own is on it
        ({"noise_scale": math.nan}, [16, 32, 64, 128, 256, 512]),  # around the bound
        # Around the mean batch size, which is 256.
        ({"batch_size": np.repeat([64, 448], 25), "noise_scale": 256}, [64 << k for k in range(6)]),
    ],
)
def test_the_ladder_is_of_what_matters_up_to_eight_times_off_the_run(
    run: dict[str, Any], ladder: list[float]
) -> None:
    assert sizes(predicted(**run)) == ladder


@pytest.mark.parametrize(("first", "own"), [(26, 64), (24, 256), (25, None)])
def test_a_runs_own_batch_size_is_that_of_more_than_half_of_its_steps(
    first: int, own: float | None
) -> None:
    assert predicted(np.where(np.arange(50) < first, 64, 256)).own_batch_size == own


def test_devices_are_doubled_three_times_and_given_ones_come_in_order_and_once() -> None:
    prediction = predicted(batch_sizes=[512, 64, 128, 64], devices=[4, 1, 4])

    assert sorted({row.devices for row in predicted().rows}) == [2, 4, 8, 16]
    assert [row.devices for row in prediction.rows] == [1, 1, 1, 4, 4, 4]
    assert sizes(prediction, 4) == [64, 128, 512]


def test_the_ladder_stays_near_the_run_however_large_a_noise_scale_is_read() -> None:
    for noise_scale in (1e14, 1e200):
        prediction = predicted(noise_scale=noise_scale)
        assert sizes(prediction) == [16, 32, 64, 128, 256, 512]
        assert "around it are not shown" in " ".join(prediction.warnings)


@pytest.mark.parametrize(
    ("noise_scale", "batch_size"),
    [(3, 4), (3, 64), (100, 4), (100, 64), (3000, 64), (3000, 1024), (30000, 4), (30000, 1024)],
)
def test_more_devices_are_never_dominated(noise_scale: float, batch_size: float) -> None:
    p = predicted(batch_size, noise_scale=noise_scale, devices=[2, 4, 16])

    if (best := p.on_more_devices) is not None:
        assert not any(
            row.hours.value < 0.999 * best.hours.value
            and row.device_hours.value < 0.999 * best.device_hours.value
            for row in p.rows
        )


@pytest.mark.parametrize(
    ("seconds_per_example", "noise_scale", "recommended"),
    [
        (1e-6, 3000, 256),  # of 64 and 256
        (1.0, 3000, 64),
        (1e-6, 100, 64),
        (1e-6, 3, 64),  # 16 takes more steps, each as long
        (1.0, 3, 16),
    ],
)
def test_of_timed_batch_sizes_up_to_the_suggested_one_the_fastest_is_recommended(
    seconds_per_example: float, noise_scale: float, recommended: int
) -> None:
    timings = [
        StepTiming(size, 1, 2, 1, 0.01 + 2 * size * seconds_per_example) for size in (8, 32, 128)
    ]

    p = predicted(noise_scale=noise_scale, devices=[2], step_times=fit_step_time(timings))

    assert p.recommended_batch_size == recommended


def test_a_monitor_is_taken_for_its_history_and_one_number_needs_no_list() -> None:
    class Monitor:
        history = History.from_columns(history())

    single = predict(Monitor(), batch_sizes=128, devices=2)

    assert single.to_dict() == predict(Monitor.history, batch_sizes=[128], devices=[2]).to_dict()
    no_run: Any = 42
    with refused("run", error=TypeError, got="42"):
        predict(no_run)
