# SPDX-License-Identifier: Apache-2.0
"""What `horizon` says: a document, and the same in builtin types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from noisescale.report.document import Cell, Document, Figure, Line, Statement, Table
from noisescale.report.numbers import number, rough, with_bounds
from noisescale.report.records import finite
from noisescale.rules.batch_size_rules import LEFT_OUT, MEANINGS, RULES, Meaning
from noisescale.rules.horizon_record import HorizonRecord, RuleAnswer

_HOW_TO_READ = (
    "Rules were fitted to trainings of others. A batch size of one meaning says nothing against one"
    " of another: between the lowest loss and the critical batch size lies a factor of ten or so."
)


def document_of(found: HorizonRecord) -> Document:
    """Return what the rules say, side by side."""
    return Document(
        title="Batch size of a horizon - noisescale",
        headline=_headline(found),
        answers=list(_statements(found)),
        tables=[_rules(found), _sources(found)],
        figures=lambda: [_figure(found)],
        doubts=list(_doubts(found)),
        assumptions=[
            "FLOPs are taken as 6 x parameters x tokens, without attention.",
            "The rules were fitted to text, with schedules and models of their own.",
            *LEFT_OUT,
        ],
        how_to_read=_HOW_TO_READ,
        next=_next(found),
    )


def _headline(found: HorizonRecord) -> str:
    sizes = [one.tokens for one in found.answers if one.rule.meaning == "lowest loss"]
    setting = found.setting
    return (
        f"For {_amount(setting.tokens)} tokens and {_amount(setting.parameters)} parameters"
        f" {len(sizes)} rules put the lowest loss at a batch of {_amount(min(sizes))} to"
        f" {_amount(max(sizes))} tokens"
    )


def _statements(found: HorizonRecord) -> Iterator[Statement]:
    for meaning, text in MEANINGS.items():
        some = [one for one in found.answers if one.rule.meaning == meaning]
        if some:
            yield Statement(
                meaning.capitalize(),
                f"{_amounts(some)} tokens: {text}",
                basis="assumed",
            )
    if found.measured is not None:
        size = found.measured.critical_batch_size
        yield Statement(
            "Measured",
            f"{with_bounds(size, _amount)} tokens, the critical batch size of {found.measured.run}",
            size,
            basis="measured",
        )


def _amounts(some: list[RuleAnswer]) -> str:
    sizes = [one.tokens for one in some]
    least, most = _amount(min(sizes)), _amount(max(sizes))
    return least if least == most else f"{least} to {most}"


def _size(found: HorizonRecord, one: RuleAnswer) -> str:
    tokens = f"{_amount(one.tokens)} tokens"
    if found.sequence_length is None:
        return tokens
    return f"{tokens} = {number(one.tokens / found.sequence_length)} sequences"


def _rules(found: HorizonRecord) -> Table:
    lines = [
        Line(
            [Cell(one.rule.name), Cell(_size(found, one)), Cell(one.rule.meaning)],
            ["outside"] if one.inside is False else [],
        )
        for one in found.answers
    ]
    notes = ["outside: this setting lies outside of what the rule was fitted on."]
    return Table("Rules", ("rule", "batch size", "it means"), lines, notes)


def _sources(found: HorizonRecord) -> Table:
    lines = [Line([Cell(one.rule.name), Cell(one.rule.source)]) for one in found.answers]
    fitted = [f"{one.rule.name}: fitted on {one.rule.fitted.text}." for one in found.answers]
    return Table("Where they come from", ("rule", "source"), lines, fitted, detail=True)


def _doubts(found: HorizonRecord) -> Iterator[str]:
    if outside := [one.rule.name for one in found.answers if one.inside is False]:
        yield f"Outside of what they were fitted on: {', '.join(outside)}."
    if unknown := [one.rule.name for one in found.answers if one.inside is None]:
        yield f"What it was fitted on is not known here: {', '.join(unknown)}."
    hand = [one.rule.name for one in found.answers if one.rule.read == "second-hand"]
    yield f"The constants of these were read in papers and code of others: {', '.join(hand)}."


def _next(found: HorizonRecord) -> list[str]:
    following = []
    if found.not_asked:
        following = [f"Give --loss for {' and '.join(found.not_asked)}, which go by the loss."]
    if found.measured is None:
        following += ["Put a run with a monitor beside them: --run RUN --sequence-length 2048"]
    return following


_DASHES: dict[Meaning, str] = {
    "lowest loss": "solid",
    "fewest tokens": "dot",
    "20 % overhead": "dash",
    "critical": "longdash",
}


def _figure(found: HorizonRecord) -> Figure:
    from noisescale.report.colours import BLACK
    from noisescale.report.drawing import figure, log_axis, place_figure, with_legend

    setting = found.setting
    low, high = setting.tokens / 100, setting.tokens * 100
    tokens = np.geomspace(low, high, 41).tolist()
    curves = {
        rule: [rule.batch_size(setting._replace(tokens=x)) for x in tokens]
        for rule in RULES
        if setting.loss is not None or not rule.needs_loss
    }
    sizes = [x for curve in curves.values() for x in curve]
    drawn = figure(
        _headline(found),
        "Each line is a rule at this number of parameters. Solid lines: lowest loss. Dotted:"
        " fewest tokens. Dashed: 20 % overhead. Long dashes: critical.",
        log_axis("tokens of the training", low, high),
        log_axis("batch size, tokens", min(sizes) / 1.5, max(sizes) * 1.5),
    )
    for rule, curve in curves.items():
        dash = _DASHES[rule.meaning]
        drawn.add_scatter(x=tokens, y=curve, name=rule.name, mode="lines", line={"dash": dash})
    if found.measured is not None:
        size = found.measured.critical_batch_size
        high_end = size.high if math.isfinite(size.high) else max(sizes)
        middle = size.value if math.isfinite(size.value) else size.low
        drawn.add_scatter(
            x=[setting.tokens],
            y=[middle],
            name="measured: critical",
            mode="markers",
            marker={"color": BLACK, "size": 9},
            error_y={
                "type": "data",
                "array": [high_end - middle],
                "arrayminus": [middle - size.low],
            },
        )
    return place_figure("rules", "Rules over the horizon", with_legend(drawn))


def _amount(value: float) -> str:
    if value >= 1e9:
        return f"{number(value / 1e9)} billion"
    return f"{number(value / 1e6)} million" if value >= 1e6 else rough(value)


def as_dict(found: HorizonRecord) -> dict[str, Any]:
    """Return the rules' answers in builtin types.

    | key | meaning |
    |---|---|
    | `tokens`, `parameters`, `loss` | the setting |
    | `rules` | `name`, `tokens`, `meaning`, `inside`, `fitted`, `source` and `read` of each |
    | `measured` | `value`, `low` and `high` of the run's critical batch size in tokens, or None |
    """
    measured = found.measured
    rules = [
        {
            "name": one.rule.name,
            "tokens": one.tokens,
            "meaning": one.rule.meaning,
            "inside": one.inside,
            "fitted": one.rule.fitted.text,
            "source": one.rule.source,
            "read": one.rule.read,
        }
        for one in found.answers
    ]
    record: dict[str, Any] = {
        **found.setting._asdict(),
        "rules": rules,
        "measured": None if measured is None else vars(measured.critical_batch_size),
    }
    result: dict[str, Any] = finite(record)
    return result
