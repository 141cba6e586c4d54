# SPDX-License-Identifier: Apache-2.0
import re
from typing import Any

import pytest
import torch
from torch import nn

from noisescale import NoiseScaleMeter, NoiseScaleMonitor
from noisescale.collectors.groups import check_groups, groups_of

NAMES = ["blocks.0.attention.weight", "blocks.0.norm.weight", "blocks.1.norm.bias", "head.weight"]
FOUND = ["attention", "normalization", "normalization", None]


@pytest.mark.parametrize(
    "groups",
    [
        {"normalization": r"norm\.", "attention": "attention", "never": "^blocks"},
        {"normalization": ["0.norm", "1.norm"], "attention": ("attention",)},
        {"normalization": "norm", "attention": "attention"},
        lambda name: {"norm": "normalization", "attention": "attention"}.get(name.split(".")[-2]),
    ],
)
def test_a_parameter_belongs_to_the_first_group_that_fits(groups: Any) -> None:
    assert groups_of(NAMES, groups) == FOUND


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (3, TypeError, "`groups` must be a mapping or a function, got 3. Pass a dict"),
        ({"a": 3}, TypeError, "`groups` must map names to regular expressions, got 'a': 3. Pass"),
        ({"a": []}, TypeError, "`groups` must map names to regular expressions, got 'a': []. Pass"),
        ({"a": ["b", 3]}, TypeError, "`groups` must map names to regular expressions, got 'a': "),
        ({3: "a"}, TypeError, "`groups` must map names to regular expressions, got 3: 'a'. Pass"),
        ({"": "a"}, ValueError, "`groups` must have names of letters, digits, spaces and `_-./`"),
        ({"a*": ["b"]}, ValueError, "`groups` must have names of letters, digits, spaces and"),
        ({"a*": "b:"}, ValueError, "`groups` must have names of letters, digits, spaces and"),
        ({"a": "(b"}, ValueError, "`groups` must have regular expressions, got '(b' for 'a': miss"),
        ({"a//b": ["c"]}, ValueError, "`groups` must have names of letters, digits, spaces and"),
        ({"../a": ["c"]}, ValueError, "`groups` must have names of letters, digits, spaces and"),
    ],
)
def test_what_is_wrong_for_any_model_is_refused_at_construction(
    groups: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        check_groups(groups)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        NoiseScaleMonitor(groups=groups)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        NoiseScaleMeter(nn.Linear(2, 2), groups=groups)


def test_an_expression_that_matches_nothing_is_refused() -> None:
    message = (
        "`groups` must have regular expressions that match parameters, got 'atn' for"
        " 'attention', which matches none. Some names: blocks.0.attention.weight,"
        " blocks.0.norm.weight, blocks.1.norm.bias, head.weight."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        groups_of(NAMES, {"norms": "norm", "attention": ["attention", "atn"]})


def test_what_a_function_gives_is_checked_with_the_models_names() -> None:
    with pytest.raises(TypeError, match=r"^`groups` must give a name or None, got 1 for 'blocks"):
        groups_of(NAMES, lambda name: 1)
    with pytest.raises(ValueError, match=r"^`groups` must have names of .* got 'blocks\[0\]'\."):
        groups_of(NAMES, lambda name: "blocks[0]")


def test_the_meter_takes_several_expressions_for_a_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    meter = NoiseScaleMeter(model, groups={"ends": [r"^0\.", r"^2\."]})

    for size in (3, 4):
        meter.backward(model(torch.randn(size, 2)).square().mean(), size)
    meter.step()

    assert list(meter.group_noise_scales) == ["ends"]
    meter.close()
