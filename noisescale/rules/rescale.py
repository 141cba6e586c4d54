# SPDX-License-Identifier: Apache-2.0
"""`rescale`: what to set at another batch size, by named rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.history.optimizers import OptimizerKind
from noisescale.prediction.predict import predict
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.rules.learning_rate_rules import (
    KINDS,
    RULES,
    Change,
    Kind,
    LearningRateRule,
    Settings,
)
from noisescale.rules.rescale_document import as_dict, document_of
from noisescale.rules.rescale_record import RescaleRecord, RuleSettings

FARTHEST = 128.0
"""The factor between batch sizes that the sweeps behind the rules covered."""


class Evidence(NamedTuple):
    """What our sweeps say of a rule, see `benchmarks/prediction/learning_rates.py`."""

    rule: str
    text: str


_BELOW: dict[Kind, Evidence] = {
    "sgd": Evidence("gain", "1.0 x off the best rate in one pair of swept batch sizes"),
    "momentum": Evidence(
        "linear", "1.1 x off the best rate in 6 pairs to a goal, 1.1 x in 34 of a fixed budget"
    ),
    "adam": Evidence(
        "square root", "1.1 x off the best rate in 6 pairs to a goal, 1.2 x in 73 of a fixed budget"
    ),
    "muon": Evidence(
        "square root", "1.5 x off the best rate, and below it, in 10 pairs of one workload"
    ),
}
_ABOVE: dict[Kind, Evidence] = {
    "sgd": Evidence("gain", "1.1 x off the best rate in 17 pairs of swept batch sizes"),
    "momentum": Evidence(
        "gain",
        "1.6 x off the best rate in 38 pairs, mostly below it, and the square root 1.5 x: try both",
    ),
    "adam": Evidence(
        "square root of the gain", "1.1 x off the best rate in 71 pairs of swept batch sizes"
    ),
}
"""What was off is the median factor between a rule's rate and the best one, at most 16 x away."""


class Rescale(RescaleRecord, Answer):
    """What each rule would set, and the ways to show it."""

    document = document_of
    to_dict = as_dict


def rescale(
    run: str | PathLike[str] | Mapping[str, ArrayLike] | None,
    batch_size: float,
    *,
    from_batch_size: float | None = None,
    noise_scale: float | None = None,
    optimizer: Kind | None = None,
    learning_rate: float | None = None,
    momentum: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    ema_decay: float | None = None,
    warm_up_steps: float | None = None,
    steps: float | None = None,
) -> Rescale:
    """Return what named rules would set at another batch size, and which one to take.

    Args:
        run: A run with a monitor. Its batch size, its largest learning rate, its noise scale and
            the kind of its optimizer are read. None: these are given.
        batch_size: The new batch size.
        from_batch_size: The old batch size. Default: the run's last one.
        noise_scale: The noise scale. Default: that of the whole run.
        optimizer: "sgd", "momentum", "adam" or "muon". Default: that of the run, or of
            most of its parameters.
        learning_rate: Its learning rate. Default: the run's largest one.
        momentum: Its momentum.
        betas: Adam's betas.
        eps: Adam's eps.
        weight_decay: Its weight decay.
        ema_decay: The decay of an average of the weights.
        warm_up_steps: Steps of the warm-up.
        steps: Steps of the training.

    Raises:
        ValueError: If a value is out of range, something needed is missing, or the batch sizes are
            farther apart than any rule was tried.
        OSError: If the run cannot be read.

    Examples:
        >>> found = rescale(
        ...     None, 256, from_batch_size=64, noise_scale=30.0, optimizer="adam", learning_rate=0.1
        ... )
        >>> found.recommended
        'square root of the gain'
    """
    read = _Read.of(run)
    old = read.batch_size if from_batch_size is None else from_batch_size
    scale = read.noise_scale
    if noise_scale is not None:
        _check("noise_scale", noise_scale, "30")
        scale = Bounded(noise_scale, noise_scale, noise_scale)
    kind = read.kind if optimizer is None else optimizer
    _check("batch_size", batch_size, "256")
    if math.isnan(old):
        raise Refusal(
            "from_batch_size", "be given without a run", "none", "Give the old batch size."
        )
    _check("from_batch_size", old, "64")
    if kind is not None and kind not in KINDS:
        raise Refusal(
            "optimizer",
            f"be one of {', '.join(KINDS)}",
            repr(kind),
            "Leave it out for another one: its rules are not known.",
        )
    if not 1 / FARTHEST <= batch_size / old <= FARTHEST:
        raise Refusal(
            "batch_size",
            f"be at most {FARTHEST:g} times the old one, or one over that",
            f"{batch_size / old:.3g} times {old:g}",
            "No rule was tried so far away: sweep the learning rate at the new size.",
        )
    rate = read.learning_rate if learning_rate is None else learning_rate
    beta1, beta2 = betas or (None, None)
    before = Settings(rate, momentum, beta1, beta2, eps, weight_decay)
    place = _place(batch_size, old, scale)
    recommended, evidence = _recommendation(kind, place)
    k = batch_size / old
    return Rescale(
        old=old,
        new=float(batch_size),
        unit=read.unit,
        noise_scale=scale,
        measured=noise_scale is None,
        kind=kind,
        before=before,
        answers=tuple(
            _answer(rule, before, old, batch_size, scale, place)
            for rule in RULES
            if kind is None or kind in rule.kinds
        ),
        recommended=recommended,
        evidence=evidence,
        warm_up_steps=None if warm_up_steps is None else (warm_up_steps, warm_up_steps / k),
        steps=None if steps is None else (steps, steps / k),
        ema_decay=None if ema_decay is None else (ema_decay, ema_decay**k),
    )


class _Read(NamedTuple):
    """What a run says."""

    batch_size: float = math.nan
    noise_scale: Bounded = UNKNOWN
    kind: Kind | None = None
    learning_rate: float | None = None
    unit: str = "examples"

    @classmethod
    def of(cls, run: str | PathLike[str] | Mapping[str, ArrayLike] | None) -> _Read:
        if run is None:
            return cls()
        found = predict(run)  # type: ignore[arg-type]  # it takes what this takes
        history = found.history
        rates = np.asarray(history["learning_rate"])
        rates = rates[np.isfinite(rates)]
        kinds: dict[OptimizerKind, Kind] = {
            OptimizerKind.SGD: "sgd",
            OptimizerKind.MOMENTUM: "momentum",
            OptimizerKind.ADAM: "adam",
            OptimizerKind.SPECTRAL: "muon",
        }
        return cls(
            float(history["batch_size"][-1]),
            found.critical_batch_size_by_noise_scale,
            None if history.optimizer is None else kinds.get(history.optimizer.kind),
            float(rates.max()) if rates.size else None,
            found.unit,
        )


def _place(new: float, old: float, scale: Bounded) -> str | None:
    """Return where both batch sizes lie: "below" the noise scale, or not; None if not known."""
    larger = max(new, old)
    if larger <= scale.low:
        return "below"
    if larger > scale.high:
        return "above"
    if math.isnan(scale.value):  # not resolved, or not known
        return None
    return "below" if larger <= scale.value else "above"


def _recommendation(kind: Kind | None, place: str | None) -> tuple[str | None, str]:
    if kind is None:
        return None, (
            "No rule is recommended: the optimizer is of no kind that was swept. Try the old"
            " learning rate, and twice and half of it."
        )
    if place is None:
        return None, (
            "No rule is recommended: it is not known whether the batch sizes are below the noise"
            " scale, and rules differ there. Give a run with a monitor."
        )
    found = (_BELOW if place == "below" else _ABOVE).get(kind)
    if found is None:
        return None, (
            "No rule is recommended: above the noise scale there is no sweep with this optimizer."
        )
    where = "up to" if place == "below" else "beyond"
    return found.rule, f"For this optimizer, {where} the noise scale, it was {found.text}."


def _answer(
    rule: LearningRateRule,
    before: Settings,
    old: float,
    new: float,
    scale: Bounded,
    place: str | None,
) -> RuleSettings:
    unit = Settings(**{**vars(before), "learning_rate": before.learning_rate or 1.0})
    rates = [
        rule.apply(unit, Change(old, new, b)).learning_rate
        for b in (scale.value, scale.low, scale.high if math.isfinite(scale.high) else 1e300)
    ]
    value, *ends = (math.nan if rate is None else rate for rate in rates)
    bounds = Bounded(value, min(ends), max(ends))
    if rule.needs_noise_scale and math.isnan(scale.low):
        bounds = UNKNOWN
    holds = None if place is None else rule.below if place == "below" else rule.above
    return RuleSettings(rule, rule.apply(before, Change(old, new, scale.value)), bounds, holds)


def _check(name: str, value: float, example: str) -> None:
    if not 0 < value < math.inf:
        raise Refusal(name, "be positive", repr(value), f"Give {example}, for instance.")
