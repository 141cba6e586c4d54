# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from noisescale import NoiseScale


@pytest.mark.parametrize(
    ("noise_scale", "shown"),
    [
        (
            NoiseScale(19.13, 15.2, 24.81, 0.1, 1.913, 200, unit="<b>tokens"),
            "<b>19.1 &lt;b&gt;tokens</b> <small>(95 % 15.2 to 24.8, 200 steps)</small>",
        ),
        (
            NoiseScale(math.nan, 310.4, math.inf, -0.1, 40.0, 50),
            "<b>above 310 examples</b> <small>(not resolved at 95 % after 50 steps)</small>",
        ),
        (NoiseScale.unknown(), "<b>not measured yet</b>"),
    ],
    ids=["resolved", "open", "unknown"],
)
def test_a_notebook_shows_the_value_and_how_sure_it_is(noise_scale: NoiseScale, shown: str) -> None:
    assert noise_scale._repr_html_() == shown
