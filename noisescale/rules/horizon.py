# SPDX-License-Identifier: Apache-2.0
"""`horizon`: what published rules say of the batch size of a pretraining, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from noisescale.bounded import Bounded
from noisescale.checks import require_positive
from noisescale.prediction.predict import predict
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table
from noisescale.report.numbers import number, rough, with_bounds
from noisescale.report.records import fields_of, finite
from noisescale.rules.batch_size_rules import (
    ENTROPY,
    LEFT_OUT,
    MEANINGS,
    RULES,
    BatchSizeRule,
    Setting,
)

_HOW_TO_READ = (
    "Rules were fitted to trainings of others. A batch size of one meaning says nothing against one"
    " of another: between the lowest loss and the critical batch size lies a factor of ten or so."
)


@dataclass(frozen=True)
class RuleAnswer:
    """What a rule says."""

    rule: BatchSizeRule
    tokens: float
    """The batch size in tokens."""
    inside: bool | None
    """Whether the setting lies where the rule was fitted; None if that is not known."""


@dataclass(frozen=True)
class Horizon(Answer):
    """What the rules say."""

    setting: Setting
    answers: tuple[RuleAnswer, ...]
    """What each rule says. Those with one meaning stand together."""
    not_asked: tuple[str, ...]
    """Names of the rules that need a loss, where none was given."""
    measured: Bounded | None = None
    """The critical batch size of a run in tokens, if one was given."""
    run: str = "the run"
    """The name of the run."""
    sequence_length: int | None = None
    """Tokens in a sequence."""

    def document(self) -> Document:
        """Return what the rules say, side by side."""
        return Document(
            title="Batch size of a horizon - noisescale",
            headline=_headline(self),
            answers=list(_statements(self)),
            tables=[_rules(self), _sources(self)],
            doubts=list(_doubts(self)),
            assumptions=[
                "FLOPs are taken as 6 x parameters x tokens, without attention.",
                "The rules were fitted to text, with schedules and models of their own.",
                *LEFT_OUT,
            ],
            how_to_read=_HOW_TO_READ,
            next=_next(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the rules' answers in builtin types.

        | key | meaning |
        |---|---|
        | `tokens`, `parameters`, `loss` | the setting |
        | `rules` | `name`, `tokens`, `meaning`, `inside`, `fitted`, `source` and `read` of each |
        | `measured` | `value`, `low` and `high` of a run's critical batch size in tokens |
        """
        rules = [
            fields_of(one.rule, "name", "meaning", "source", "read")
            | {"tokens": one.tokens, "inside": one.inside, "fitted": one.rule.fitted.text}
            for one in self.answers
        ]
        found: dict[str, Any] = finite(
            {**self.setting._asdict(), "rules": rules, "measured": self.measured}
        )
        return found


def horizon(
    tokens: float,
    parameters: float,
    *,
    loss: float | None = None,
    run: str | PathLike[str] | Mapping[str, ArrayLike] | None = None,
    sequence_length: int | None = None,
) -> Horizon:
    """Return what published rules say of the batch size of a pretraining.

    Each rule has its own meaning of the batch size. They are put side by side, and never averaged.

    Args:
        tokens: Tokens of the training.
        parameters: Parameters of the model, without embeddings.
        loss: The training loss in nats for a token, for the rules that go by it.
        run: A run with a monitor, whose measured critical batch size is put beside the rules.
        sequence_length: Tokens in a sequence. Batch sizes are also said in sequences, and a run
            that counts sequences can be put beside the rules.

    Raises:
        ValueError: If a number is out of range, or the run does not count tokens or sequences.
        OSError: If the run cannot be read.

    Examples:
        >>> found = horizon(10e9, 300e6)
        >>> [f"{one.rule.name} {one.tokens / 1e6:.2f}M" for one in found.answers[:3]]
        ['Step Law 0.30M', 'Schaipp 0.30M', 'Power Lines 0.42M']
    """
    require_positive("tokens", tokens, "Give 10e9, for instance.")
    require_positive("parameters", parameters, "Give 300e6, for instance.")
    if sequence_length is not None:
        require_positive("sequence_length", sequence_length, "Give 2048, for instance.")
    if loss is not None and not ENTROPY < loss < math.inf:
        raise Refusal(
            "loss",
            f"be above the entropy of text, {ENTROPY:g} nats for a token",
            repr(loss),
            "Give nats, not bits or perplexity; leave it out for code and other data.",
        )
    setting = Setting(float(tokens), float(parameters), math.nan if loss is None else loss)
    sizes = {rule: rule.batch_size(setting) for rule in RULES}
    return Horizon(
        setting=setting,
        answers=tuple(
            RuleAnswer(rule, size, rule.is_inside(setting))
            for rule, size in sizes.items()
            if not math.isnan(size)
        ),
        not_asked=tuple(rule.name for rule, size in sizes.items() if math.isnan(size)),
        measured=None if run is None else _critical_size_of(run, sequence_length),
        run=str(run) if isinstance(run, str | Path) else "the run",
        sequence_length=sequence_length,
    )


def _critical_size_of(
    run: str | PathLike[str] | Mapping[str, ArrayLike], sequence_length: int | None
) -> Bounded:
    found = predict(run)  # type: ignore[arg-type]  # it takes what this takes
    unit = found.unit
    factor = {"tokens": 1, "sequences": sequence_length}.get(unit)
    if factor is None:
        raise Refusal(
            ("run", "sequence_length"),
            "give the run's batch size in tokens",
            f"{unit} and {sequence_length}",
            'Give the tokens in a sequence, for a run with `unit="sequences"`.',
        )
    return found.critical_batch_size * float(factor)


def _headline(found: Horizon) -> str:
    sizes = [one.tokens for one in found.answers if one.rule.meaning == "lowest loss"]
    setting = found.setting
    return (
        f"For {_amount(setting.tokens)} tokens and {_amount(setting.parameters)} parameters"
        f" {len(sizes)} rules put the lowest loss at a batch of {_amount(min(sizes))} to"
        f" {_amount(max(sizes))} tokens"
    )


def _statements(found: Horizon) -> Iterator[Statement]:
    for meaning, text in MEANINGS.items():
        some = [one for one in found.answers if one.rule.meaning == meaning]
        if some:
            yield Statement(
                meaning.capitalize(),
                f"{_amounts(some)} tokens: {text}",
                basis="assumed",
            )
    if found.measured is not None:
        size = with_bounds(found.measured, _amount)
        sentence = f"{size} tokens, the critical batch size of {found.run}"
        yield Statement("Measured", sentence, found.measured, basis="measured")


def _amounts(some: list[RuleAnswer]) -> str:
    sizes = [one.tokens for one in some]
    least, most = _amount(min(sizes)), _amount(max(sizes))
    return least if least == most else f"{least} to {most}"


def _size(found: Horizon, one: RuleAnswer) -> str:
    tokens = f"{_amount(one.tokens)} tokens"
    if found.sequence_length is None:
        return tokens
    return f"{tokens} = {number(one.tokens / found.sequence_length)} sequences"


def _rules(found: Horizon) -> Table:
    lines = [
        Line(
            [Cell(one.rule.name), Cell(_size(found, one)), Cell(one.rule.meaning)],
            ["outside"] if one.inside is False else [],
        )
        for one in found.answers
    ]
    notes = ["outside: this setting lies outside of what the rule was fitted on."]
    return Table("Rules", ("rule", "batch size", "it means"), lines, notes)


def _sources(found: Horizon) -> Table:
    lines = [Line([Cell(one.rule.name), Cell(one.rule.source)]) for one in found.answers]
    fitted = [f"{one.rule.name}: fitted on {one.rule.fitted.text}." for one in found.answers]
    return Table("Where they come from", ("rule", "source"), lines, fitted, detail=True)


def _doubts(found: Horizon) -> Iterator[str]:
    if outside := [one.rule.name for one in found.answers if one.inside is False]:
        yield f"Outside of what they were fitted on: {', '.join(outside)}."
    if unknown := [one.rule.name for one in found.answers if one.inside is None]:
        yield f"What it was fitted on is not known here: {', '.join(unknown)}."
    hand = [one.rule.name for one in found.answers if one.rule.read == "second-hand"]
    yield f"The constants of these were read in papers and code of others: {', '.join(hand)}."


def _next(found: Horizon) -> list[str]:
    following = []
    if found.not_asked:
        following = [f"Give --loss for {' and '.join(found.not_asked)}, which go by the loss."]
    if found.measured is None:
        following += ["Put a run with a monitor beside them: --run RUN --sequence-length 2048"]
    return following


def _amount(value: float) -> str:
    if value >= 1e9:
        return f"{number(value / 1e9)} billion"
    return f"{number(value / 1e6)} million" if value >= 1e6 else rough(value)
