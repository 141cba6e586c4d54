# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, as a document: its first sentences, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from noisescale.bounded import Bounded
from noisescale.prediction.position import Position
from noisescale.prediction.second_run import informative_batch_size
from noisescale.prediction.statements import band_text, on_devices, statements_of
from noisescale.prediction.tables import summary_of, tables_of
from noisescale.report.document import Document, Figure
from noisescale.report.numbers import bounds, count, plural, two_digits, with_bounds

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

_HOW_TO_READ = (
    "Steps, hours and costs are those to reach the result of this run. The range under a value has"
    " two causes: the interval of the noise scale, and what is not known of the seconds a step"
    " takes. At the critical batch size the run takes twice its fewest steps and twice its fewest"
    " {unit}. Below the critical batch size more devices save time at almost no cost. Above it they"
    " save little. All of this holds for a well-tuned learning rate at each batch size. Check a"
    " large change by a short run."
)

LARGER = "a larger batch saves steps at little cost"
SETTLES = "A second run settles it."

TARGET = "train.py:make"
"""Stands for a user's own script and function."""


def document_of(p: Prediction) -> Document:
    """Return what a prediction says: answers, figures, tables, what is doubtful and assumed."""

    def figures() -> Sequence[Figure]:
        from noisescale.prediction.figures import figures_of

        return figures_of(p)

    so_far = f"After {count(p.run.steps.sum())} steps, so far: " if p.under_way else ""
    return Document(
        title=f"Batch size {count(p.run_batch_size)}: what other batch sizes would save",
        headline=so_far + headline_of(p),
        summary=summary_of(p),
        answers=[*statements_of(p)],
        tables=tables_of(p),
        figures=figures,
        doubts=p.warnings,
        assumptions=p.assumptions,
        how_to_read=_HOW_TO_READ.format(unit=p.unit),
        status="under way" if p.under_way else "done",
        next=next_steps_of(p),
    )


def headline_of(p: Prediction) -> str:
    """Return the answer in one to three sentences, each as sure as its bounds are."""
    said = _first_clause(p) + _standing(p.position)
    if (best := p.fastest_timed) is not None and best.batch_size != p.own_batch_size:
        ratio = p.time_ratio(best)
        if ratio.high < 1:
            which = f"On {on_devices(p)}, {count(best.batch_size)} is the fastest timed"
            said += f" {which}: {with_bounds(ratio, two_digits)} x the time."
    return said


def percent(band: Bounded) -> str:
    """Write a share with its bounds: '23 % (18 to 28 %)'."""
    value, low, high = (f"{100 * x:.0f}" for x in (band.value, band.low, band.high))
    return f"{value} %" if low == high else f"{value} % ({low} to {high} %)"


def _first_clause(p: Prediction) -> str:
    on = "" if p.own_devices == 1 else f" on {plural(p.own_devices, 'device')}"
    if p.own_batch_size is None:
        sizes = np.asarray(p.history["batch_size"], dtype=np.float64)
        least, most = (count(float(end(sizes))) for end in (np.nanmin, np.nanmax))
        mean = count(round(p.run_batch_size))
        return f"You trained at batch sizes from {least} to {most} ({mean} on average){on}"
    return f"You train at batch size {count(p.run_batch_size)}{on}"


def _standing(position: Position) -> str:
    """Return the rest of the first sentence, and the second one."""
    own, critical, place = position.batch_size, position.critical, position.place
    up_to = position.cheap_up_to
    when = "At the end of this run" if position.at_end else ""
    if position.rough:
        where = "somewhere" if not when else f"{when[0].lower()}{when[1:]}, somewhere"
        between = f"between {two_digits(critical.low)} and {two_digits(critical.high)}"
        return f". A rough range: {where} {between}, a larger batch stops paying. {SETTLES}"
    if not position.resolved:
        return _open_ended(position)
    what = f"the critical batch size, {band_text(critical)}"
    if place == "below":
        start = f"{when}, up to" if when else "Up to"
        return (
            f". {start} about {band_text(up_to)}, {LARGER}. Beyond about {band_text(critical)},"
            " each doubling saves less than a quarter of the steps."
        )
    at_end = " at the end of this run" if when else ""
    if place == "probably below":
        return (
            f", probably below {what}{at_end}. Up to about {band_text(up_to)}, a larger batch"
            " probably saves steps at little cost."
        )
    if place == "near":
        halved, doubled = position.examples(own / 2), position.steps(own * 2)
        return (
            f", near {what}{at_end}: halving it saves {percent(_savings(halved))} of the examples,"
            f" doubling it saves {percent(_savings(doubled))} of the steps."
        )
    if not critical.value:
        probably = "" if place == "above" else "probably "
        return f". A larger batch {probably}saves no steps: a smaller one needs fewer examples."
    smaller = _two_digits(min(2 * critical.value, own / 1.25))
    examples, steps = position.examples(smaller), position.steps(smaller)
    if place == "probably above":
        how = "probably above"
    else:
        how = f"about {two_digits(own / critical.value)} times"
    return (
        f", {how} {what}{at_end}. A batch of {count(smaller)} would reach the result with"
        f" {band_text(examples)} x the examples in {band_text(steps)} x the steps."
    )


def _open_ended(position: Position) -> str:
    """Return what is said if the critical batch size has bounds alone."""
    critical, up_to = position.critical, position.cheap_up_to
    if math.isfinite(critical.high):
        return f". The critical batch size is {bounds(critical, two_digits)}, not resolved further."
    least = f"the critical batch size is at least {two_digits(critical.low)}"
    if position.place == "below":
        return (
            f". Larger batches save steps at little cost at least up to {two_digits(up_to.low)}."
            f" How far beyond, this run cannot say: {least}."
        )
    if not critical.low:
        least = "its noise scale is not resolved"
    return f". This run cannot say whether a larger batch would save steps: {least}."


def _savings(ratio: Bounded) -> Bounded:
    return Bounded(1 - ratio.value, 1 - ratio.high, 1 - ratio.low)


def _two_digits(value: float) -> float:
    return max(1.0, float(f"{value:.1e}"))


def next_steps_of(p: Prediction) -> list[str]:
    """Return the next steps: what is most uncertain first."""
    source, position = p.history.source, p.position
    run = "RUN" if source is None else shlex.quote(str(source))
    found = []
    if (position.rough or not position.resolved) and p.second_run is None:
        own = p.run_batch_size
        middle = position.critical.value
        known = 0 < middle < math.inf
        other = informative_batch_size(own, middle) if known else 16 * own
        found.append(
            f"Next: train at batch size {count(other)} to the same result, and then run\n"
            f"  noisescale predict {run} --second-run RUN2"
        )
    if p.fastest_timed is None and position.place not in ("above", "unknown"):
        what = "Next" if not found else "And"
        found.append(f"{what}: {_how_to_time(p, run)}")
    return found


def _how_to_time(p: Prediction, run: str) -> str:
    """Return how other batch sizes are timed: `profile` times modules of Lightning alone."""
    if p.history.loop in ("", "lightning"):
        return (
            f"time other batch sizes. {TARGET} stands for your script and function:\n"
            f"  noisescale profile {TARGET} --run {run}"
        )
    return (
        f"time another batch size: train 100 steps at {count(2 * p.run_batch_size)} on"
        f" {on_devices(p)}, and then run\n  noisescale predict {run} --step-times RUN2"
    )
