# SPDX-License-Identifier: Apache-2.0
"""Rules of what to set at another batch size: learning rate, betas, eps, weight decay.

k is the new batch size over the old one. A gain is how much farther a step of the new size may go
by the noise scale b: (1 + b/B)/(1 + b/B').
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from noisescale.bounded import Bounded

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
    factor: Callable[[Change], float]
    """The new learning rate over the old one."""
    valid: str
    """Where it is said to hold, as a part of a sentence."""
    source: str
    others: Mapping[str, Callable[[float, Change], float]] = field(default_factory=dict)
    """How each other setting that it changes follows from the old one."""
    below: bool = True
    """Whether it was made for batch sizes below the critical one."""
    above: bool = True
    """Whether it was made for batch sizes above."""

    def apply(self, old: Settings, change: Change) -> Settings:
        """Return the settings at the new batch size. What is not known stays so."""
        changes = {"learning_rate": lambda lr, change: lr * self.factor(change), **self.others}
        known = {name: value for name, value in vars(old).items() if value is not None}
        return replace(
            old, **{name: changes[name](known[name], change) for name in changes if name in known}
        )


def _faster(beta: float, change: Change) -> float:
    """1 - beta times k: no less than 0 is left of it."""
    return max(1 - change.k * (1 - beta), 0.0)


RULES: tuple[LearningRateRule, ...] = (
    LearningRateRule(
        "no change",
        KINDS,
        lambda change: 1.0,
        "far above the critical batch size",
        "no rule; for Muon 12th of 216 in Dang, Wen and Malladi 2026, arXiv 2610.08975",
        below=False,
    ),
    LearningRateRule(
        "linear",
        ("sgd", "momentum"),
        lambda change: change.k,
        "far below the critical batch size",
        "Goyal et al. 2017, arXiv 1706.02677",
        above=False,
    ),
    LearningRateRule(
        "square root",
        KINDS,
        lambda change: math.sqrt(change.k),
        "below the critical batch size",
        "Krizhevsky 2014, arXiv 1404.5997",
        above=False,
    ),
    LearningRateRule(
        "power 2/3",
        ("adam", "muon"),
        lambda change: change.k ** (2 / 3),
        "up to the best batch size of a fixed number of examples, within a factor of 8",
        "ours: there tuned rates rise as k^0.6 to k^0.8, above it as the square root",
        above=False,
    ),
    LearningRateRule(
        "gain",
        KINDS,
        lambda change: change.gain,
        "at any batch size, by the noise scale",
        "AdaScale, Johnson et al. 2020, arXiv 2007.05105; McCandlish et al. 2018, equation 2.6",
    ),
    LearningRateRule(
        "square root of the gain",
        ("adam", "muon"),
        lambda change: math.sqrt(change.gain),
        "at any batch size, by the noise scale",
        "ours: the gain, as the square root is for the linear rule",
    ),
    LearningRateRule(
        "SDE of Adam",
        ("adam",),
        lambda change: math.sqrt(change.k),
        "below the critical batch size, late in a run",
        "Malladi et al. 2022, arXiv 2205.10287",
        {
            "beta1": _faster,
            "beta2": _faster,
            "eps": lambda eps, change: eps / math.sqrt(change.k),
            "weight_decay": lambda decay, change: decay * math.sqrt(change.k),
        },
        above=False,
    ),
    LearningRateRule(
        "half-life in tokens",
        ("adam",),
        lambda change: 1.0,
        "at small batch sizes; the learning rate nearly stays",
        "Marek et al. 2025, arXiv 2507.07101",
        {"beta2": lambda beta, change: beta**change.k},
    ),
    LearningRateRule(
        "Power Lines",
        ("adam", "muon"),
        lambda change: 1.0,
        "where the learning rate is muP's, at a fixed number of tokens",
        "Bergsma et al. 2025, arXiv 2505.13738",
        {"weight_decay": lambda decay, change: decay * change.k},
    ),
    LearningRateRule(
        "SDE of Muon",
        ("muon",),
        lambda change: change.k,
        "160th of 216 rules there",
        "Dang, Wen and Malladi 2026, arXiv 2610.08975",
        {"momentum": lambda momentum, change: momentum**change.k},
        above=False,
    ),
)

FARTHEST = 128.0
"""The factor between batch sizes that the sweeps behind the rules covered."""

BEST_BELOW: dict[Kind, tuple[str, str]] = {
    "sgd": ("gain", "1.0 x off the best rate in one pair of swept batch sizes"),
    "momentum": (
        "linear",
        "1.1 x off the best rate in 6 pairs to a goal, 1.1 x in 49 of a fixed budget",
    ),
    "adam": (
        "square root",
        "1.1 x off the best rate in 6 pairs to a goal, 1.3 x in 169 of a fixed budget",
    ),
    "muon": ("power 2/3", "1.2 x off the best rate in 18 pairs of one workload"),
}
BEST_ABOVE: dict[Kind, tuple[str, str]] = {
    "sgd": ("gain", "1.1 x off the best rate in 17 pairs of swept batch sizes"),
    "momentum": (
        "gain",
        "1.6 x off the best rate in 38 pairs, mostly below it, and the square root 1.5 x: try both",
    ),
    "adam": (
        "square root of the gain",
        "1.1 x off the best rate in 71 pairs of swept batch sizes",
    ),
}
"""What our sweeps say of a rule, see `benchmarks/prediction/learning_rates.py`: in sample.

What was off is the median factor between a rule's rate and the best one, at most 16 x away.
"""

HELD_OUT: dict[Kind, dict[str, float]] = {
    "sgd": {"gain": 1.70},
    "adam": {"square root of the gain": 1.44, "square root": 1.33},
}
"""The factor that rules were off by, to larger batches, on sweeps with no part in their choice."""


def _errors_of(kind: Kind | None) -> str:
    """Say how far off the rules for an optimizer were on held-out sweeps."""
    if kind is None or kind not in HELD_OUT:
        return "No rule for this optimizer was held against other sweeps."
    off = " and ".join(f"the {name} was {x:.2f} x off" for name, x in HELD_OUT[kind].items())
    diverged = ", and 2 of 6 trainings at its rate diverged" * (kind == "sgd")
    return f"On held-out sweeps, to larger batches, {off}{diverged}."


LEAST_BETA2, SHORTEST_BETA2 = 0.9, 0.95
"""A public run whose beta2 was scaled below the first had spikes; the second is the floor."""


def is_usable(new: Settings, old: Settings) -> bool:
    """Return whether a rule leaves Adam's betas usable: beta2 of 0.9 or more, beta1 above 0."""
    short = new.beta2 is not None and new.beta2 < min(LEAST_BETA2, old.beta2 or 1.0)
    return not (short or (new.beta1 == 0 and new.beta1 != old.beta1))


class Advice(NamedTuple):
    """Which learning rate to take at another batch size."""

    rule: LearningRateRule
    factor: Bounded
    """The new learning rate over the old one. Its bounds are those of the noise scale, or the ends
    of the safe range."""
    swept: bool
    """Whether the rule was held against sweeps there. If not, the range from no change to k is
    safe: all rules lie in it, and the square root is its middle."""
    why: str
    """The reason, in sentences."""
    error: float | None = None
    """The factor that the rule was off by on held-out sweeps; None if there were none."""


def is_below(larger: float, scale: Bounded) -> bool | None:
    """Return whether the larger batch size is below the noise scale; None if that is not known."""
    if larger <= scale.low:
        return True
    if larger > scale.high:
        return False
    return None if math.isnan(scale.value) else larger <= scale.value


def factor_by(rule: LearningRateRule, old: float, new: float, scale: Bounded) -> Bounded:
    """Return a rule's factor on the learning rate, with the bounds of the noise scale."""
    of = (scale.value, scale.low, 1e300 if math.isinf(scale.high) else scale.high)
    value, *ends = (rule.factor(Change(old, new, b)) for b in of)
    return Bounded(value, min(ends), max(ends))


def advise(
    kind: Kind | None, old: float, new: float, scale: Bounded, *, has_run: bool = True
) -> Advice:
    """Return the rule to take at another batch size, or the safe range where none was tried.

    Args:
        kind: The optimizer; None if it is of no kind that was swept, or not known.
        old: The batch size that is left.
        new: The new one.
        scale: The noise scale, with its bounds.
        has_run: Whether there is a run that was measured.

    Examples:
        >>> from noisescale.bounded import UNKNOWN
        >>> advise("adam", 64, 256, UNKNOWN).factor
        Bounded(value=2.0, low=1.0, high=4.0)
    """
    named = {rule.name: rule for rule in RULES}
    below = is_below(max(old, new), scale)
    best = BEST_BELOW if below else BEST_ABOVE
    if kind is not None and below is not None and kind in best:
        name, said = best[kind]
        why = f"For this optimizer, {'up to' if below else 'beyond'} the noise scale, it was {said}"
        why = f"{why}, in sample. {_errors_of(kind)}"
        error = HELD_OUT.get(kind, {}).get(name) if new > old else None
        return Advice(named[name], factor_by(named[name], old, new, scale), True, why, error)
    if kind is None:
        why = "The optimizer is not known, or of no kind that was swept"
    elif below is not None:
        why = "Above the noise scale there is no sweep with this optimizer"
    elif has_run:
        why = "The run does not say whether these batch sizes are below its noise scale"
    else:
        why = "Rules differ below and above the noise scale, which is not known"
    k = new / old
    ends = f"{min(k, 1):.3g} to {max(k, 1):.3g} x"
    why += f". All rules lie in the safe range, {ends}, and the square root is its middle."
    why += f" {_errors_of(kind)}" * (kind in HELD_OUT)
    if not has_run:
        why += " A run with a monitor, or a noise scale, would narrow it."
    return Advice(named["square root"], Bounded(math.sqrt(k), min(1.0, k), max(1.0, k)), False, why)


LEFT_OUT = (
    "Surge (Li et al. 2024, arXiv 2405.14578) goes by a batch size that needs the Hessian: it would"
    " have to be fitted to several trainings.",
)
"""Rules that are left out, by name, with the reason."""
