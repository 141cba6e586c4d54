# SPDX-License-Identifier: Apache-2.0
"""Options of a meter are checked when they are made."""

from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from refused import refused

from noisescale import NoiseScaleMeter, NoiseScaleMonitor
from noisescale.hugging_face import NoiseScaleCallback
from noisescale.meter.options import MeterOptions


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("window", {"window": 1}),
        ("confidence", {"confidence": 1.0}),
        ("unit", {"unit": ""}),
        ("every_n_steps", {"every_n_steps": 0}),
        ("small_batch", {"small_batch": "whole"}),
        ("groups", {"groups": 3}),
        ("cut", {"cut": []}),
        ("cut", {"small_batch": "rank", "cut": ["net"]}),
    ],
)
def test_a_wrong_option_is_refused_also_in_replace(argument: str, wrong: dict[str, Any]) -> None:
    error = TypeError if argument == "groups" else ValueError
    with refused(argument, error=error):
        MeterOptions(**wrong)
    with refused(argument, error=error):
        replace(MeterOptions(), **wrong)


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        MeterOptions().window = 3  # type: ignore[misc]


def test_only_what_is_left_to_us_is_our_choice() -> None:
    assert MeterOptions().leaves_choice
    for asked_for in ({"small_batch": "half"}, {"cut": ["net"]}):
        assert not MeterOptions(**asked_for).leaves_choice


@pytest.mark.parametrize(
    "make", [NoiseScaleMonitor, NoiseScaleCallback, partial(NoiseScaleMeter, torch.nn.Linear(2, 1))]
)
def test_a_share_in_per_cent_is_refused_with_the_share_that_it_stands_for(make: Any) -> None:
    with refused("max_overhead", requirement="share", remedy="Pass 0.05 for 5 %."):
        make(max_overhead=5)


@pytest.mark.parametrize("make", [NoiseScaleMonitor, NoiseScaleCallback])
@pytest.mark.parametrize("unit", ["tokens", "Token"])
def test_tokens_that_nothing_counts_are_refused(make: Any, unit: str) -> None:
    with refused("unit", requirement="`batch_size_fn`"):
        make(unit=unit)
    assert make(unit=unit, batch_size_fn=len) is not None
