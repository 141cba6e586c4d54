# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from noisescale.step_time import DeviceTimes, StepTiming

ONE, TWO = StepTiming(32, 1, 1, 1, 0.1), StepTiming(32.5, 4, 8, 2, 0.3)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    times = DeviceTimes((ONE, TWO), "NVIDIA H100", "2.9.1")

    times.write(tmp_path / "times.json")

    assert DeviceTimes.read(tmp_path / "times.json") == times
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


def test_the_last_time_of_a_configuration_counts() -> None:
    again = StepTiming(32, 1, 1, 1, 0.2)

    times = DeviceTimes((ONE, TWO), "cpu", "2.8").with_timing(again, "2.9")

    assert times == DeviceTimes((TWO, again), "cpu", "2.9")


GOOD = {"timings": [vars(ONE)], "device": "cpu", "torch": "2.9"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "epoch,loss",
        "[]",
        "3",
        "{}",
        json.dumps(GOOD | {"timings": "all"}),
        json.dumps(GOOD | {"timings": [3]}),
        json.dumps(GOOD | {"timings": [{"seconds": 0.1}]}),
        json.dumps(GOOD | {"timings": [vars(ONE) | {"seconds": -1}]}),
        json.dumps(GOOD | {"timings": [vars(ONE) | {"seconds": "fast"}]}),
        json.dumps(GOOD | {"timings": [vars(ONE) | {"devices": 1.5}]}),
        json.dumps(GOOD | {"timings": []}),
    ],
)
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(content)

    with pytest.raises(ValueError, match=r"^`[^`]*times\.json` must "):
        DeviceTimes.read(tmp_path / "times.json")
