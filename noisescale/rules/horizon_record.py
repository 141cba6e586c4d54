# SPDX-License-Identifier: Apache-2.0
"""What `horizon` found."""

from __future__ import annotations

from dataclasses import dataclass

from noisescale.bounded import Bounded
from noisescale.rules.batch_size_rules import BatchSizeRule, Setting


@dataclass(frozen=True)
class RuleAnswer:
    """What a rule says."""

    rule: BatchSizeRule
    tokens: float
    """The batch size in tokens."""
    inside: bool | None
    """Whether the setting lies where the rule was fitted; None if that is not known."""


@dataclass(frozen=True)
class Measured:
    """The critical batch size of a run, in tokens."""

    critical_batch_size: Bounded
    run: str
    """The name of the run."""


@dataclass(frozen=True)
class HorizonRecord:
    """The fields of `Horizon`."""

    setting: Setting
    answers: tuple[RuleAnswer, ...]
    """What each rule says. Those with one meaning stand together."""
    not_asked: tuple[str, ...]
    """Names of the rules that need a loss, where none was given."""
    measured: Measured | None = None
    """The critical batch size of a run, if one was given."""
    sequence_length: int | None = None
    """Tokens in a sequence."""
