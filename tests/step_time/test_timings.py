# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from refused import refused

from noisescale.step_time import StepTiming


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
