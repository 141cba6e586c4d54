# SPDX-License-Identifier: Apache-2.0
"""`rescale`: what to set at another batch size, by named rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.checks import is_real, require_positive
from noisescale.prediction.learning_rate import kind_in
from noisescale.prediction.predict import predict
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import count, number, with_bounds
from noisescale.report.records import fields_of, finite
from noisescale.tradeoff.learning_rate_rules import (
    FARTHEST,
    KINDS,
    LEFT_OUT,
    RULES,
    SHORTEST_BETA2,
    Advice,
    Change,
    Kind,
    LearningRateRule,
    Settings,
    advise,
    factor_by,
    is_below,
    is_usable,
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
    usable: bool = True
    """Whether Adam trains with the betas that it sets."""


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
    advice: Advice
    """The rule to take, or the safe range, and why."""
    warm_up_steps: tuple[float, float] | None = None
    """Steps before and after, of as many examples."""
    steps: tuple[float, float] | None = None
    """Steps before and after, of as many examples."""
    ema_decay: tuple[float, float] | None = None
    """The decay before and after, of the same share of the training."""

    @cached_property
    def recommended(self) -> str:
        """The name of the rule to take, or to try first."""
        return self.advice.rule.name

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
        | `recommended`, `swept`, `why` | the rule to take, whether it was held against sweeps \
          there, and why |
        | `factor` | the new learning rate over the old one: with the bounds of the noise scale, \
          or with the ends of the safe range |
        | `error` | the factor that the rule was off by on held-out sweeps, or None |
        | `rules` | `name`, `settings`, `learning_rate` with bounds, `holds`, `usable`, `valid`, \
          `source` |
        | `steps`, `warm_up_steps`, `ema_decay` | before and after, or None |
        """
        rules = [
            fields_of(one.rule, "name", "valid", "source")
            | fields_of(one, "learning_rate", "holds", "usable")
            | {"settings": vars(one.settings)}
            for one in self.answers
        ]
        alike = "unit", "noise_scale", "recommended"
        found: dict[str, Any] = finite(
            {"from_batch_size": self.old, "batch_size": self.new, "optimizer": self.kind}
            | fields_of(self, *alike, "steps", "warm_up_steps", "ema_decay")
            | fields_of(self.advice, "factor", "swept", "error", "why")
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

    Where no rule was held against sweeps, or the place is not known, the answer is the safe range:
    from the old learning rate to k times that, where the batch size becomes k times as large.

    Args:
        run: A run with a monitor. Its batch size, its largest learning rate, its noise scale and
            the kind of its optimizer are read. None: these are given.
        batch_size: The new batch size.
        from_batch_size: The old batch size. Default: the run's last one.
        noise_scale: The noise scale. Default: that of the whole run.
        optimizer: "sgd", "momentum", "adam" (or "adamw") or "muon". Default: that of the run, or of
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
        >>> rescale(None, 256, from_batch_size=64, optimizer="adamw").advice.factor
        Bounded(value=2.0, low=1.0, high=4.0)
    """
    values = locals()
    _check_settings({name: values[name] for name in _SETTINGS if name in values}, betas)
    new = require_positive("batch_size", batch_size, "Give 256, for instance.")
    if from_batch_size is not None:
        require_positive("from_batch_size", from_batch_size, "Give 64, for instance.")
    elif run is None:
        raise Refusal(
            "from_batch_size", "be given without a run", "none", "Give the old batch size."
        )
    if noise_scale is not None:
        require_positive("noise_scale", noise_scale, "Give 30, for instance.")
    kind = _kind_from(optimizer)
    read = _Read.of(run)
    kind = kind or read.kind
    _check_kind(kind, momentum, betas)
    old = read.batch_size if from_batch_size is None else from_batch_size
    scale = read.noise_scale
    if noise_scale is not None:
        scale = Bounded(noise_scale, noise_scale, noise_scale)
    if new == old:
        raise Refusal("batch_size", "differ from the old one", f"{new:g}", "Give the new one.")
    if not 1 / FARTHEST <= new / old <= FARTHEST:
        raise Refusal(
            "batch_size",
            f"be at most {FARTHEST:g} times the old one, or one over that",
            f"{new / old:.3g} times {old:g}",
            f"Give one from {math.ceil(old / FARTHEST)} to {math.floor(old * FARTHEST)}: no rule"
            " was tried farther away.",
        )
    rate = read.learning_rate if learning_rate is None else learning_rate
    beta1, beta2 = betas or (None, None)
    before = Settings(rate, momentum, beta1, beta2, eps, weight_decay)
    below = is_below(max(new, old), scale)
    k = new / old
    return Rescale(
        old=old,
        new=new,
        unit=read.unit,
        noise_scale=scale,
        measured=noise_scale is None,
        kind=kind,
        before=before,
        answers=tuple(
            _answer(rule, before, Change(old, new, scale.value), scale, below)
            for rule in RULES
            if kind is None or kind in rule.kinds
        ),
        advice=advise(kind, old, new, scale, has_run=run is not None),
        warm_up_steps=None if warm_up_steps is None else (warm_up_steps, warm_up_steps / k),
        steps=None if steps is None else (steps, steps / k),
        ema_decay=None if ema_decay is None else (ema_decay, ema_decay**k),
    )


_SETTINGS = {
    "learning_rate": (False, 1e3, "1e-3"),
    "momentum": (True, 1.0, "0.9"),
    "beta1": (True, 1.0, "0.9"),
    "beta2": (True, 1.0, "0.95"),
    "eps": (False, 1.0, "1e-8"),
    "weight_decay": (True, 1e3, "0.1"),
    "ema_decay": (True, 1.0, "0.999"),
    "warm_up_steps": (True, 1e12, "500"),
    "steps": (False, 1e12, "10000"),
}
"""Whether a setting may be 0, what it has to be below, and an example."""


def _check_settings(given: Mapping[str, float | None], betas: Sequence[float] | None) -> None:
    """Refuse settings that no optimizer has."""
    if betas is not None and len(betas) != 2:
        raise Refusal("betas", "be two numbers", repr(betas), "Give (0.9, 0.95), for instance.")
    for name, value in {
        **given,
        **dict(zip(("beta1", "beta2"), betas or (), strict=False)),
    }.items():
        may_be_zero, most, usual = _SETTINGS[name]
        inside = is_real(value) and (0 < value < most or (may_be_zero and value == 0))
        if value is not None and not inside:
            least = "0 or more" if may_be_zero else "above 0"
            remedy = f"Give {usual}, for instance, or leave it out."
            raise Refusal(name, f"be {least} and below {most:g}", repr(value), remedy)
    warm_up, steps = given["warm_up_steps"], given["steps"]
    if warm_up is not None and steps is not None and warm_up > steps:
        got = f"{warm_up:g} > {steps:g}"
        raise Refusal("warm_up_steps", "not exceed `steps`", got, "Exchange them.")


def _kind_from(optimizer: str | None) -> Kind | None:
    """Return the kind that is meant."""
    if optimizer is None:
        return None
    name = optimizer.lower() if isinstance(optimizer, str) else optimizer
    for kind in KINDS:
        if name == kind or (name, kind) == ("adamw", "adam"):
            return kind
    raise Refusal(
        "optimizer",
        f"be one of {', '.join(KINDS)}",
        repr(optimizer),
        "Leave it out for another one: the answer is then the safe range.",
    )


def _check_kind(kind: Kind | None, momentum: float | None, betas: object) -> None:
    """Refuse settings that the optimizer does not have."""
    if kind in ("sgd", "momentum") and betas is not None:
        raise Refusal("betas", f"not be given for {kind}", repr(betas), "Leave them out.")
    if kind == "adam" and momentum is not None:
        remedy = "Leave it out: its momentum is beta1."
        raise Refusal("momentum", "not be given for adam", repr(momentum), remedy)
    if kind == "sgd" and momentum:
        remedy = 'Give `optimizer="momentum"`, or leave it out.'
        raise Refusal("momentum", "not be given for sgd", repr(momentum), remedy)


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
        return cls(
            found.position.batch_size,
            found.critical_batch_size_by_noise_scale,
            kind_in(history),
            float(rates.max()) if rates.size else None,
            found.unit,
        )


def _answer(
    rule: LearningRateRule, before: Settings, change: Change, scale: Bounded, below: bool | None
) -> RuleSettings:
    rate = factor_by(rule, change.old, change.new, scale) * (before.learning_rate or 1.0)
    holds = None if below is None else rule.below if below else rule.above
    settings = rule.apply(before, change)
    return RuleSettings(rule, settings, rate, holds, is_usable(settings, before))


def _headline(found: Rescale) -> str:
    sizes = f"a batch of {count(found.new)} instead of {count(found.old)} {found.unit}"
    by = f", by the rule {found.recommended!r}" if found.advice.swept else ""
    return f"For {sizes}: {_rate(found)}{by}"


def _statements(found: Rescale) -> Iterator[Statement]:
    rate = found.advice.factor * (found.before.learning_rate or 1.0)
    yield Statement("Learning rate", _rate(found), rate, "probably", "assumed")
    if found.new > found.old:
        yield Statement("Try", "warm up to it, and halve it if the loss spikes")
    for name, old, new in _other_settings(found, _recommended_one(found)):
        yield Statement(name, f"{new} instead of {old}", basis="assumed")
    if bad := [one for one in found.answers if not one.usable]:
        beta2 = found.before.beta2 or 1.0
        names = " and ".join(repr(one.rule.name) for one in bad)
        yield Statement(
            "Betas",
            f"as before; if you scale beta2, not below {min(beta2, SHORTEST_BETA2):g}. Those of"
            f" {names} are unusable: a public run with such betas had spikes",
        )
    yield Statement("Why", found.advice.why)
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


def _recommended_one(found: Rescale) -> RuleSettings:
    return next(one for one in found.answers if one.rule.name == found.recommended)


def _rate(found: Rescale) -> str:
    old = found.before.learning_rate
    band = found.advice.factor * (old or 1.0)
    unit = " x the old learning rate" if old is None else f" instead of {number(old)}"
    of = "" if old is None else "a learning rate of "
    if found.advice.swept:
        return f"{of}{with_bounds(band)}{unit}"
    first = f"{number(band.value)} ({found.recommended})"
    return f"{of}{number(band.low)} to {number(band.high)}{unit}, first {first}"


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
        if not one.usable:
            marks.append("unusable")
        if one.holds is False:
            marks.append("outside")
        cells = [one.rule.name, _short_rate(found, one), others or "as before", one.rule.valid]
        lines.append(Line(list(map(Cell, cells)), marks))
    sources = [f"{one.rule.name}: {one.rule.source}." for one in found.answers]
    notes = ["outside: the batch sizes lie where the rule was not made for."]
    if not all(one.usable for one in found.answers):
        notes += ["unusable: beta2 is below 0.9, or beta1 is 0."]
    headings = ("rule", "learning rate", "others", "it holds")
    return Table("Rules", headings, lines, [*notes, *sources])


def _doubts(found: Rescale) -> Iterator[str]:
    if found.kind == "muon":
        yield "Muon was swept on one workload alone."
    if found.new / found.old > 16 or found.old / found.new > 16:
        yield "The rules were held against the best learning rates at most 16 x apart."
