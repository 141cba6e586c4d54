# SPDX-License-Identifier: Apache-2.0
"""What `rescale` found."""

from __future__ import annotations

from dataclasses import dataclass

from noisescale.bounded import Bounded
from noisescale.rules.learning_rate_rules import Change, Kind, LearningRateRule, Settings


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
class RescaleRecord:
    """The fields of `Rescale`."""

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

    @property
    def change(self) -> Change:
        """The change of the batch size, at the noise scale."""
        return Change(self.old, self.new, self.noise_scale.value)
