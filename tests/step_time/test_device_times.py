# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from noisescale.step_time import DeviceTimes, LoaderTiming, StepTiming

ONE, TWO = StepTiming(32, 1, 1, 1, 0.1), StepTiming(32.5, 4, 8, 2, 0.3)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    times = DeviceTimes(
        (ONE, TWO),
        "NVIDIA H100",
        "2.9.1",
        memory=8e10,
        peaks=((32, 1e9), (64, 2e9)),
        too_large=128,
        loader=LoaderTiming(32, 0.03, 0.01, workers=2),
    )

    times.write(tmp_path / "times.json")

    assert DeviceTimes.read(tmp_path / "times.json") == times
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


def test_the_last_time_of_a_configuration_counts() -> None:
    again = StepTiming(32, 1, 1, 1, 0.2)

    times = DeviceTimes((ONE, TWO), "H100", "2.9", 8e10, ((32, 1e9), (64, 2e9)), too_large=64)

    assert times.with_timing(again, 3e9) == DeviceTimes(
        (TWO, again), "H100", "2.9", 8e10, ((32, 3e9), (64, 2e9)), too_large=64
    )
    assert times.with_timing(again) == replace(times, timings=(TWO, again))


def test_a_size_that_fits_now_is_not_too_large() -> None:
    times = DeviceTimes((ONE,), "H100", "2.9", 8e10, too_large=64)

    assert times.with_timing(StepTiming(64, 1, 1, 1, 0.2), 1e9).too_large is None
    assert times.with_timing(StepTiming(48, 1, 1, 1, 0.2), 1e9).too_large == 64


GOOD = {"timings": [vars(ONE)], "device": "cpu", "torch": "2.9", "memory": None, "peaks": []}
GOOD |= {"too_large": None, "loader": None}


WRONG: list[dict[str, object]] = [
    *({"timings": wrong} for wrong in ("all", [3], [{"seconds": 0.1}], [])),
    *({"timings": [vars(ONE) | {"seconds": wrong}]} for wrong in (-1, "fast")),
    *({"peaks": [[3]]}, {"memory": "much"}, {"loader": {"seconds": 3}}),
]
OTHERS = ["", "epoch,loss", "[]", "{}", json.dumps(GOOD)[:-1]]


@pytest.mark.parametrize("content", [*OTHERS, *(json.dumps(GOOD | wrong) for wrong in WRONG)])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(content)

    with refused(f"{path}"):
        DeviceTimes.read(path)
    with refused(f"{tmp_path}", got="a path without a file"):
        DeviceTimes.read(tmp_path)


def test_what_can_be_read_is_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(json.dumps(GOOD))

    assert DeviceTimes.read(tmp_path / "times.json") == DeviceTimes((ONE,), "cpu", "2.9")


@pytest.mark.parametrize(("seconds", "bounds"), [(0.007, False), (0.009, True), (0.03, True)])
def test_a_loader_bounds_a_training_from_nearly_a_step_on(seconds: float, bounds: bool) -> None:
    loader = LoaderTiming(32, seconds, 0.01, workers=0)

    assert loader.bounds_training == bounds


@pytest.mark.parametrize(
    ("name", "values", "got"),
    [
        ("seconds", (32, 1, 1, 1, float("nan")), "nan"),
        ("devices", (32, 1, 0, 1, 0.1), "0"),
        ("accumulation", (32, 1.5, 1, 1, 0.1), "1.5"),
        ("nodes", (32, 1, 1, 2, 0.1), "2 > 1"),
    ],
)
def test_impossible_configurations_are_refused(name: str, values: Any, got: str) -> None:
    with refused(name, got=got):
        StepTiming(*values)
