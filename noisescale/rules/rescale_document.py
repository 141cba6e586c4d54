# SPDX-License-Identifier: Apache-2.0
"""What `rescale` says: a document, and the same in builtin types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import count, number, with_bounds
from noisescale.report.records import finite
from noisescale.rules.learning_rate_rules import LEFT_OUT
from noisescale.rules.rescale_record import RescaleRecord, RuleSettings

_HOW_TO_READ = (
    "A rule says what to set at the new batch size if the old settings were the best ones at the"
    " old size. Bounds are those of the noise scale alone. No rule is right everywhere: two or"
    " three learning rates around the recommended one are worth a try."
)


def document_of(found: RescaleRecord) -> Document:
    """Return what each rule would set, and which one to take."""
    return Document(
        title=f"Batch size {count(found.new)}: what to set - noisescale",
        headline=_headline(found),
        answers=list(_statements(found)),
        tables=[_table(found)],
        doubts=list(_doubts(found)),
        assumptions=[
            "The old settings are taken to be the best ones at the old batch size.",
            "All groups of parameters change by the same factors.",
            *LEFT_OUT,
        ],
        how_to_read=_HOW_TO_READ,
        next=["Check it: noisescale sweep trains at several learning rates for each batch size."],
    )


def _headline(found: RescaleRecord) -> str:
    sizes = f"a batch of {count(found.new)} instead of {count(found.old)} {found.unit}"
    one = _recommended_one(found)
    if one is None:
        return f"For {sizes} no rule is recommended"
    return f"For {sizes}: {_rate(found, one)}, by the rule {one.rule.name!r}"


def _statements(found: RescaleRecord) -> Iterator[Statement]:
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


def _recommended_one(found: RescaleRecord) -> RuleSettings | None:
    return next((one for one in found.answers if one.rule.name == found.recommended), None)


def _rate(found: RescaleRecord, one: RuleSettings) -> str:
    if found.before.learning_rate is None:
        return f"{_short_rate(found, one)} the old learning rate"
    old = number(found.before.learning_rate)
    return f"a learning rate of {_short_rate(found, one)} instead of {old}"


def _short_rate(found: RescaleRecord, one: RuleSettings) -> str:
    if not one.learning_rate.known:
        return "unknown"
    text = with_bounds(one.learning_rate)
    return f"{text} x" if found.before.learning_rate is None else text


def _other_settings(found: RescaleRecord, one: RuleSettings) -> Iterator[tuple[str, str, str]]:
    """Yield settings other than the learning rate that the rule changes: name, before, after."""
    for name, old in vars(found.before).items():
        new = getattr(one.settings, name)
        if name != "learning_rate" and old is not None and new != old:
            yield name, f"{old:.6g}", f"{new:.6g}"


def _table(found: RescaleRecord) -> Table:
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


def _doubts(found: RescaleRecord) -> Iterator[str]:
    if found.kind == "muon":
        yield "Muon was swept on one workload alone."
    if found.new / found.old > 16 or found.old / found.new > 16:
        yield "The rules were held against the best learning rates at most 16 x apart."


def as_dict(found: RescaleRecord) -> dict[str, Any]:
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
        {
            "name": one.rule.name,
            "settings": vars(one.settings),
            "learning_rate": vars(one.learning_rate),
            "holds": one.holds,
            "valid": one.rule.valid,
            "source": one.rule.source,
        }
        for one in found.answers
    ]
    record: dict[str, Any] = {
        "from_batch_size": found.old,
        "batch_size": found.new,
        "unit": found.unit,
        "optimizer": found.kind,
        "noise_scale": vars(found.noise_scale),
        "recommended": found.recommended,
        "evidence": found.evidence,
        "rules": rules,
        "steps": found.steps,
        "warm_up_steps": found.warm_up_steps,
        "ema_decay": found.ema_decay,
    }
    result: dict[str, Any] = finite(record)
    return result
