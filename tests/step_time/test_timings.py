# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import pytest
from refused import refused

from noisescale.step_time import StepTiming, read_timings, write_timings

ONE = StepTiming(32, 1, 1, 1, 0.1)
TWO = StepTiming(32.5, 4, 8, 2, 0.3)


def test_timings_of_several_runs_are_collected_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"

    write_timings(path, [ONE])
    write_timings(path, [TWO, ONE])

    assert read_timings(path) == [ONE, TWO, ONE]
    assert list(tmp_path.iterdir()) == [path]


HEADER = "device_batch_size,accumulation,devices,nodes,seconds\n"


@pytest.mark.parametrize(
    ("content", "requirement"),
    [
        ("", "have the columns"),
        (HEADER, "have timings"),
        (HEADER + "32,1,1,1,0.1\n64,1,1,1,-1\n", "have positive numbers"),
        (HEADER + "32,1.5,1,1,0.1\n", "whole numbers"),
        (HEADER + "32,1,1,1\n", "have 5 cells"),
    ],
)
def test_other_files_are_refused_and_kept(tmp_path: Path, content: str, requirement: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(content)

    with refused(f"{path}", requirement=requirement) as raised:
        write_timings(path, [ONE])

    assert path.read_text() == content
    if (lines := content.count("\n")) > 1:  # the last one is wrong
        assert f"line {lines}" in str(raised.value)


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
