# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from noisescale.report.sparkline import sparkline


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([1, 2, 4, 8, 16, 32, 64, 128], "▁▂▃▄▅▆▇█"),
        ([8, 4, 2, 1], "█▆▃▁"),
        ([3**k for k in range(9)], "▁▂▃▄▅▆▇██"),
        ([1, math.nan, math.inf, 2], "▁··█"),
        ([math.nan, -1, 0], "···"),
        ([100, 101, 100], "▄▅▄"),
        ([7], "▅"),
        ([], ""),
    ],
)
def test_heights_are_logarithms_and_level_ones_stay(values: list[float], drawn: str) -> None:
    assert sparkline(np.arange(float(len(values))), np.array(values, float), 32) == drawn


def test_each_character_stands_for_an_equal_part_of_the_steps() -> None:
    """Rows are denser at the end: nine of ten are in the last half."""
    steps = np.concatenate([np.linspace(0, 49, 10), np.linspace(51, 100, 90)])
    values = np.where(steps < 50, 1.0, 100.0)

    assert sparkline(steps, values, 10) == "▁▁▁▁▁█████"
