# SPDX-License-Identifier: Apache-2.0
"""Published rules of the batch size of a pretraining: what each means by it, and its evidence.

Batch sizes that mean different things are no estimates of one number. The least loss at a horizon,
20 % more examples than the least, and twice the least steps lie up to a factor of ten apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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

USUAL_LENGTHS = (512, 8192)
"""Tokens in a sequence of the pretrainings of others."""

OPTIMIZERS = ("adamw", "muon")
"""The optimizers of the trainings behind the rules."""


class Setting(NamedTuple):
    """What a rule may ask for, and what its evidence may be limited in."""

    tokens: float
    """The tokens of the training."""
    parameters: float
    """The parameters of the model, without embeddings."""
    loss: float = math.nan
    """The training loss at the batch size's place in the run, in nats for a token."""
    sequence_length: float = math.nan
    """Tokens in a sequence; NaN if it is not known."""
    optimizer: str = "adamw"

    @property
    def flops(self) -> float:
        """6 N D, of the whole training."""
        return 6 * self.parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        """D/N."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Evidence:
    """Trainings that rules were fitted to, or held against."""

    text: str
    """What was trained, in words."""
    spans: Mapping[str, tuple[float, float]]
    """The least and the most of what a `Setting` has, as far as they are known."""
    lengths: tuple[float, float] = USUAL_LENGTHS
    """Tokens in a sequence. The default stands for lengths that are not known here."""
    optimizer: str = "adamw"
    source: str = ""

    def gaps_to(self, setting: Setting) -> list[str]:
        """Return in what a setting lies outside. What is not known of the setting does not count.

        Sequences half and twice as long are inside. A length that is not known is taken to be a
        usual one.
        """
        low, high = self.lengths
        if math.isnan(setting.sequence_length) and high < USUAL_LENGTHS[0]:
            return ["sequence length"]
        spans = {**self.spans, "sequence_length": (low / 2, high * 2)}
        values = {name: getattr(setting, name) for name in spans}
        found = [
            name.replace("_", " ")
            for name, value in values.items()
            if not (math.isnan(value) or spans[name][0] <= value <= spans[name][1])
        ]
        return found + ["optimizer"] * (setting.optimizer != self.optimizer)


@dataclass(frozen=True)
class BatchSizeRule:
    """A published rule of the batch size."""

    name: str
    meaning: Meaning
    batch_size: Callable[[Setting], float]
    """The batch size in tokens; NaN if the rule goes by the loss and there is none."""
    fitted: Evidence | None
    """None: the trainings that the rule was fitted to are not known here."""
    source: str
    read: Literal["the paper", "its code", "second-hand"]
    """Where the constants were read. Second-hand: in papers and code of others."""


class Result(NamedTuple):
    """How a rule did on trainings."""

    text: str
    holds: bool
    """Whether the rule may be used there: near the best in half of them, or within 2 x of it."""


@dataclass(frozen=True)
class Trial:
    """Rules held against trainings, the best rule first."""

    evidence: Evidence
    results: Mapping[str, Result]
    """The results by the names of the rules."""


def _near_the_best(runs: int) -> Result:
    return Result(f"{runs} of 17 within 0.25 % of the best loss", 2 * runs >= 17)


_STEP_LAW = Evidence(
    "17 trainings of 0.21 to 1.07 billion parameters on 4 to 100 billion tokens, AdamW",
    {"tokens": (4e9, 1e11), "parameters": (2.1e8, 1.1e9)},
    source="the losses published with Li et al. 2025, arXiv 2503.04715",
)

TRIALS: tuple[Trial, ...] = (
    Trial(
        _STEP_LAW,
        {
            "Step Law": _near_the_best(15),  # its own trainings
            "Schaipp": _near_the_best(15),
            "Power Lines": _near_the_best(9),
            "DeepSeek": _near_the_best(4),
            "nanochat": _near_the_best(2),
        },
    ),
    Trial(
        Evidence(
            "16 swept optima of 46 to 872 million parameters on 0.13 to 1 billion tokens, AdamW",
            {"tokens": (1.27e8, 1.03e9), "parameters": (4.6e7, 8.8e8)},
            source="Lingle, lucaslingle.substack.com, scaling laws for optimal LR, part III",
        ),
        {
            "Power Lines": Result("1.3 to 1.6 x the best", True),
            "Schaipp": Result("0.59 x the best", True),
            "Step Law": Result("0.56 x the best", True),
            "DeepSeek": Result("2.3 x the best", False),
            "nanochat": Result("4 x the best", False),
        },
    ),
    Trial(
        Evidence(
            "critical sizes of models up to 2 billion parameters, sequences of 128, Adam",
            {"parameters": (0, 2e9), "flops": (9e14, 6e19)},
            (128, 128),
            source="Li and Maddison 2026, arXiv 2605.09154",
        ),
        {
            "Kaplan": Result("13 x off", False),
            "MiniCPM": Result("16 x off", False),
        },
    ),
)
"""Rules against trainings that others published."""

_NANOCHAT_TOKENS = 12 * (12 * 12 * 768**2 + 768 * 2**15)
"""D_ref: 12 tokens for each number in the matrices and the head of 12 layers, 768 wide, and a
vocabulary of 2^15."""


def _nanochat(setting: Setting) -> float:
    ratio = setting.tokens / _NANOCHAT_TOKENS
    return float(2 ** round(math.log2(2**19 * ratio**0.383)))


_POWER_LINES = Evidence(
    "111 million to 3.3 billion parameters, 20 to 1,280 tokens for each",
    {"parameters": (1.11e8, 3.3e9), "tokens_per_parameter": (20, 1280)},
    (2048, 2048),
)

RULES: tuple[BatchSizeRule, ...] = (
    BatchSizeRule(
        "Step Law",
        "lowest loss",
        lambda s: 0.581 * s.tokens**0.571,
        _STEP_LAW,
        "Li et al. 2025, arXiv 2503.04715",
        "its code",
    ),
    BatchSizeRule(
        "Schaipp",
        "lowest loss",
        lambda s: 0.667 * s.tokens**0.566,
        None,
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
        Evidence("1e17 to 2e19 FLOPs, and one run at 1e20", {"flops": (1e17, 2e19)}, (4096, 4096)),
        "DeepSeek-AI 2024, arXiv 2401.02954",
        "second-hand",
    ),
    BatchSizeRule(
        "nanochat",
        "lowest loss",
        _nanochat,
        Evidence(
            "models of 12 and 26 layers alone, with Muon",
            {"tokens": (_NANOCHAT_TOKENS, 1.1e10), "parameters": (8e7, 9e8)},
            (2048, 2048),
            "muon",
        ),
        "github.com/karpathy/nanochat, scripts/base_train.py, July 2026",
        "its code",
    ),
    BatchSizeRule(
        "MiniCPM",
        "fewest tokens",
        lambda s: 1.21e9 * s.loss**-6.24,
        Evidence("9, 30 and 170 million parameters on C4", {"parameters": (9e6, 1.7e8)}),
        "Hu et al. 2024, arXiv 2404.06395",
        "the paper",
    ),
    BatchSizeRule(
        "Zhang",
        "20 % overhead",
        lambda s: 512 * 22.91 * (s.tokens / 1e6) ** 0.47,
        Evidence(
            "85 million to 1.2 billion parameters on C4", {"parameters": (8.5e7, 1.2e9)}, (512, 512)
        ),
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
        Evidence(
            "losses of WebText2 down to 2.3, at most 1.5 billion parameters",
            {"loss": (2.3, 6.0), "parameters": (0, 1.5e9)},
            (1024, 1024),
        ),
        "Kaplan et al. 2020, arXiv 2001.08361",
        "second-hand",
    ),
)
"""The rules whose constants could be read."""


class Standing(NamedTuple):
    """What is known of a rule at a setting."""

    has_evidence: bool
    text: str
    """How it did there, or in what the setting lies outside."""
    rank: int
    """A smaller rank has more evidence: 0, 1, ... for the results of a trial, then a fit."""


def standing_of(rule: BatchSizeRule, setting: Setting) -> Standing:
    """Return what is known of a rule at a setting.

    A trial there decides. Without one the rule's own fit does, unless the rule failed in each trial
    with its optimizer at usual lengths.
    """
    trials = [trial for trial in TRIALS if rule.name in trial.results]
    for trial in trials:
        if not trial.evidence.gaps_to(setting):
            text, holds = trial.results[rule.name]
            place = list(trial.results).index(rule.name)
            return Standing(holds, text, place if holds else 90)
    if rule.fitted is None:
        return Standing(False, "its trainings are not known here", 91)
    if beyond := rule.fitted.gaps_to(setting):
        return Standing(False, ", ".join(beyond), 91)
    usual = [x for x in trials if x.evidence.lengths == USUAL_LENGTHS]
    alike = [x.results[rule.name] for x in usual if x.evidence.optimizer == setting.optimizer]
    if alike and not any(one.holds for one in alike):
        return Standing(False, f"fitted there, but {alike[0].text} elsewhere", 90)
    return Standing(True, "fitted there", 50)


def held_elsewhere(rule: BatchSizeRule, optimizer: str) -> bool:
    """Return whether a rule held in a trial with an optimizer; if untried, whether it has a fit."""
    tried = [x for x in TRIALS if rule.name in x.results and x.evidence.optimizer == optimizer]
    if tried:
        return any(x.results[rule.name].holds for x in tried)
    return rule.fitted is not None and rule.fitted.optimizer == optimizer


LEFT_OUT = (
    "Marin's critical batch size: its constants give twice the sizes that it names itself.",
    "Merrill et al. 2025: measured at 1 and 7 billion parameters, without a formula.",
)
"""Rules that are left out, by name, with the reason."""

ENTROPY = 1.69
"""The loss that no model went below in the fits of Hoffmann et al. 2022, in nats for a token."""
