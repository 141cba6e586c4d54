# SPDX-License-Identifier: Apache-2.0
import pytest

from noisescale.lab.tune.make_job import read_budget


@pytest.mark.parametrize("text", ["0h", "-1h", "1", "h", "", "nanh", "1d"])
def test_a_budget_is_positive_and_has_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="`budget` must be positive device-hours with a unit"):
        read_budget(text)


def test_a_budget_is_read_in_hours() -> None:
    assert (read_budget("0.5h"), read_budget("30m"), read_budget("90s")) == (0.5, 0.5, 0.025)
