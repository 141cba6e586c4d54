# SPDX-License-Identifier: Apache-2.0
"""Options of a meter are checked when they are made."""

from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch

from noisescale import NoiseScaleMeter, NoiseScaleMonitor
from noisescale.hugging_face import NoiseScaleCallback
from noisescale.meter.options import MeterOptions
from noisescale.refusal import Refusal


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"window": 1}, ValueError, "`window` must be"),
        ({"confidence": 1.0}, ValueError, "`confidence` must lie"),
        ({"unit": ""}, ValueError, "`unit` must be a word"),
        ({"every_n_steps": 0}, ValueError, "`every_n_steps` must be at least 1"),
        ({"small_batch": "whole"}, ValueError, "`small_batch` must be one of"),
        ({"layers": "some"}, ValueError, "`layers` must be one of"),
        ({"groups": 3}, TypeError, "`groups` must be a mapping or a function"),
        ({"cut": []}, ValueError, "`cut` must be names of modules"),
        ({"small_batch": "rank", "cut": ["net"]}, ValueError, "`cut` must be None"),
        (
            {"layers": "normalization", "extra": [print]},
            ValueError,
            "`extra` must be empty if exam",
        ),
    ],
)
def test_a_wrong_option_is_refused_also_where_others_are_replaced(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MeterOptions(**wrong)
    with pytest.raises(error, match=message):
        replace(MeterOptions(), **wrong)


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        MeterOptions().window = 3  # type: ignore[misc]


def test_only_what_is_left_to_us_is_our_choice() -> None:
    asked_for: list[dict[str, Any]] = [
        {"small_batch": "half"},
        {"cut": ["net"]},
        {"layers": "normalization"},
    ]

    assert MeterOptions().leaves_choice
    assert not any(MeterOptions(**options).leaves_choice for options in asked_for)


@pytest.mark.parametrize(
    "make", [NoiseScaleMonitor, NoiseScaleCallback, partial(NoiseScaleMeter, torch.nn.Linear(2, 1))]
)
def test_a_cost_in_per_cent_is_refused_with_the_share_that_it_stands_for(make: Any) -> None:
    with pytest.raises(Refusal) as refused:
        make(cost=5)

    assert refused.value.arguments == ("cost",)
    assert refused.value.requirement == "be a share of the run's time, above 0 and at most 1"
    assert refused.value.remedy == "Pass 0.05 for 5 %. `every_n_steps=1` measures every step."


@pytest.mark.parametrize("make", [NoiseScaleMonitor, NoiseScaleCallback])
@pytest.mark.parametrize("unit", ["tokens", "Token"])
def test_tokens_that_nothing_counts_are_refused(make: Any, unit: str) -> None:
    with pytest.raises(Refusal) as refused:
        make(unit=unit)

    assert refused.value.arguments == ("unit",)
    assert refused.value.requirement == "come with `batch_size_fn` if it is tokens"
    assert make(unit=unit, batch_size_fn=len) is not None
