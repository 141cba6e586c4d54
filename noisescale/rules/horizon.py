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
from noisescale.checks import is_real, require_choice, require_count, require_positive
from noisescale.prediction.predict import predict
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table, Verdict
from noisescale.report.numbers import number, rough, with_bounds
from noisescale.report.records import fields_of, finite
from noisescale.rules.batch_size_rules import (
    ENTROPY,
    LEFT_OUT,
    MEANINGS,
    OPTIMIZERS,
    RULES,
    TRIALS,
    BatchSizeRule,
    Setting,
    Standing,
    held_elsewhere,
    standing_of,
)

_HOW_TO_READ = (
    "Rules were fitted to trainings of others. A batch size of one meaning says nothing against one"
    " of another: between the lowest loss and the critical batch size lies a factor of ten or so."
    " The rule with the most evidence at the asked point comes first."
)

MOST_LOSS = 20.0
"""No model has a larger loss: it would be below chance at a vocabulary of 10^8."""

_LIMITS = {"tokens": (1e6, 1e16, "10e9"), "parameters": (1e4, 1e14, "300e6")}
"""The least and the most that is taken for no slip of the pen, and an example."""


@dataclass(frozen=True)
class RuleAnswer:
    """What a rule says."""

    rule: BatchSizeRule
    tokens: float
    """The batch size in tokens."""
    standing: Standing
    """What is known of the rule there."""

    @property
    def is_inside(self) -> bool:
        """Whether the rule has evidence there."""
        return self.standing.has_evidence


@dataclass(frozen=True)
class Horizon(Answer):
    """What the rules say."""

    setting: Setting
    answers: tuple[RuleAnswer, ...]
    """What each rule says. Those with one meaning stand together, the most evidence first."""
    not_asked: tuple[str, ...]
    """Names of the rules that need a loss, where none was given."""
    measured: Bounded | None = None
    """The critical batch size of a run in tokens, if one was given."""
    run: str = "the run"
    """The name of the run."""

    @property
    def by_loss(self) -> list[RuleAnswer]:
        """The rules of the lowest loss that count: those with evidence there, else elsewhere."""
        rules = [one for one in self.answers if one.rule.meaning == "lowest loss"]
        if there := [one for one in rules if one.is_inside]:
            return there
        asked = self.setting._replace(sequence_length=math.nan)  # of any length, if there are some
        held = [one for one in rules if held_elsewhere(one.rule, asked.optimizer)]
        return sorted(held, key=lambda one: standing_of(one.rule, asked).rank)

    @property
    def take(self) -> Bounded:
        """The batch size to take, in tokens: by the rule with the most evidence.

        Its bounds are the range of all rules that count.
        """
        sizes = [one.tokens for one in self.by_loss]
        return Bounded(sizes[0], min(sizes), max(sizes))

    def document(self) -> Document:
        """Return what the rules say, side by side."""
        unknown_length = math.isnan(self.setting.sequence_length)
        return Document(
            title="Batch size of a horizon - noisescale",
            headline=_headline(self),
            answers=list(_statements(self)),
            tables=[_rules(self), _sources(self)],
            doubts=list(_doubts(self)),
            assumptions=[
                "FLOPs are taken as 6 x parameters x tokens, without attention.",
                "The rules were fitted to text, with schedules and models of their own.",
                "Step Law was fitted to the 17 trainings that rules are held against.",
                *["No sequence length was given: a usual one is taken."] * unknown_length,
                *LEFT_OUT,
            ],
            how_to_read=_HOW_TO_READ,
            next=_next(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the rules' answers in builtin types.

        | key | meaning |
        |---|---|
        | `tokens`, `parameters`, `loss`, `sequence_length`, `optimizer` | the setting |
        | `take`, `take_by` | the batch size to take, with the range of the rules that count; the \
          rule |
        | `outside` | whether every rule of the lowest loss is outside of its evidence |
        | `rules` | `name`, `tokens`, `meaning`, `inside`, `evidence`, `fitted`, `source` and \
          `read` of each |
        | `measured` | `value`, `low` and `high` of a run's critical batch size in tokens |
        """
        rules = [
            fields_of(one.rule, "name", "meaning", "source", "read")
            | {"tokens": one.tokens, "inside": one.is_inside, "evidence": one.standing.text}
            | {"fitted": one.rule.fitted and one.rule.fitted.text}
            for one in self.answers
        ]
        first = self.by_loss[0]
        found: dict[str, Any] = finite(
            self.setting._asdict()
            | {"take": self.take, "take_by": first.rule.name, "outside": not first.is_inside}
            | {"rules": rules, "measured": self.measured}
        )
        return found


def horizon(
    tokens: float,
    parameters: float,
    *,
    loss: float | None = None,
    run: str | PathLike[str] | Mapping[str, ArrayLike] | None = None,
    sequence_length: int | None = None,
    optimizer: str = "adamw",
) -> Horizon:
    """Return what published rules say of the batch size of a pretraining, and which one to take.

    Each rule has its own meaning of the batch size. Rules are put side by side, and never averaged:
    the rule with the most evidence at such trainings comes first.

    Args:
        tokens: Tokens of the training.
        parameters: Parameters of the model, without embeddings.
        loss: The training loss in nats for a token, for the rules that go by it.
        run: A run with a monitor, whose measured critical batch size is put beside the rules.
        sequence_length: Tokens in a sequence. Batch sizes are also said in sequences, rules are
            outside of their evidence at other lengths, and a run that counts sequences can be put
            beside the rules.
        optimizer: "adamw" or "muon".

    Raises:
        ValueError: If a number is out of range, or the run does not count tokens or sequences.
        OSError: If the run cannot be read.

    Examples:
        >>> found = horizon(10e9, 300e6)
        >>> [f"{one.rule.name} {one.tokens / 1e6:.2f}M" for one in found.answers[:3]]
        ['Step Law 0.30M', 'Schaipp 0.30M', 'Power Lines 0.42M']
        >>> found.take
        Bounded(value=298000.0, low=298000.0, high=424000.0)
    """
    for name, value in (("tokens", tokens), ("parameters", parameters)):
        least, most, example = _LIMITS[name]
        require_positive(name, value, f"Give {example}, for instance.")
        if not least <= value <= most:
            remedy = f"Give single {name}, not thousands or millions: {example}, for instance."
            raise Refusal(name, f"be {least:g} to {most:g}", f"{value:g}", remedy)
    if sequence_length is not None:
        require_count("sequence_length", sequence_length, "Give 2048, for instance.")
        if sequence_length > tokens:
            got = f"{sequence_length} > {tokens:g}"
            raise Refusal(
                "sequence_length", "not exceed `tokens`", got, "Give the tokens of one sequence."
            )
    if loss is not None and not (is_real(loss) and ENTROPY < loss < MOST_LOSS):
        raise Refusal(
            "loss",
            f"lie between the entropy of text, {ENTROPY:g} nats for a token, and {MOST_LOSS:g}",
            repr(loss),
            "Give nats, not bits or perplexity; leave it out for code and other data.",
        )
    if not isinstance(optimizer, str) or optimizer.lower() not in {*OPTIMIZERS, "adam"}:
        require_choice("optimizer", optimizer, OPTIMIZERS, "The rules have no evidence for others.")
    setting = Setting(
        float(tokens),
        float(parameters),
        math.nan if loss is None else loss,
        math.nan if sequence_length is None else sequence_length,
        "muon" if optimizer.lower() == "muon" else "adamw",
    )
    sizes = [(rule, rule.batch_size(setting)) for rule in RULES]
    answers = [
        RuleAnswer(rule, size, standing_of(rule, setting))
        for rule, size in sizes
        if not math.isnan(size)
    ]
    order = list(MEANINGS)
    answers.sort(key=lambda one: (order.index(one.rule.meaning), one.standing.rank))
    return Horizon(
        setting=setting,
        answers=tuple(answers),
        not_asked=tuple(rule.name for rule, size in sizes if math.isnan(size)),
        measured=None if run is None else _critical_size_of(run, sequence_length),
        run=str(run) if isinstance(run, str | Path) else "the run",
    )


def _critical_size_of(
    run: str | PathLike[str] | Mapping[str, ArrayLike], sequence_length: int | None
) -> Bounded:
    found = predict(run)  # type: ignore[arg-type]  # it takes what this takes
    unit = found.unit
    factor = {"tokens": 1, "sequences": sequence_length}.get(unit)
    if factor is None:
        remedy = "Give the tokens in a sequence."
        if unit != "sequences":
            remedy = 'Leave `run` out, or measure with `unit="tokens"` or "sequences".'
        raise Refusal(
            ("run", "sequence_length"),
            "give the run's batch size in tokens",
            f"{unit} and {sequence_length}",
            remedy,
        )
    return found.critical_batch_size * float(factor)


def _headline(found: Horizon) -> str:
    setting = found.setting
    rules = [one for one in found.answers if one.rule.meaning == "lowest loss"]
    outside = len([one for one in rules if not one.is_inside])
    which = "all" if outside == len(rules) else f"{outside} of {len(rules)}"
    what = f"{_amount(setting.tokens)} tokens and {_amount(setting.parameters)} parameters"
    return (
        f"For {what} take a batch of {_amount(found.take.value)} tokens; {which} rules"
        " are outside of their evidence there"
    )


def _statements(found: Horizon) -> Iterator[Statement]:
    take, first = found.take, found.by_loss[0]
    outside = "outside of all evidence, by rules that held elsewhere: " * (not first.is_inside)
    sentence = f"{outside}{with_bounds(take, _amount)} tokens, by {first.rule.name}"
    if not math.isnan(found.setting.sequence_length):
        sentence += f"; {number(take.value / found.setting.sequence_length)} sequences"
    sure: Verdict = "probably" if first.is_inside else "unknown"
    yield Statement("Take", sentence, take, sure, "assumed")
    for meaning, text in MEANINGS.items():
        some = [one for one in found.answers if one.rule.meaning == meaning]
        if meaning == "lowest loss":
            some = found.by_loss
        if counted := [one for one in some if one.is_inside] or some:
            out = "" if counted[0].is_inside else ", outside of all evidence"
            what = f"{_amounts(counted)} tokens{out}: {text}"
            yield Statement(meaning.capitalize(), what, basis="assumed")
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
    length = found.setting.sequence_length
    return tokens if math.isnan(length) else f"{tokens} = {number(one.tokens / length)} sequences"


def _rules(found: Horizon) -> Table:
    lines = [
        Line(
            [*map(Cell, (one.rule.name, _size(found, one), one.rule.meaning, one.standing.text))],
            [] if one.is_inside else ["outside"],
        )
        for one in found.answers
    ]
    notes = ["outside: the rule has no evidence there. It is named in what, or how far off it was."]
    return Table("Rules", ("rule", "batch size", "it means", "evidence there"), lines, notes)


def _sources(found: Horizon) -> Table:
    lines = [Line([Cell(one.rule.name), Cell(one.rule.source)]) for one in found.answers]
    notes = [
        f"{one.rule.name}: fitted on {one.rule.fitted.text}."
        for one in found.answers
        if one.rule.fitted is not None
    ]
    notes += [f"Held against {x.evidence.text}: {x.evidence.source}." for x in TRIALS]
    return Table("Where they come from", ("rule", "source"), lines, notes, detail=True)


def _doubts(found: Horizon) -> Iterator[str]:
    if outside := [one.rule.name for one in found.answers if not one.is_inside]:
        yield f"Outside of their evidence: {', '.join(outside)}."
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
