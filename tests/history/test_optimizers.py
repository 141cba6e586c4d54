# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from noisescale.history.optimizers import (
    OptimizerKind,
    OptimizerMix,
    has_decayed,
    learning_rate_of,
    parameters_of,
)

WEIGHT = torch.zeros(3, 2, requires_grad=True)
NAN = math.nan
HYBRID = OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 0.6)


class Stepping(torch.optim.Optimizer):
    """The base of optimizers of others, with the settings that theirs have."""

    def __init__(self, *groups: dict[str, Any], **settings: Any) -> None:
        given = groups or ({"params": [WEIGHT], **settings},)
        super().__init__([*given], {"lr": 0.1, "betas": (0.9, 0.999)})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do what this class of optimizers does."""


def named(name: str, *groups: dict[str, Any], **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of a class with this name, whose step is in a base that others share."""
    made: torch.optim.Optimizer = type(name, (Stepping,), {})(*groups, **settings)
    return made


def group(elements: int, **settings: Any) -> dict[str, Any]:
    return {"params": [torch.zeros(elements, requires_grad=True)], **settings}


class SoapAdam(torch.optim.Adam):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Rotate, do as Adam, rotate back."""


class Signum(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step by the sign of the momentum."""


Counting = type("Counting", (torch.optim.AdamW,), {})
"""A user's, with Adam's step."""


class ScheduleFreeWrapper:
    """As the package has it: no Optimizer, but with the groups and the state of one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = base.param_groups, base.state

    def step(self) -> None:
        """Step between two averages."""


NAMED = {
    OptimizerKind.ADAM: ("Fused8bitAdamW", "AdamW8bit", "DistAdamW"),
    OptimizerKind.SIGN: ("Lion", "PagedLion8bit", "DecoupledLionW", "SignSGD", "Tiger"),
    OptimizerKind.SPECTRAL: (
        *("Muon", "DistMuon", "NorMuon", "SOAP", "Dion2", "DistributedShampoo", "SCIONLight"),
    ),
    OptimizerKind.SCHEDULE_FREE: ("AdamWScheduleFree", "RAdamScheduleFreeClosure"),
    OptimizerKind.OTHER: ("MuonAdamW", "Lionheart", "MySignum"),
}


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (torch.optim.SGD([WEIGHT], lr=0.1), OptimizerKind.SGD),
        (torch.optim.SGD([WEIGHT], lr=0.1, momentum=0.9, nesterov=True), OptimizerKind.MOMENTUM),
        (torch.optim.Adam([WEIGHT]), OptimizerKind.ADAM),
        (torch.optim.NAdam([WEIGHT]), OptimizerKind.ADAM),
        (torch.optim.Muon([WEIGHT]), OptimizerKind.SPECTRAL),
        (Counting([WEIGHT]), OptimizerKind.ADAM),
        (SoapAdam([WEIGHT]), OptimizerKind.OTHER),
        (Signum([WEIGHT], lr=0.1, momentum=0.9), OptimizerKind.SIGN),
        (torch.optim.Adagrad([WEIGHT]), OptimizerKind.OTHER),
        (ScheduleFreeWrapper(torch.optim.Adam([WEIGHT])), OptimizerKind.SCHEDULE_FREE),
        *((named(name), kind) for kind, names in NAMED.items() for name in names),
        (named("AdamW", kind="adamw", use_muon=False), OptimizerKind.ADAM),
        (named("AdamW", kind="head"), OptimizerKind.ADAM),  # a label of a user's own
        (named("AdamW", kind="muon"), OptimizerKind.SPECTRAL),
        (named("AdamW", use_muon=True), OptimizerKind.SPECTRAL),
        (named("Lion", use_muon=False), OptimizerKind.SIGN),
        (named("MuonAdamW", kind="adamw"), OptimizerKind.ADAM),
        (named("MuonWithAuxAdam", use_muon=True), OptimizerKind.SPECTRAL),
        (named("Dion", algorithm="lion"), OptimizerKind.SIGN),
        (named("Mine", group(0)), OptimizerKind.OTHER),
    ],
)
def test_optimizers_are_told_apart(optimizer: Any, kind: OptimizerKind) -> None:
    mix = OptimizerMix.of(optimizer)

    assert mix == OptimizerMix(kind)
    assert OptimizerMix.from_dict(mix.to_dict()) == mix
    assert mix.title == kind.title


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SingleDeviceMuonWithAuxAdam", ({"use_muon": True}, {"use_muon": False})),
        ("MuonAdamW", ({"kind": "muon"}, {"kind": "adamw"})),
        ("NorMuon", ({"algorithm": "normuon"}, {"algorithm": "adamw"})),
    ],
)
def test_a_hybrid_has_the_share_of_its_main_kind(name: str, settings: Any) -> None:
    muon, adam = settings
    frozen = {"params": [torch.zeros(1000)], **adam}
    groups = group(38, **adam), group(40, **muon), group(22, **muon), frozen

    mix = OptimizerMix.of(named(name, *groups))

    assert mix == replace(HYBRID, share=0.62)
    assert OptimizerMix.from_dict(mix.to_dict()) == mix
    assert " on 62 % of " in mix.title


def test_a_hybrid_may_say_in_the_state_what_a_parameter_is_trained_by() -> None:
    optimizer = named("Muon", group(75), group(25))
    for k, each in enumerate(optimizer.param_groups):
        optimizer.state[each["params"][0]]["use_muon"] = k == 0

    assert OptimizerMix.of(optimizer) == replace(HYBRID, share=0.75)


def test_of_three_kinds_the_two_largest_are_said_and_hardly_used_ones_are_not() -> None:
    kinds = {"muon": 500, "lion": 190, "adamw": 304, "sgd": 6}
    groups = [group(n, algorithm=name) for name, n in kinds.items()]

    mix = OptimizerMix.of(named("Dion", *groups))

    assert mix == replace(HYBRID, share=0.5)
    assert mix.title.endswith(" on others")  # not on all others
    hardly = named("Dion", group(995, algorithm="muon"), group(5, algorithm="adamw"))
    assert OptimizerMix.of(hardly) == OptimizerMix(OptimizerKind.SPECTRAL)


def test_what_is_trained_is_counted_and_its_learning_rate_read() -> None:
    frozen = {"params": [torch.zeros(5)], "lr": 0.3}
    optimizer = torch.optim.SGD([{"params": [WEIGHT], "lr": 0.1}, frozen])

    assert parameters_of(optimizer) == 6
    assert learning_rate_of(optimizer) == 0.3


@pytest.mark.parametrize(
    ("rates", "sizes", "decayed"),
    [
        ([0.1, 0.1, 0.1], [64, 64, 64], False),
        ([0.01, 0.1, 0.0], [64, 64, 64], True),
        ([0.1, 0.05, 0.025], [64, 32, 16], False),  # as the batch size asks
        ([0.1, 0.05, 0.01], [64, 32, 16], True),
        ([NAN, NAN, NAN], [64, 64, 64], False),
    ],
)
def test_a_falling_learning_rate_is_seen(
    rates: list[float], sizes: list[float], decayed: bool
) -> None:
    history = {"learning_rate": np.array(rates), "batch_size": np.array(sizes, dtype=float)}

    assert has_decayed(history) is decayed
    assert not has_decayed({})
