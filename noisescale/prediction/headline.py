# SPDX-License-Identifier: Apache-2.0
"""The first sentences of a prediction: what the measurement says about the run's batch size."""

from __future__ import annotations

import math

import numpy as np

from noisescale.bounded import Bounded
from noisescale.prediction.position import Position
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.questions import fastest_timed, on_devices, time_ratio
from noisescale.report.numbers import bounds, count, plural, two_digits, with_bounds

LARGER = "a larger batch saves steps at little cost"
SETTLES = "A second run settles it."


def headline_of(p: PredictionRecord, position: Position) -> str:
    """Return the answer in one to three sentences, each as sure as its bounds are."""
    so_far = f"After {count(p.run.steps.sum())} steps, so far: " if p.under_way else ""
    said = f"{so_far}{_first_clause(p, position)}{_standing(position)}"
    if (best := fastest_timed(p)) is not None and best.batch_size != p.own_batch_size:
        ratio = time_ratio(p, best)
        if ratio.high < 1:
            which = f"On {on_devices(p)}, {count(best.batch_size)} is the fastest timed"
            said += f" {which}: {with_bounds(ratio, two_digits)} x the time."
    return said


def short_headline_of(position: Position) -> str:
    """Return the run's batch size and what larger ones would save, for a title."""
    return f"Batch size {count(position.batch_size)}: what other batch sizes would save"


def band_text(band: Bounded) -> str:
    """Write a batch size with its bounds: '230 (94 to 780)'."""
    return with_bounds(band, two_digits)


def percent(band: Bounded) -> str:
    """Write a share with its bounds: '23 % (18 to 28 %)'."""
    value, low, high = (f"{100 * x:.0f}" for x in (band.value, band.low, band.high))
    return f"{value} %" if low == high else f"{value} % ({low} to {high} %)"


def _first_clause(p: PredictionRecord, position: Position) -> str:
    on = "" if p.own_devices == 1 else f" on {plural(p.own_devices, 'device')}"
    if p.own_batch_size is None:
        sizes = np.asarray(p.history["batch_size"], dtype=np.float64)
        least, most = (count(float(end(sizes))) for end in (np.nanmin, np.nanmax))
        mean = count(round(position.batch_size))
        return f"You trained at batch sizes from {least} to {most} ({mean} on average){on}"
    return f"You train at batch size {count(position.batch_size)}{on}"


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
