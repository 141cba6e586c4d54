# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch

from noisescale.history.optimizers import (
    OptimizerKind,
    has_decayed,
    learning_rate_of,
    parameters_of,
)

WEIGHT = torch.zeros(3, 2, requires_grad=True)


class Fused8bitAdamW(torch.optim.Optimizer):
    """As others name theirs."""

    def __init__(self) -> None:
        super().__init__([WEIGHT], {"lr": 0.1, "betas": (0.9, 0.999)})


class Stepping(torch.optim.Optimizer):
    """The base of optimizers of others, with the settings that theirs have."""

    def __init__(self, **settings: object) -> None:
        super().__init__([{"params": [WEIGHT], **settings}], {"lr": 0.1, "betas": (0.9, 0.999)})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do what this class of optimizers does."""


class AdamW8bit(Stepping):
    """Its step is in a base that other optimizers share, as in bitsandbytes."""


class MuonWithAuxAdam(Stepping):
    """Muon for matrices, Adam for the rest."""


class MuonAdamW(Stepping):
    """The same under another name."""


class SoapAdam(torch.optim.Adam):
    """Adam in another basis, with a step of its own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Rotate, do as Adam, rotate back."""


class Signum(torch.optim.SGD):
    """The sign of the momentum."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Step by the sign."""


class Counting(torch.optim.AdamW):
    """A user's, with Adam's step."""


class AdamW(Stepping):
    """A name that says nothing where the groups say Muon."""


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (torch.optim.SGD([WEIGHT], lr=0.1), OptimizerKind.SGD),
        (torch.optim.SGD([WEIGHT], lr=0.1, momentum=0.9, nesterov=True), OptimizerKind.MOMENTUM),
        (torch.optim.Adam([WEIGHT]), OptimizerKind.ADAM),
        (torch.optim.NAdam([WEIGHT]), OptimizerKind.ADAM),
        (Fused8bitAdamW(), OptimizerKind.ADAM),
        (AdamW8bit(), OptimizerKind.ADAM),
        (Counting([WEIGHT]), OptimizerKind.ADAM),
        (AdamW(kind="adamw", use_muon=False), OptimizerKind.ADAM),
        (AdamW(kind="muon"), OptimizerKind.OTHER),
        (AdamW(use_muon=True), OptimizerKind.OTHER),
        (MuonAdamW(kind="adamw"), OptimizerKind.OTHER),
        (MuonWithAuxAdam(use_muon=True), OptimizerKind.OTHER),
        (SoapAdam([WEIGHT]), OptimizerKind.OTHER),
        (Signum([WEIGHT], lr=0.1, momentum=0.9), OptimizerKind.OTHER),
        (torch.optim.RMSprop([WEIGHT]), OptimizerKind.OTHER),
        (torch.optim.Adagrad([WEIGHT]), OptimizerKind.OTHER),
    ],
)
def test_optimizers_are_told_apart(optimizer: torch.optim.Optimizer, kind: OptimizerKind) -> None:
    assert OptimizerKind.of(optimizer) is kind
    assert OptimizerKind.from_log([float(kind), math.nan]) is kind


def test_numbers_of_a_later_version_are_not_known() -> None:
    assert OptimizerKind.from_log([17.0]) is None
    assert OptimizerKind.from_log([]) is None


def test_what_is_trained_is_counted_and_its_learning_rate_read() -> None:
    frozen = torch.zeros(5)
    groups = [{"params": [WEIGHT], "lr": 0.1}, {"params": [frozen], "lr": 0.3}]
    optimizer = torch.optim.SGD(groups)

    assert parameters_of(optimizer) == 6
    assert learning_rate_of(optimizer) == 0.3


@pytest.mark.parametrize(
    ("rates", "sizes", "decayed"),
    [
        ([0.1, 0.1, 0.1], [64, 64, 64], False),
        ([0.01, 0.1, 0.06], [64, 64, 64], False),
        ([0.01, 0.1, 0.0], [64, 64, 64], True),
        ([0.1, 0.05, 0.025], [64, 32, 16], False),  # as the batch size asks
        ([0.1, 0.05, 0.01], [64, 32, 16], True),
        ([math.nan, math.nan, math.nan], [64, 64, 64], False),
    ],
)
def test_a_falling_learning_rate_is_seen(
    rates: list[float], sizes: list[float], decayed: bool
) -> None:
    history = {"learning_rate": np.array(rates), "batch_size": np.array(sizes, dtype=float)}

    assert has_decayed(history) is decayed
    assert not has_decayed({})
