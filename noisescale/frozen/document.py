# SPDX-License-Identifier: Apache-2.0
"""What a measurement at fixed weights says: a document, and the same in builtin types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from noisescale.bounded import Bounded
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.frozen.comparison import TOLERANCE, Comparison
from noisescale.frozen.measurement import MeasurementRecord, Way
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.theory import theory_band
from noisescale.report.document import Cell, Document, Line, Statement, Table, Verdict
from noisescale.report.numbers import count, number, plural, with_bounds
from noisescale.report.records import finite

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
    f" right if it finds the same noise, tr(Σ): a ratio of {1 / TOLERANCE:g} to {TOLERANCE:g} does"
    " no harm."
)


def document_of(found: MeasurementRecord) -> Document:
    """Return what a measurement says."""
    return Document(
        title="Noise scale at fixed weights - noisescale",
        headline=_headline(found),
        answers=list(_statements(found)),
        tables=[_groups(found)] if found.groups else [],
        doubts=list(_doubts(found)),
        assumptions=list(_assumptions(found)),
        how_to_read=_HOW_TO_READ,
        next=[_next_step(found)],
    )


def _headline(found: MeasurementRecord) -> str:
    scale, b = found.noise_scale, count(found.batch_size)
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
    critical = found.critical_batch_size
    if critical.low > found.batch_size:
        return f"{text}: a batch larger than {b} saves steps at little cost"
    if critical.high < found.batch_size:
        return f"{text}: a batch smaller than {b} saves {scale.unit}"
    return f"{text}. A larger batch than {b} may or may not pay"


def _statements(found: MeasurementRecord) -> Iterator[Statement]:
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
        yield from _batch_that_pays(found)
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


def _batch_that_pays(found: MeasurementRecord) -> Iterator[Statement]:
    b, unit = count(found.batch_size), found.noise_scale.unit
    critical, cheap = found.critical_batch_size, _cheap(found)
    verdict: Verdict = "yes"
    if critical.low <= found.batch_size <= critical.high:
        verdict = "unknown"
        sentence = (
            "may or may not pay: the critical batch size at this noise scale is"
            f" {with_bounds(critical)}, and {b} may be below it or above"
        )
    elif critical.high < found.batch_size:
        sentence = (
            f"does not pay: the critical batch size at this noise scale is {with_bounds(critical)}."
            f" A smaller batch than {b} reaches the same with fewer {unit}"
        )
    else:
        sentence = (
            f"from {b} {_upper_range(cheap)} it saves steps at little cost, at most 1.2 x the"
            f" {unit}; beyond {with_bounds(critical)} each doubling saves less than a quarter of"
            " the steps"
        )
    yield Statement("Larger batch", sentence, cheap, verdict, "assumed")


def _upper_range(size: Bounded) -> str:
    if math.isinf(size.high):
        return f"at least up to {number(size.low)}"
    return f"up to about {with_bounds(size)}"


def _cheap(found: MeasurementRecord) -> Bounded:
    critical = found.critical_batch_size
    return Bounded(*map(found.cheap_up_to, (critical.value, critical.low, critical.high)))


def _in_training(found: MeasurementRecord) -> str:
    best = _best_way(found)
    if best is None:
        return "none of the ways that were tried measures this model right, as far as is known"
    sure = "can" if best.judgement == "yes" else "can probably"
    ratio = "" if best.comparison is None else f": {_ratio(best.comparison)} the noise"
    return f"this model {sure} be measured in training by {_COMPARED[best.name]}{ratio}"


def _best_way(found: MeasurementRecord) -> Way | None:
    """Return the way to recommend: those that need nothing set come first."""
    for judgement in ("yes", "probably"):
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
    ratio = _ratio(way.comparison)
    sentence, verdict = {
        "yes": (f"right: {ratio} the noise", "yes"),
        "probably": (f"probably right: {ratio} the noise", "probably"),
        "unknown": (f"not known: {ratio} the noise", "unknown"),
        "probably not": (f"probably not right: {ratio} the noise", "probably"),
        "no": (f"not right: {ratio} the noise{_reason_of(way)}", "yes"),
    }[way.judgement]
    return Statement(label, sentence, way.comparison.ratio, verdict, "measured")  # type: ignore[arg-type]  # one of the verdicts


def _reason_of(way: Way) -> str:
    if way.name == "micro_batch":
        return ". Successive batches are alike: shuffle them"
    return (
        ". The rows of a batch act on each other, are drawn together, or the loss is no mean over"
        f" them. {_INSTEAD}"
    )


def _about_order(found: MeasurementRecord) -> str:
    order = found.order
    if order.at_random:
        return "are drawn at random by the data loader's sampler"
    assert order.successive is not None
    apart = _ratio(order.successive)
    if not order.independent:
        shown = f"two successive ones show {apart} the noise between all of them"
        if order.near is not None and order.near.judgement == "no":
            shown = f"the first ones show {_ratio(order.near)} the noise of those far on"
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
        f"{said}, but no random draws of examples: they have {_ratio(order.shuffled)} the"
        " noise of shuffled ones. The number is of the data loader's own"
    )


def _doubts(found: MeasurementRecord) -> Iterator[str]:
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


def _assumptions(found: MeasurementRecord) -> Iterator[str]:
    yield "Batches are independent draws. Examples that come again in a later epoch count anew."
    optimizer = found.optimizer or OptimizerMix(OptimizerKind.OTHER)
    band = theory_band(optimizer, decayed=False)
    yield (f"With {optimizer.title} the critical batch size is expected at {band.expectation}.")
    yield (
        "Late in a run whose learning rate fell, the noise scale is several times that of the whole"
        " run. The critical batch size that is said here is then too large."
    )
    yield (
        "Cheap is what reaches the same with at most 1.2 x the examples of the batch size that was"
        " measured, if the noise scale stayed as it is at these weights."
    )


def _next_step(found: MeasurementRecord) -> str:
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


def _groups(found: MeasurementRecord) -> Table:
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
    return f"at least {number(scale.low)} {scale.unit}, not resolved" if scale.low else "not known"


def _ratio(one: Comparison) -> str:
    x = one.ratio
    if math.isinf(x.high):
        return f"at least {x.low:.2f} x"
    return f"{x.value:.2f} x ({x.low:.2f} to {x.high:.2f})"


def as_dict(found: MeasurementRecord) -> dict[str, Any]:
    """Return the measurement in builtin types.

    | key | meaning |
    |---|---|
    | `noise_scale` | the fields of `NoiseScale` |
    | `groups` | the same for each group |
    | `batch_size` | examples in a batch, over all devices |
    | `ways` | `name`, `judgement`, `ratio` with its bounds or None, `reason` |
    | `order` | `at_random`; `successive`, `shuffled` and `near` as ratios with bounds, or None |
    | `seconds`, `stopped`, `left_out` | seconds taken, why it ended, batches that did not count |
    | `checkpoint`, `step` | the weights, or None |
    """

    def ratio(one: Comparison | None) -> dict[str, float] | None:
        return None if one is None else {**vars(one.ratio), "batches": one.batches}

    record: dict[str, Any] = {
        "noise_scale": vars(found.noise_scale),
        "groups": {name: vars(scale) for name, scale in found.groups.items()},
        "batch_size": found.batch_size,
        "ways": [
            {
                "name": way.name,
                "judgement": way.judgement,
                "ratio": ratio(way.comparison),
                "reason": way.reason,
            }
            for way in found.ways
        ],
        "order": {
            "at_random": found.order.at_random,
            "successive": ratio(found.order.successive),
            "shuffled": ratio(found.order.shuffled),
            "near": ratio(found.order.near),
        },
        "seconds": found.seconds,
        "stopped": found.stopped,
        "left_out": found.left_out,
        "checkpoint": found.checkpoint,
        "step": found.step,
    }
    result: dict[str, Any] = finite(record)
    return result
