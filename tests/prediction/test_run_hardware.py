# SPDX-License-Identifier: Apache-2.0
"""What a run was timed at, on how many nodes devices are, and the times of other steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reported_runs
from refused import refused

from noisescale import History, predict
from noisescale.history.record import Recorder
from noisescale.prediction.prediction import Prediction
from noisescale.prediction.run_hardware import (
    TimedPlan,
    devices_of,
    largest_fitting,
    nodes_of,
    peaks_in,
    step_time_of,
    timed_plans,
)
from noisescale.step_time import FILE, DeviceTimes, StepTiming


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


def test_the_short_batch_that_ends_an_epoch_lends_no_row_its_fewer_micro_batches() -> None:
    """Every eighth row is of a lone rest of 4 examples; nine steps of its ten had two of 32."""
    rest = np.arange(100) % 8 == 7
    run = history(accumulation=np.where(rest, 1.0, 2.0))
    run["batch_size"] = np.where(rest, 4.0, 64.0)
    run["examples"] = np.cumsum(np.where(rest, 9 * 64 + 4, 640))

    assert timings_of(run) == [StepTiming(16, 2, devices=2, nodes=1, seconds=0.1)]
    p = predict(run)
    assert p.hardware.max_device_batch_size == 16
    assert p.fastest_timed is None


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


def timing(size: float, accumulation: int = 1, devices: int = 1, sync: float = 0.0) -> StepTiming:
    """10 ms and 1 ms an example for each micro-batch; devices wait for each other at the end."""
    seconds = accumulation * (0.01 + 0.001 * size) + sync
    return StepTiming(size, accumulation, devices, 1, seconds)


PROFILED = (*map(timing, (8, 16, 32, 64, 128)), timing(16, 2))


def test_a_run_says_how_long_its_steps_take_and_a_profile_how_others_compare() -> None:
    own = timing(16)  # 26 ms; the run took half as long again

    model = step_time_of((TimedPlan(own, steps=100, mean=1.5 * own.seconds),), PROFILED)

    assert model is not None
    assert model.seconds(16).value == pytest.approx(1.5 * 0.026)
    assert model.seconds(64).value == pytest.approx(1.5 * 0.074, rel=0.01)
    assert step_time_of((), PROFILED) is not None
    assert step_time_of(()) is None
    # Several plans of a run take its time together.
    plans = (TimedPlan(timing(16), 100, 0.05), TimedPlan(timing(64), 300, 0.1))
    model = step_time_of(plans, PROFILED)
    assert model is not None
    took = 100 * model.seconds(16).value + 300 * model.seconds(64).value
    assert took == pytest.approx(100 * 0.05 + 300 * 0.1)


def test_a_run_on_more_devices_than_the_profile_shows_what_they_wait_for() -> None:
    own, large = timing(16, devices=2, sync=0.03), timing(256)
    plans = (TimedPlan(own, 100, own.seconds), TimedPlan(large, 100, large.seconds))

    model = step_time_of(plans, PROFILED)

    assert model is not None
    assert model.seconds(16, 1, 2).value == pytest.approx(0.056, rel=0.01)
    assert model.seconds(64, 1, 2).value == pytest.approx(0.104, rel=0.02)
    assert model.seconds(64, 1, 1).value == pytest.approx(0.074, rel=0.02)
    timed = [model.is_timed(*plan) for plan in ((64, 1, 2), (64, 1, 4), (256,), (512,))]
    assert timed == [True, False, True, False]


def run_in(folder: Path, seconds: float = 0.026, **more: float) -> History:
    """1,000 steps of 16 examples on one device, at a noise scale of 192."""
    about = {"rows": 100, "every": 10, "noise_scale": 192, "batch_size": 16, "devices": 1}
    history = History.from_columns(reported_runs.history(seconds=seconds, **about, **more))
    history.source = folder
    return history


def memory(total: float) -> dict[str, float]:
    return {"device_memory": total, "peak_memory": 2e9}


def seconds_at(prediction: Prediction, size: float) -> tuple[float, str | None]:
    row = next(x for x in prediction.rows if (x.batch_size, x.devices) == (size, 1))
    return row.seconds_per_step.value, row.basis


def profiled_in(
    folder: Path, device: str = "CPU", memory: float | None = None, **more: Any
) -> None:
    DeviceTimes(PROFILED, device, "2.9", memory, **more).write(folder / FILE)


def test_times_in_the_folder_of_a_run_are_found(tmp_path: Path) -> None:
    profiled_in(tmp_path)

    found = predict(run_in(tmp_path), [16, 64])

    assert seconds_at(found, 16) == (pytest.approx(0.026), "timed")
    assert seconds_at(found, 64) == (pytest.approx(0.074, rel=0.01), "timed")
    assert found.hardware.max_device_batch_size == 128
    assert found.hardware.doubts == ()
    # Times that are given win.
    slower = [replace(t, seconds=9 * t.seconds) for t in PROFILED]
    DeviceTimes(tuple(slower), "another", "2.9").write(tmp_path / "other.json")
    found = predict(run_in(tmp_path), [16, 64], step_times=tmp_path / "other.json")
    assert seconds_at(found, 16) == (pytest.approx(9 * 0.026, rel=0.01), "timed")
    assert seconds_at(found, 64) == (pytest.approx(9 * 0.074, rel=0.01), "timed")
    assert found.hardware.doubts == ()


def short_run(folder: Path, unit: str = "examples") -> Path:
    """The folder of 100 steps of 64 examples at 74 ms."""
    history, recorder = History(unit=unit), Recorder(folder)
    for step in (50, 100):
        row = {"step": step, "examples": 64 * step, "batch_size": 64, "devices": 1}
        row |= {"accumulation": 1, "seconds_per_step": 0.074, "low": 1.0}
        recorder.add(history, row)
        history.append(**row)
    return folder


def test_the_times_of_a_short_run_count_beside_the_runs_own(tmp_path: Path) -> None:
    found = predict(run_in(tmp_path), [16, 32, 64, 256], step_times=short_run(tmp_path / "short"))

    assert seconds_at(found, 16) == (pytest.approx(0.026), "timed")
    assert seconds_at(found, 64) == (pytest.approx(0.074), "timed")
    assert 0.026 < seconds_at(found, 32)[0] < 0.074
    assert seconds_at(found, 256)[1] == "assumed"
    with refused("step_times", requirement="in examples"):
        predict(run_in(tmp_path), step_times=short_run(tmp_path / "other", "tokens"))


def test_batch_sizes_that_were_timed_are_among_the_rows(tmp_path: Path) -> None:
    DeviceTimes((*PROFILED, timing(48), timing(24.5)), "CPU", "2.9").write(tmp_path / FILE)

    found = predict(run_in(tmp_path))

    sizes = {row.batch_size for row in found.rows if row.basis == "timed" and row.devices == 1}
    assert sizes >= {16, 32, 48, 64, 128}
    assert 24.5 not in sizes
    assert predict(run_in(tmp_path), [16, 64]).rows[0].batch_size == 16


@pytest.mark.parametrize(
    ("loop", "command"),
    [
        ("", "profile train.py:make --run RUN"),
        ("lightning", "profile train.py:make --run RUN"),
        ("transformers", "profile train.py:make --run RUN"),
        ("own", "predict RUN --step-times RUN2"),
    ],
)
def test_other_batch_sizes_are_timed_by_profile_only_where_it_can(loop: str, command: str) -> None:
    history = run_in(Path("RUN"))
    history.loop = loop

    step = predict(history).document().next[-1]

    assert step.splitlines()[1] == f"  noisescale {command}"
    assert ("train 100 steps at 32 on this device" in step) == (loop == "own")


@pytest.mark.parametrize("slower", [1.4, 2])
def test_times_that_differ_are_doubtful_and_scaled(slower: float, tmp_path: Path) -> None:
    profiled_in(tmp_path)

    found = predict(run_in(tmp_path, slower * 0.026), [16, 64])

    assert seconds_at(found, 64) == (pytest.approx(slower * 0.074, rel=0.01), "timed")
    doubts = found.hardware.doubts
    assert len(doubts) == (slower > 1.5)
    assert not doubts or (doubts[0] == found.warnings[-1] and " 2 times" in doubts[0])


@pytest.mark.parametrize(
    ("profile", "own", "parts"),
    [
        *(({}, {"seconds": 0.026 * x}, ["`noisescale profile` with"]) for x in (5, 0.2)),
        # Also if a step takes as long there.
        ({"device": "Big", "memory": 8e10}, memory(1.6e10), ["is of Big", "80 GB", "16 GB"]),
        ({"device": "Big"}, memory(1.6e10), ["is of Big", "without a memory", "16 GB"]),
        (None, {}, []),
    ],
)
def test_damaged_times_and_those_of_another_device_are_left_out_with_the_remedy(
    profile: dict[str, Any] | None, own: dict[str, float], parts: list[str], tmp_path: Path
) -> None:
    if profile is None:
        (tmp_path / FILE).write_text('{"timings": [')
    else:
        profiled_in(tmp_path, **profile)

    found = predict(run_in(tmp_path, **own), [16, 64])

    assert seconds_at(found, 16) == (pytest.approx(own.get("seconds", 0.026)), "timed")
    assert seconds_at(found, 64)[1] == "assumed"
    (doubt,) = found.hardware.doubts
    assert doubt in found.warnings
    assert [part for part in ("are left out", *parts) if part not in doubt] == []


def test_the_memory_of_a_profile_says_what_fits_and_that_of_a_run_alone_a_bound(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path, **memory(8e10))

    alone, without = (predict(each).hardware for each in (run, run_in(tmp_path)))
    profiled_in(tmp_path, "Big", 8e10, peaks=((16, 3e9), (64, 6e9)))
    found = predict(run, [16, 64]).hardware

    assert (alone.max_device_batch_size, found.max_device_batch_size) == (16, 128)
    assert alone.largest_fitting is not None
    assert alone.largest_fitting.low == pytest.approx(0.9 * 16 * 40)
    assert without.largest_fitting is None
    assert found.largest_fitting is not None
    assert found.largest_fitting.value == pytest.approx(16 + (0.9 * 80 - 3) * 16)
