# SPDX-License-Identifier: Apache-2.0
"""Rules of what to set at another batch size: learning rate, betas, eps, weight decay.

k is the new batch size over the old one. A gain is how much farther a step of the new size may go
by the noise scale b: (1 + b/B)/(1 + b/B').
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["sgd", "momentum", "adam", "muon"]

KINDS: tuple[Kind, ...] = ("sgd", "momentum", "adam", "muon")


@dataclass(frozen=True)
class Change:
    """A change from one batch size to another."""

    old: float
    new: float
    noise_scale: float = math.nan
    """b, at the old batch size; NaN if it is not known."""

    @property
    def k(self) -> float:
        """The new batch size over the old one."""
        return self.new / self.old

    @property
    def gain(self) -> float:
        """How much farther a step may go. It is k far below the noise scale and 1 far above."""
        b = self.noise_scale
        return (1 + b / self.old) / (1 + b / self.new)


@dataclass(frozen=True)
class Settings:
    """What an optimizer has. None: it has none, or it is not known."""

    learning_rate: float | None = None
    momentum: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class LearningRateRule:
    """A named rule."""

    name: str
    kinds: tuple[Kind, ...]
    """The optimizers it was made for."""
    apply: Callable[[Settings, Change], Settings]
    valid: str
    """Where it is said to hold, as a part of a sentence."""
    source: str
    below: bool = True
    """Whether it was made for batch sizes below the critical one."""
    above: bool = True
    """Whether it was made for batch sizes above."""
    needs_noise_scale: bool = False


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _with_lr(factor: Callable[[Change], float]) -> Callable[[Settings, Change], Settings]:
    def apply(old: Settings, change: Change) -> Settings:
        return Settings(**{**vars(old), "learning_rate": _times(old.learning_rate, factor(change))})

    return apply


def _sde(old: Settings, change: Change) -> Settings:
    k = change.k
    return Settings(
        learning_rate=_times(old.learning_rate, math.sqrt(k)),
        momentum=old.momentum,
        beta1=_faster(old.beta1, k),
        beta2=_faster(old.beta2, k),
        eps=_times(old.eps, 1 / math.sqrt(k)),
        weight_decay=_times(old.weight_decay, math.sqrt(k)),
    )


def _faster(beta: float | None, k: float) -> float | None:
    """1 - beta times k: no less than 0 is left of it."""
    return None if beta is None else max(1 - k * (1 - beta), 0.0)


def _half_life(old: Settings, change: Change) -> Settings:
    beta2 = None if old.beta2 is None else old.beta2**change.k
    return Settings(**{**vars(old), "beta2": beta2})


def _power_lines(old: Settings, change: Change) -> Settings:
    return Settings(**{**vars(old), "weight_decay": _times(old.weight_decay, change.k)})


def _muon_sde(old: Settings, change: Change) -> Settings:
    momentum = None if old.momentum is None else old.momentum**change.k
    lr = _times(old.learning_rate, change.k)
    return Settings(**{**vars(old), "learning_rate": lr, "momentum": momentum})


_ALL: tuple[Kind, ...] = KINDS

RULES: tuple[LearningRateRule, ...] = (
    LearningRateRule(
        "no change",
        _ALL,
        lambda old, change: old,
        "far above the critical batch size",
        "12th of 216 rules for Muon in Dang, Wen and Malladi 2026, arXiv 2610.08975",
        below=False,
    ),
    LearningRateRule(
        "linear",
        ("sgd", "momentum"),
        _with_lr(lambda change: change.k),
        "far below the critical batch size",
        "Goyal et al. 2017, arXiv 1706.02677",
        above=False,
    ),
    LearningRateRule(
        "square root",
        _ALL,
        _with_lr(lambda change: math.sqrt(change.k)),
        "below the critical batch size",
        "Krizhevsky 2014, arXiv 1404.5997",
        above=False,
    ),
    LearningRateRule(
        "gain",
        _ALL,
        _with_lr(lambda change: change.gain),
        "at any batch size, by the noise scale",
        "AdaScale, Johnson et al. 2020, arXiv 2007.05105; McCandlish et al. 2018, equation 2.6",
        needs_noise_scale=True,
    ),
    LearningRateRule(
        "square root of the gain",
        ("adam", "muon"),
        _with_lr(lambda change: math.sqrt(change.gain)),
        "at any batch size, by the noise scale",
        "ours: the gain, as the square root is for the linear rule",
        needs_noise_scale=True,
    ),
    LearningRateRule(
        "SDE of Adam",
        ("adam",),
        _sde,
        "below the critical batch size, late in a run",
        "Malladi et al. 2022, arXiv 2205.10287",
        above=False,
    ),
    LearningRateRule(
        "half-life in tokens",
        ("adam",),
        _half_life,
        "at small batch sizes; the learning rate nearly stays",
        "Marek et al. 2025, arXiv 2507.07101",
    ),
    LearningRateRule(
        "Power Lines",
        ("adam", "muon"),
        _power_lines,
        "where the learning rate is muP's, at a fixed number of tokens",
        "Bergsma et al. 2025, arXiv 2505.13738",
    ),
    LearningRateRule(
        "SDE of Muon",
        ("muon",),
        _muon_sde,
        "160th of 216 rules there",
        "Dang, Wen and Malladi 2026, arXiv 2610.08975",
        above=False,
    ),
)

LEFT_OUT = (
    "Surge (Li et al. 2024, arXiv 2405.14578) goes by a batch size that needs the Hessian: it would"
    " have to be fitted to several trainings.",
)
"""Rules that are left out, by name, with the reason."""
