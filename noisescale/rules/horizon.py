# SPDX-License-Identifier: Apache-2.0
"""`horizon`: what published rules say of the batch size of a pretraining, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from numpy.typing import ArrayLike

from noisescale.prediction.predict import predict
from noisescale.refusal import Refusal
from noisescale.report.answer import Answer
from noisescale.rules.batch_size_rules import ENTROPY, RULES, Setting
from noisescale.rules.horizon_document import as_dict, document_of
from noisescale.rules.horizon_record import HorizonRecord, Measured, RuleAnswer


class Horizon(HorizonRecord, Answer):
    """What the rules say, and the ways to show it."""

    document = document_of
    to_dict = as_dict


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
    _check("tokens", tokens, "10e9")
    _check("parameters", parameters, "300e6")
    if sequence_length is not None:
        _check("sequence_length", sequence_length, "2048")
    if loss is not None and not ENTROPY < loss < math.inf:
        raise Refusal(
            "loss",
            f"be above the entropy of text, {ENTROPY:g} nats for a token",
            repr(loss),
            "Give nats, not bits or perplexity; leave it out for code and other data.",
        )
    setting = Setting(float(tokens), float(parameters), loss)
    return Horizon(
        setting=setting,
        answers=tuple(
            RuleAnswer(rule, rule.batch_size(setting), rule.is_inside(setting))
            for rule in RULES
            if loss is not None or not rule.needs_loss
        ),
        not_asked=tuple(rule.name for rule in RULES if rule.needs_loss and loss is None),
        measured=None if run is None else _critical_size_of(run, sequence_length),
        sequence_length=sequence_length,
    )


def _critical_size_of(
    run: str | PathLike[str] | Mapping[str, ArrayLike], sequence_length: int | None
) -> Measured:
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
    where = str(run) if isinstance(run, str | Path) else "the run"
    return Measured(found.critical_batch_size * float(factor), where)


def _check(name: str, value: float, example: str) -> None:
    if not 0 < value < math.inf:
        raise Refusal(name, "be positive", repr(value), f"Give {example}, for instance.")
