# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest

from noisescale.step_time import StepTiming, read_timings, write_timings

ONE = StepTiming(32, 1, 1, 1, 0.1)
TWO = StepTiming(32.5, 4, 8, 2, 0.3)


def test_timings_of_several_runs_are_collected_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"

    write_timings(path, [ONE])
    write_timings(path, [TWO, ONE])

    assert read_timings(path) == [ONE, TWO, ONE]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "",
            "must have the columns device_batch_size, accumulation, devices, nodes, seconds, got"
            " no device_batch_size, accumulation, devices, nodes, seconds. Make it with"
            " `noisescale profile`.",
        ),
        (
            "device_batch_size,accumulation,devices,nodes,seconds\n",
            "must have timings, got only column names. Make it with `noisescale profile`.",
        ),
        (
            "device_batch_size,accumulation,devices,nodes,seconds\n32,1,1,1,0.1\n64,1,1,1,-1\n",
            "must have positive numbers, and whole numbers of accumulation, devices and nodes, got"
            " ['64', '1', '1', '1', '-1'] in line 3. Correct or remove that line.",
        ),
        (
            "device_batch_size,accumulation,devices,nodes,seconds\n32,1,1,1\n",
            "must have 5 cells in each line, got 4 in line 2. The line may have a comma within a"
            " number, be damaged, or not be complete yet. Correct or remove it.",
        ),
        (
            "device_batch_size,accumulation,devices,nodes,seconds\n32,1.5,1,1,0.1\n",
            "must have positive numbers, and whole numbers of accumulation, devices and nodes, got"
            " ['32', '1.5', '1', '1', '0.1'] in line 2. Correct or remove that line.",
        ),
    ],
)
def test_files_of_something_else_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(content)

    with pytest.raises(ValueError, match=f"^`{re.escape(str(path))}` {re.escape(message)}$"):
        write_timings(path, [ONE])

    assert path.read_text() == content


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^`seconds` must be positive and finite, got nan\. L"):
        StepTiming(32, 1, 1, 1, float("nan"))
    with pytest.raises(ValueError, match=r"^`devices` must be positive and finite, got 0\. Leave"):
        StepTiming(32, 1, 0, 1, 0.1)
    with pytest.raises(ValueError, match=r"^`accumulation` must be a whole number, got 1\.5\. G"):
        StepTiming(32, 1.5, 1, 1, 0.1)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"^`nodes` must not exceed `devices`, got 2 > 1\. Count the devices of all nodes\.$",
    ):
        StepTiming(32, 1, 1, 2, 0.1)
