# SPDX-License-Identifier: Apache-2.0
"""Published rules of the batch size of a pretraining, with what each means by it.

Batch sizes that mean different things are no estimates of one number. The least loss at a horizon,
20 % more examples than the least, and twice the least steps lie up to a factor of ten apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Meaning = Literal["lowest loss", "fewest tokens", "20 % overhead", "critical"]

MEANINGS: dict[Meaning, str] = {
    "lowest loss": "the loss at the end of the horizon is the least",
    "fewest tokens": "a loss is reached with the fewest tokens",
    "20 % overhead": "a loss is reached with 1.2 x the steps that perfect scaling would take",
    "critical": "a loss is reached with twice the least steps and twice the least tokens",
}
"""What a rule's batch size is."""


class Setting(NamedTuple):
    """What a rule may ask for."""

    tokens: float
    """The tokens of the training."""
    parameters: float
    """The parameters of the model, without embeddings."""
    loss: float = math.nan
    """The training loss at the batch size's place in the run, in nats for a token."""

    @property
    def flops(self) -> float:
        """6 N D, of the whole training."""
        return 6 * self.parameters * self.tokens


class Fitted(NamedTuple):
    """The range in which a rule was fitted."""

    of: Literal["tokens", "parameters", "flops", "loss"] | None
    """None: the range is not known."""
    low: float
    high: float
    text: str
    """The range in words, with what was trained."""


@dataclass(frozen=True)
class BatchSizeRule:
    """A published rule of the batch size."""

    name: str
    meaning: Meaning
    batch_size: Callable[[Setting], float]
    """The batch size in tokens; NaN if the rule goes by the loss and there is none."""
    fitted: Fitted
    source: str
    read: Literal["the paper", "its code", "second-hand"]
    """Where the constants were read. Second-hand: in papers and code of others."""

    def is_inside(self, setting: Setting) -> bool | None:
        """Return whether a setting lies where the rule was fitted; None if that is not known."""
        if self.fitted.of is None:
            return None
        inside: bool = self.fitted.low <= getattr(setting, self.fitted.of) <= self.fitted.high
        return inside


_NANOCHAT_TOKENS = 12 * (12 * 12 * 768**2 + 768 * 2**15)
"""D_ref: 12 tokens for each number in the matrices and the head of 12 layers, 768 wide, and a
vocabulary of 2^15."""


def _nanochat(setting: Setting) -> float:
    ratio = setting.tokens / _NANOCHAT_TOKENS
    return float(2 ** round(math.log2(2**19 * ratio**0.383)))


_POWER_LINES = Fitted(
    "parameters",
    1.11e8,
    3.3e9,
    "111 million to 3.3 billion parameters, 20 to 1,280 tokens for each",
)

RULES: tuple[BatchSizeRule, ...] = (
    BatchSizeRule(
        "Step Law",
        "lowest loss",
        lambda s: 0.581 * s.tokens**0.571,
        Fitted("tokens", 4e9, 1e11, "4 to 100 billion tokens, 0.21 to 1.07 billion parameters"),
        "Li et al. 2025, arXiv 2503.04715",
        "its code",
    ),
    BatchSizeRule(
        "Schaipp",
        "lowest loss",
        lambda s: 0.667 * s.tokens**0.566,
        Fitted(None, math.nan, math.nan, "246 runs, whose range is not known here"),
        "Schaipp 2026, arXiv 2607.01487",
        "second-hand",
    ),
    BatchSizeRule(
        "Power Lines",
        "lowest loss",
        lambda s: 2048 * 0.0306 * s.tokens**0.383,
        _POWER_LINES,
        "Bergsma et al. 2025, arXiv 2505.13738",
        "second-hand",
    ),
    BatchSizeRule(
        "DeepSeek",
        "lowest loss",
        lambda s: 0.2920 * s.flops**0.3271,
        Fitted("flops", 1e17, 2e19, "1e17 to 2e19 FLOPs, and one run at 1e20"),
        "DeepSeek-AI 2024, arXiv 2401.02954",
        "second-hand",
    ),
    BatchSizeRule(
        "nanochat",
        "lowest loss",
        _nanochat,
        Fitted("tokens", _NANOCHAT_TOKENS, 1.1e10, "models of 12 and 26 layers alone, with Muon"),
        "github.com/karpathy/nanochat, scripts/base_train.py, July 2026",
        "its code",
    ),
    BatchSizeRule(
        "MiniCPM",
        "fewest tokens",
        lambda s: 1.21e9 * s.loss**-6.24,
        Fitted("parameters", 9e6, 1.7e8, "9, 30 and 170 million parameters on C4"),
        "Hu et al. 2024, arXiv 2404.06395",
        "the paper",
    ),
    BatchSizeRule(
        "Zhang",
        "20 % overhead",
        lambda s: 512 * 22.91 * (s.tokens / 1e6) ** 0.47,
        Fitted("parameters", 8.5e7, 1.2e9, "85 million to 1.2 billion parameters on C4"),
        "Zhang et al. 2024, arXiv 2410.21676",
        "second-hand",
    ),
    BatchSizeRule(
        "Power Lines, critical",
        "critical",
        lambda s: 2048 * 0.0471 * s.tokens**0.462,
        _POWER_LINES,
        "Bergsma et al. 2025, arXiv 2505.13738",
        "second-hand",
    ),
    BatchSizeRule(
        "Kaplan",
        "critical",
        lambda s: 2e8 * s.loss ** (-1 / 0.21),
        Fitted("loss", 2.3, 6.0, "losses of WebText2 down to 2.3, at most 1.5 billion parameters"),
        "Kaplan et al. 2020, arXiv 2001.08361",
        "second-hand",
    ),
)
"""The rules whose constants could be read."""

LEFT_OUT = (
    "Marin's critical batch size: its constants give twice the sizes that it names itself.",
    "Merrill et al. 2025: measured at 1 and 7 billion parameters, without a formula.",
)
"""Rules that are left out, by name, with the reason."""

ENTROPY = 1.69
"""The loss that no model went below in the fits of Hoffmann et al. 2022, in nats for a token."""
