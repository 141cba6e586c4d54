# SPDX-License-Identifier: Apache-2.0
"""The learning rate at the batch size that a prediction names, by the rules of `rescale`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noisescale.history.history import History
from noisescale.history.metric_names import ROOT
from noisescale.history.optimizers import OptimizerKind
from noisescale.prediction.position import Verdict
from noisescale.report.document import Statement
from noisescale.report.numbers import count, two_digits
from noisescale.report.records import fields_of
from noisescale.tradeoff.learning_rate_rules import Advice, Kind, advise, is_below

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

_KINDS: dict[OptimizerKind, Kind] = {
    OptimizerKind.SGD: "sgd",
    OptimizerKind.MOMENTUM: "momentum",
    OptimizerKind.ADAM: "adam",
    OptimizerKind.SPECTRAL: "muon",
}


def kind_in(history: History) -> Kind | None:
    """Return the kind that the rules know an optimizer by; None if they do not know it."""
    return None if history.optimizer is None else _KINDS.get(history.optimizer.kind)


@dataclass(frozen=True)
class LearningRate:
    """What to do with the learning rate at another batch size."""

    batch_size: int
    advice: Advice
    command: str
    """The command that says more: other rules and other settings."""

    def to_dict(self) -> dict[str, Any]:
        """Return batch size, factor, rule, whether it was swept, its error, reason and command."""
        advice = fields_of(self.advice, "factor", "swept", "error", "why") | {
            "rule": self.advice.rule.name
        }
        return fields_of(self, "batch_size", "command") | advice


def learning_rate_at(p: Prediction, verdict: Verdict, size: int) -> LearningRate | None:
    """Return the learning rate at the batch size that a decision names; None if it names none.

    It is the suggested batch size, or twice the run's own where more might pay.
    """
    old = p.position.batch_size
    if verdict == "keep_or_larger":
        size = 2 * round(old)
    elif verdict not in ("larger", "smaller"):
        return None
    advice = advise(kind_in(p.history), old, size, p.critical_batch_size_by_noise_scale)
    return LearningRate(size, advice, command_at(p, size))


def command_at(p: Prediction, size: int) -> str:
    """Return the command that says what to set at another batch size than the run's own."""
    history, scale = p.history, p.critical_batch_size_by_noise_scale
    alone = history.prefix == ROOT and history.optimizers == (0,)
    if history.source is not None and (alone or p.by_optimizer):
        what = f"{shlex.quote(str(history.source))} --batch-size {size}"
    else:  # by the run's name alone another monitor would be read, or nothing
        kind = kind_in(history)
        what = f"--batch-size {size} --from-batch-size {p.position.batch_size:g}"
        what += f" --optimizer {kind}" if kind else ""
        known = math.isfinite(scale.value) and scale.value > 0
        what += f" --noise-scale {scale.value:.4g}" if known else ""
    return f"noisescale rescale {what}"


def state_learning_rate(p: Prediction) -> Iterator[Statement]:
    """Yield the learning rate at the batch size that an answer names."""
    if (found := p.learning_rate) is None:
        return
    advice, mix = found.advice, p.history.optimizer
    value, low, high = (two_digits(x) for x in vars(advice.factor).values())
    at = f"x yours at {count(found.batch_size)}"
    rule = advice.rule.name
    if advice.swept and mix is not None:
        off = f": {two_digits(advice.error)} x off on held-out sweeps" if advice.error else ""
        times = value if math.isfinite(advice.factor.value) else f"{low} to {high}"
        said = f"{times} {at} ({mix.kind.title}, {rule}{off})"
    else:
        why = "the optimizer was not recorded"
        if mix is not None:
            other = mix.kind is OptimizerKind.OTHER
            why = f"no rule was tried with {'this optimizer' if other else mix.kind.title} there"
            larger = max(p.position.batch_size, found.batch_size)
            below = is_below(larger, p.critical_batch_size_by_noise_scale)
            if below is None and kind_in(p.history) is not None:
                why = "the run does not say if its noise scale is larger"
        said = f"{low} to {high} {at}, first {value} x ({rule}: {why})"
    yield Statement("Learning rate", said, advice.factor, "probably", "assumed")
