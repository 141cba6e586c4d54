# SPDX-License-Identifier: Apache-2.0
"""`rescale`: what to set at another batch size, by named rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.checks import require_positive
from noisescale.history.optimizers import OptimizerKind
from noisescale.prediction.predict import predict
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import count, number, with_bounds
from noisescale.report.records import fields_of, finite
from noisescale.rules.learning_rate_rules import (
    BEST_ABOVE,
    BEST_BELOW,
    FARTHEST,
    KINDS,
    LEFT_OUT,
    RULES,
    Change,
    Kind,
    LearningRateRule,
    Settings,
)

_HOW_TO_READ = (
    "A rule says what to set at the new batch size if the old settings were the best ones at the"
    " old size. Bounds are those of the noise scale alone. No rule is right everywhere: two or"
    " three learning rates around the recommended one are worth a try."
)


@dataclass(frozen=True)
class RuleSettings:
    """What a rule would set."""

    rule: LearningRateRule
    settings: Settings
    learning_rate: Bounded
    """The rate with its bounds, from those of the noise scale. A factor if no old one is known."""
    holds: bool | None
    """Whether the rule was made for this place, below or above the noise scale. None: unknown."""


@dataclass(frozen=True)
class Rescale(Answer):
    """What each rule would set."""

    old: float
    """The batch size that is left."""
    new: float
    unit: str
    noise_scale: Bounded
    """The noise scale of the run. Unknown without one."""
    measured: bool
    """Whether the noise scale is that of a run. It is given otherwise."""
    kind: Kind | None
    """The kind of the optimizer; None if it is unknown."""
    before: Settings
    answers: tuple[RuleSettings, ...]
    """What each rule for this kind would set."""
    recommended: str | None
    """The name of one of them; None if none is."""
    evidence: str
    """Why it is recommended, or why none is, as a sentence."""
    warm_up_steps: tuple[float, float] | None = None
    """Steps before and after, of as many examples."""
    steps: tuple[float, float] | None = None
    """Steps before and after, of as many examples."""
    ema_decay: tuple[float, float] | None = None
    """The decay before and after, of the same share of the training."""

    def document(self) -> Document:
        """Return what each rule would set, and which one to take."""
        return Document(
            title=f"Batch size {count(self.new)}: what to set - noisescale",
            headline=_headline(self),
            answers=list(_statements(self)),
            tables=[_table(self)],
            doubts=list(_doubts(self)),
            assumptions=[
                "The old settings are taken to be the best ones at the old batch size.",
                "All groups of parameters change by the same factors.",
                *LEFT_OUT,
            ],
            how_to_read=_HOW_TO_READ,
            next=[
                "Check it: noisescale sweep trains at several learning rates for each batch size."
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what each rule would set in builtin types.

        | key | meaning |
        |---|---|
        | `from_batch_size`, `batch_size`, `unit`, `optimizer` | what changes |
        | `noise_scale` | `value`, `low`, `high`; None if it is not known |
        | `recommended`, `evidence` | the name of a rule or None, and why |
        | `rules` | `name`, `settings`, `learning_rate` with bounds, `holds`, `valid`, `source` |
        | `steps`, `warm_up_steps`, `ema_decay` | before and after, or None |
        """
        rules = [
            fields_of(one.rule, "name", "valid", "source")
            | fields_of(one, "learning_rate", "holds")
            | {"settings": vars(one.settings)}
            for one in self.answers
        ]
        alike = "unit", "noise_scale", "recommended", "evidence"
        found: dict[str, Any] = finite(
            {"from_batch_size": self.old, "batch_size": self.new, "optimizer": self.kind}
            | fields_of(self, *alike, "steps", "warm_up_steps", "ema_decay")
            | {"rules": rules}
        )
        return found


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
        require_positive("noise_scale", noise_scale, "Give 30, for instance.")
        scale = Bounded(noise_scale, noise_scale, noise_scale)
    kind = read.kind if optimizer is None else optimizer
    require_positive("batch_size", batch_size, "Give 256, for instance.")
    if math.isnan(old):
        raise Refusal(
            "from_batch_size", "be given without a run", "none", "Give the old batch size."
        )
    require_positive("from_batch_size", old, "Give 64, for instance.")
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
    below = _is_below(max(batch_size, old), scale)
    recommended, evidence = _recommendation(kind, below)
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
            _answer(rule, before, Change(old, batch_size, scale.value), scale, below)
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
            found.position.batch_size,
            found.critical_batch_size_by_noise_scale,
            None if history.optimizer is None else kinds.get(history.optimizer.kind),
            float(rates.max()) if rates.size else None,
            found.unit,
        )


def _is_below(larger: float, scale: Bounded) -> bool | None:
    """Return whether the larger batch size is below the noise scale; None if that is not known."""
    if larger <= scale.low:
        return True
    if larger > scale.high:
        return False
    return None if math.isnan(scale.value) else larger <= scale.value


def _recommendation(kind: Kind | None, below: bool | None) -> tuple[str | None, str]:
    if kind is None:
        return None, (
            "No rule is recommended: the optimizer is of no kind that was swept. Try the old"
            " learning rate, and twice and half of it."
        )
    if below is None:
        return None, (
            "No rule is recommended: it is not known whether the batch sizes are below the noise"
            " scale, and rules differ there. Give a run with a monitor."
        )
    found = (BEST_BELOW if below else BEST_ABOVE).get(kind)
    if found is None:
        return None, (
            "No rule is recommended: above the noise scale there is no sweep with this optimizer."
        )
    rule, said = found
    where = "up to" if below else "beyond"
    return rule, f"For this optimizer, {where} the noise scale, it was {said}."


def _answer(
    rule: LearningRateRule, before: Settings, change: Change, scale: Bounded, below: bool | None
) -> RuleSettings:
    of = (scale.value, scale.low, 1e300 if math.isinf(scale.high) else scale.high)
    old = before.learning_rate or 1.0
    value, *ends = (old * rule.factor(replace(change, noise_scale=b)) for b in of)
    holds = None if below is None else rule.below if below else rule.above
    return RuleSettings(
        rule, rule.apply(before, change), Bounded(value, min(ends), max(ends)), holds
    )


def _headline(found: Rescale) -> str:
    sizes = f"a batch of {count(found.new)} instead of {count(found.old)} {found.unit}"
    one = _recommended_one(found)
    if one is None:
        return f"For {sizes} no rule is recommended"
    return f"For {sizes}: {_rate(found, one)}, by the rule {one.rule.name!r}"


def _statements(found: Rescale) -> Iterator[Statement]:
    one = _recommended_one(found)
    if one is not None:
        yield Statement(
            "Learning rate", _rate(found, one), one.learning_rate, "probably", "assumed"
        )
        for name, old, new in _other_settings(found, one):
            yield Statement(name, f"{new} instead of {old}", basis="assumed")
    yield Statement("Why", found.evidence)
    if found.noise_scale.known:
        yield Statement(
            "Noise scale",
            f"{with_bounds(found.noise_scale)} {found.unit},"
            f" {'of the whole run' if found.measured else 'as given'}",
            found.noise_scale,
            basis="measured" if found.measured else "assumed",
        )
    kept = "as many examples as before"
    for label, pair, text in (
        ("Steps", found.steps, kept),
        ("Warm-up", found.warm_up_steps, f"steps, {kept}"),
    ):
        if pair is not None:
            yield Statement(label, f"{number(pair[1])} instead of {number(pair[0])}: {text}")
    if found.ema_decay is not None:
        before, after = found.ema_decay
        yield Statement(
            "Average of weights",
            f"a decay of {after:.6g} instead of {before:.6g}: the same share of the training",
        )


def _recommended_one(found: Rescale) -> RuleSettings | None:
    return next((one for one in found.answers if one.rule.name == found.recommended), None)


def _rate(found: Rescale, one: RuleSettings) -> str:
    if found.before.learning_rate is None:
        return f"{_short_rate(found, one)} the old learning rate"
    old = number(found.before.learning_rate)
    return f"a learning rate of {_short_rate(found, one)} instead of {old}"


def _short_rate(found: Rescale, one: RuleSettings) -> str:
    if not one.learning_rate.known:
        return "unknown"
    text = with_bounds(one.learning_rate)
    return f"{text} x" if found.before.learning_rate is None else text


def _other_settings(found: Rescale, one: RuleSettings) -> Iterator[tuple[str, str, str]]:
    """Yield settings other than the learning rate that the rule changes: name, before, after."""
    for name, old in vars(found.before).items():
        new = getattr(one.settings, name)
        if name != "learning_rate" and old is not None and new != old:
            yield name, f"{old:.6g}", f"{new:.6g}"


def _table(found: Rescale) -> Table:
    lines = []
    for one in found.answers:
        others = ", ".join(f"{name} {new}" for name, _, new in _other_settings(found, one))
        marks = ["recommended"] if one.rule.name == found.recommended else []
        if one.holds is False:
            marks.append("outside")
        cells = [one.rule.name, _short_rate(found, one), others or "as before", one.rule.valid]
        lines.append(Line(list(map(Cell, cells)), marks))
    sources = [f"{one.rule.name}: {one.rule.source}." for one in found.answers]
    return Table(
        "Rules",
        ("rule", "learning rate", "others", "it holds"),
        lines,
        ["outside: the batch sizes lie where the rule was not made for.", *sources],
    )


def _doubts(found: Rescale) -> Iterator[str]:
    if found.kind == "muon":
        yield "Muon was swept on one workload alone."
    if found.new / found.old > 16 or found.old / found.new > 16:
        yield "The rules were held against the best learning rates at most 16 x apart."
