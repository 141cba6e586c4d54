# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from refused import refused
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
    ("groups", "error", "requirement"),
    [
        (3, TypeError, "a mapping or a function"),
        ({"a": []}, TypeError, "map names to"),
        ({"a": ["b", 3]}, TypeError, "map names to"),
        ({3: "a"}, TypeError, "map names to"),
        ({"": "a"}, ValueError, "have names of"),
        ({"a*": ["b"]}, ValueError, "have names of"),
        ({"a//b": ["c"]}, ValueError, "have names of"),
        ({"../a": ["c"]}, ValueError, "have names of"),
        ({"a": "(b"}, ValueError, "have regular expressions"),
    ],
)
def test_what_is_wrong_for_any_model_is_refused_at_construction(
    groups: Any, error: type[Exception], requirement: str
) -> None:
    for make in (
        lambda: check_groups(groups),
        lambda: NoiseScaleMonitor(groups=groups),
        lambda: NoiseScaleMeter(nn.Linear(2, 2), groups=groups),
    ):
        with refused("groups", error=error, requirement=requirement):
            make()


def test_what_does_not_fit_the_models_names_is_refused() -> None:
    """An expression that matches nothing, and what a function gives."""
    with refused("groups", requirement="that match parameters") as error:
        groups_of(NAMES, {"norms": "norm", "attention": ["attention", "atn"]})
    assert "'atn' for 'attention'" in error.value.got
    with refused("groups", error=TypeError, requirement="give a name or None"):
        groups_of(NAMES, lambda name: 1)
    with refused("groups", got="'blocks[0]'"):
        groups_of(NAMES, lambda name: "blocks[0]")
