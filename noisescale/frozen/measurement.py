# SPDX-License-Identifier: Apache-2.0
"""What `measure` found: the noise scale at fixed weights, how to measure, and what that says."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noisescale.bounded import Bounded
from noisescale.estimation.independent_batches import IndependentBatches
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.frozen.comparison import TOLERANCE, Comparison, Order, Way
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.history.record import RECORD
from noisescale.prediction.position import LITTLE, Position
from noisescale.prediction.theory import theory_band
from noisescale.report.answer import Answer
from noisescale.report.document import Cell, Document, Line, Statement, Table, Verdict
from noisescale.report.numbers import count, number, plural, with_bounds
from noisescale.report.records import fields_of, finite

RISE = Bounded(3.4, 1.4, 27.0)
"""The noise scale in the last fifth of a run over that in its first fifth: median, least and most
of 23 kinds of runs at a constant learning rate (`benchmarks/accuracy/measure.py --rise`)."""

_COMPARED = {
    "half": "the halves of a batch",
    "micro_batch": "micro-batches",
    "rank": "the ranks",
}

_INSTEAD = "Use `Trainer(accumulate_grad_batches=2)`, or several devices."

_HOW_TO_READ = (
    "The gradients of whole batches were compared at weights that no step changed. Nothing but"
    " that batches are independent draws was taken for granted. A way of measuring in training is"
    f" right if it shows {1 / TOLERANCE:g} to {TOLERANCE:g} times this noise scale, with bounds."
    " It is wrong if its bounds are all outside, and not contradicted otherwise."
)


@dataclass(frozen=True)
class Measurement(Answer):
    """What `measure` found."""

    noise_scale: NoiseScale
    """The noise scale at these weights. `steps` is the number of batches."""
    groups: Mapping[str, NoiseScale]
    """The same of groups of parameters."""
    ways: Sequence[Way]
    """How this model can be measured in training."""
    order: Order
    batch_size: float
    """Examples in a batch, over all devices."""
    optimizer: OptimizerMix | None
    """What the module's optimizer is."""
    seconds: float
    """How long it took."""
    stopped: str
    """Why it ended, as a part of a sentence."""
    products: IndependentBatches = field(repr=False, compare=False)
    """What was kept of each batch."""
    drifts: bool
    """Whether the noise rises or falls along the batches: the weights are then not all there is."""
    added_to: str | None = None
    """The record of the run that got this as a look; None if none did."""
    step: int | None = None
    """The number of optimizer steps of the checkpoint; None without one."""
    checkpoint: str | None = None
    left_out: int = 0
    """Batches without a gradient, or with one that is not finite."""
    target: str = ""
    """What was measured, if it has a name."""
    mean: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The mean gradient by the name of the parameter, with `elementwise=True`."""
    variance: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The variance of each element of one example's gradient, with `elementwise=True`."""

    @property
    def critical_batch_size(self) -> Bounded:
        """The critical batch size of a training whose noise scale stayed as it is here.

        The bounds are those of the noise scale, widened by the errors that the theory had for this
        kind of optimizer.
        """
        found = self.noise_scale
        optimizer = self.optimizer or OptimizerMix(OptimizerKind.OTHER)
        band = theory_band(optimizer, decayed=False)
        return Bounded(found.value, found.low, found.high) * band.factor

    @property
    def position(self) -> Position:
        """Where the batch size stands against the critical one, and the verdict on it."""
        return Position(
            self.batch_size, self.critical_batch_size, confidence=self.noise_scale.confidence
        )

    def document(self) -> Document:
        """Return what a measurement says."""
        return Document(
            title="Noise scale at fixed weights - noisescale",
            headline=_headline(self),
            answers=list(_statements(self)),
            tables=[_groups(self)] if self.groups else [],
            doubts=list(_doubts(self)),
            assumptions=list(_assumptions(self)),
            how_to_read=_HOW_TO_READ,
            written=list(_added_lines(self)),
            next=[*_next_steps(self)],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement in builtin types.

        | key | meaning |
        |---|---|
        | `noise_scale` | the fields of `NoiseScale` |
        | `groups` | the same for each group |
        | `batch_size` | examples in a batch, over all devices |
        | `ways` | `name`, `judgement`, `reason`; `ratio`: tr(Σ) over the true one, with bounds \
          and batches, or None; `shown`: the noise scale over the true one, with its bounds |
        | `order` | `at_random`; `successive`, `shuffled`, `near`: ratios with bounds, or None |
        | `seconds`, `stopped`, `left_out` | seconds, why it ended, batches that did not count |
        | `checkpoint`, `step` | the weights, or None |
        | `added_to` | the record of the run that got this as a look, or None |
        """

        def ratio(one: Comparison | None) -> dict[str, float] | None:
            return None if one is None else {**vars(one.ratio), "batches": one.batches}

        order = fields_of(self.order, "at_random")
        for name in ("successive", "shuffled", "near"):
            order[name] = ratio(getattr(self.order, name))
        ways = [
            fields_of(way, "name", "judgement", "reason", "shown")
            | {"ratio": ratio(way.comparison)}
            for way in self.ways
        ]
        groups = {name: vars(scale) for name, scale in self.groups.items()}
        names = "batch_size", "seconds", "stopped", "left_out", "checkpoint", "step", "added_to"
        record: dict[str, Any] = finite(
            {"noise_scale": vars(self.noise_scale), "groups": groups, "ways": ways, "order": order}
            | fields_of(self, *names)
        )
        return record


def _headline(found: Measurement) -> str:
    scale = found.noise_scale
    if not scale.low and not scale.resolved:
        if not found.order.independent:
            return (
                "The noise scale is not known: successive batches of this data loader are no"
                " independent draws"
            )
        return (
            f"The noise scale at these weights is not known after {scale.steps:g} batches:"
            f" {found.stopped}"
        )
    text = f"The noise scale at these weights is {text_of_scale(scale)}"
    return f"{text}: {_verdict_in_words(found)}"


def _verdict_in_words(found: Measurement) -> str:
    verdict, b = found.position.verdict, count(found.batch_size)
    suggested = count(found.position.suggested_size)
    return {
        "larger": f"a larger batch than {b} saves steps, up to {suggested} at little cost",
        "smaller": f"a smaller batch is cheaper, {suggested} instead of {b}",
        "keep": f"keep a batch of {b}",
        "keep_or_larger": f"a batch of {b} is not too large",
        "keep_or_smaller": f"a batch of {b} is not too small",
        "unknown": f"whether another batch than {b} is better is not known",
    }[verdict]


def _statements(found: Measurement) -> Iterator[Statement]:
    scale = found.noise_scale
    at = "these weights" if found.step is None else f"step {count(found.step)}"
    yield Statement(
        "Noise scale",
        f"{text_of_scale(scale)} at {at}, from {scale.steps:g} batches of"
        f" {count(found.batch_size)} in {number(found.seconds)} s: {found.stopped}",
        _bounds(scale),
        basis="measured",
    )
    if scale.low > 0:
        critical = found.critical_batch_size
        what = f"the critical batch size at this noise scale is {with_bounds(critical)}"
        sure: Verdict = "unknown" if found.position.verdict == "unknown" else "probably"
        said = f"{_verdict_in_words(found)}: {what}"
        yield Statement("Batch size", said, critical, sure, "assumed")
    yield Statement(
        "Along a run",
        "the noise scale rises: in the trainings of Measured truths with a constant learning rate"
        f" the last fifth of a run had {RISE.low:g} to {RISE.high:g} times the noise scale of the"
        f" first fifth, {RISE.value:g} in the median",
        RISE,
        basis="assumed",
    )
    yield Statement("In training", _in_training(found), parts=list(map(_about_way, found.ways)))
    yield Statement("Batches", _about_order(found))


def _in_training(found: Measurement) -> str:
    best = _best_way(found)
    if best is None:
        return "none of the ways that were tried measures this model right, as far as is known"
    shown = "" if best.comparison is None else f": {_text_of_shown(best)}"
    sure = "can" if best.judgement == "right" else "can perhaps"
    return f"this model {sure} be measured in training by {_COMPARED[best.name]}{shown}"


def _best_way(found: Measurement) -> Way | None:
    """Return the way to recommend: those that need nothing set come first."""
    for judgement in ("right", "not contradicted"):
        for way in found.ways:
            if way.judgement == judgement:
                return way
    return None


def _about_way(way: Way) -> Statement:
    label = _COMPARED[way.name]
    if way.comparison is None:
        if way.by_construction:
            return Statement(label, f"right: {way.reason}", verdict="yes", basis="assumed")
        return Statement(label, f"not measured: {way.reason}", verdict="yes", basis="measured")
    sentence = f"{way.judgement}: {_text_of_shown(way)}"
    sure: Verdict = "yes"
    if way.judgement == "wrong":
        sentence += _reason_of(way)
    elif way.judgement == "not contradicted":
        sure, most = "unknown", number(way.factor)
        sentence += f". {'No factor' if math.isinf(way.factor) else f'A factor of {most}'} can"
        sentence += " be excluded" if math.isinf(way.factor) else "not be excluded"
    return Statement(label, sentence, way.shown, sure, "measured")


def _text_of_shown(way: Way) -> str:
    return f"shows {_ratio(way.shown)} the noise scale"


def _reason_of(way: Way) -> str:
    if way.name == "micro_batch":
        return ". Successive batches are alike: shuffle them"
    return (
        ". The rows of a batch act on each other, are drawn together, or the loss is no mean over"
        f" them. {_INSTEAD}"
    )


def _about_order(found: Measurement) -> str:
    order = found.order
    if order.at_random:
        return "are drawn at random by the data loader's sampler"
    assert order.successive is not None
    apart = _ratio(order.successive.ratio)
    if not order.independent:
        shown = f"two successive ones show {apart} the noise between all of them"
        if order.near is not None and order.near.judgement == "no":
            shown = f"the first ones show {_ratio(order.near.ratio)} the noise of those far on"
        said = (
            f"are no independent draws: {shown}. Training sees other noise than this number says."
            " Shuffle the examples (`shuffle=True`; a stream before it is stored, as a buffer mixes"
            " neighbours alone)"
        )
        return said if order.shuffled is None else f"{said}. The number is of shuffled batches"
    said = f"are independent of those before them, as far as can be told: {apart} the noise"
    if order.shuffled is None or order.shuffled.judgement in ("yes", "probably", "unknown"):
        return said
    return (
        f"{said}, but no random draws of examples: they have {_ratio(order.shuffled.ratio)} the"
        " noise of shuffled ones. The number is of the data loader's own"
    )


def _doubts(found: Measurement) -> Iterator[str]:
    if found.left_out:
        yield (
            f"{plural(found.left_out, 'batch', 'batches')} did not count: without a gradient, or"
            " with one that was not finite."
        )
    if not found.order.independent:
        yield "Successive batches of the data loader are alike."
    if found.drifts:
        yield (
            "The noise rises or falls along the batches: something in the module or the data"
            " changes from batch to batch, such as a schedule by epochs."
        )
    if found.products.hangs_on_one:
        yield (
            f"One batch makes {found.products.largest_share:.0%} of the scatter of the noise: rare"
            " examples may have large gradients. The interval may then be too low and too narrow."
            " Take more or larger batches."
        )


def _assumptions(found: Measurement) -> Iterator[str]:
    yield "Batches are independent draws. Examples that come again in a later epoch count anew."
    optimizer = found.optimizer or OptimizerMix(OptimizerKind.OTHER)
    band = theory_band(optimizer, decayed=False)
    yield (f"With {optimizer.title} the critical batch size is expected at {band.expectation}.")
    yield (
        "Late in a run whose learning rate fell, the noise scale is several times that of the whole"
        " run. The critical batch size that is said here is then too large."
    )
    yield (
        f"Little cost is at most {LITTLE:g} x the examples of the batch size that was measured, if"
        " the noise scale stayed as it is at these weights."
    )


def _next_steps(found: Measurement) -> Iterator[str]:
    if found.added_to is not None:
        run = shlex.quote(str(Path(found.added_to).parent))
        yield f"What it says of the run: noisescale predict {run}"
    yield _how_to_measure(found)


def _how_to_measure(found: Measurement) -> str:
    best = _best_way(found)
    if not found.order.independent:
        return "Shuffle the examples, and measure again."
    if best is None:
        return f"Measure in training by several devices or micro-batches. {_INSTEAD}"
    if best.name == "micro_batch":
        return (
            "Measure in training: Trainer(accumulate_grad_batches=2,"
            " callbacks=[NoiseScaleMonitor()])"
        )
    return "Measure in training: Trainer(callbacks=[NoiseScaleMonitor()])"


def _added_lines(found: Measurement) -> Iterator[str]:
    if found.added_to is not None:
        yield f"Added to {found.added_to} as the look at step {count(found.step or 0)}"
    elif found.checkpoint is not None and found.noise_scale.resolved:
        yield (
            f"Added to no run: no {RECORD} is beside {found.checkpoint}. To add it, give the"
            " folder of the run: --run FOLDER"
        )
    elif found.checkpoint is not None:
        yield "Added to no run: there is only a lower bound yet"


def _groups(found: Measurement) -> Table:
    lines = [
        Line([Cell(name), Cell(text_of_scale(scale)), Cell(number(scale.noise_trace))])
        for name, scale in found.groups.items()
    ]
    return Table("Groups of parameters", ("group", "noise scale", "tr(Σ)"), lines)


def _bounds(scale: NoiseScale) -> Bounded:
    return Bounded(scale.value, scale.low, scale.high)


def text_of_scale(scale: NoiseScale) -> str:
    """Return a noise scale with its bounds and its unit."""
    if scale.resolved:
        return f"{with_bounds(_bounds(scale))} {scale.unit}"
    return (
        f"at least {number(scale.low)} {scale.unit}, only a lower bound yet"
        if scale.low
        else "not known"
    )


def _ratio(x: Bounded) -> str:
    if math.isinf(x.high):
        return f"at least {x.low:.2f} x"
    return f"{x.value:.2f} x ({x.low:.2f} to {x.high:.2f})"
