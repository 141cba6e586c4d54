# SPDX-License-Identifier: Apache-2.0
"""Step times of a run and of a profile of the same device, taken together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reported_runs
from refused import refused

from noisescale import History, predict
from noisescale.history.record import Recorder
from noisescale.prediction.prediction import Prediction
from noisescale.prediction.run_hardware import TimedPlan, step_time_of
from noisescale.step_time import FILE, DeviceTimes, StepTiming


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
        ("transformers", "predict RUN --step-times RUN2"),
        ("own", "predict RUN --step-times RUN2"),
    ],
)
def test_other_batch_sizes_are_timed_by_profile_only_where_it_can(loop: str, command: str) -> None:
    history = run_in(Path("RUN"))
    history.loop = loop

    (step,) = predict(history).document().next

    assert step.splitlines()[1] == f"  noisescale {command}"
    assert ("train 100 steps at 32 on this device" in step) == (loop in ("transformers", "own"))


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
