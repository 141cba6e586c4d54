# SPDX-License-Identifier: Apache-2.0
"""What a prediction says, as a document: first sentences, next steps, doubts and assumptions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from noisescale.bounded import Bounded
from noisescale.prediction.costing import FAR
from noisescale.prediction.position import Position
from noisescale.prediction.run_hardware import devices_of
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

MANY_UNRESOLVED = 0.1
"""Share of a run's steps without a resolved or measured noise scale that is worth a warning."""

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


def warnings_about(p: Prediction) -> list[str]:
    """Return reasons not to trust a prediction, in whole sentences."""
    run = p.run
    found = list(p.calibration.doubts)
    if p.second_run is not None:
        found += p.second_run.doubts
    elif not p.resolved:
        found.append(_reason_without_value(p))
    else:
        unresolved = float(1 - (run.steps * run.resolved).sum() / run.steps.sum())
        if unresolved > MANY_UNRESOLVED:
            found.append(
                f"In {100 * unresolved:.0f} % of the steps the noise scale is not resolved by"
                " itself: the prediction uses the measured values with their errors."
            )
    unmeasured = float(1 - (run.steps * run.measured).sum() / run.steps.sum())
    before = float(run.steps[: int(np.argmax(run.measured > 0))].sum())
    if before > MANY_UNRESOLVED * run.steps.sum():
        found.append(
            f"The log begins at step {before:,.0f}: the noise scale of the steps before is taken to"
            " be that of the first ones after it. If the run was resumed, predict from a checkpoint"
            " or a file that has its first steps."
        )
    elif unmeasured > MANY_UNRESOLVED:
        found.append(
            f"In {100 * unmeasured:.0f} % of the steps nothing was measured: the nearest measured"
            " steps are used instead."
        )
    if far := sorted({row.batch_size for row in p.rows if "batch size" in row.extrapolated}):
        sizes, are = ("Batch sizes of", "are") if len(far) > 1 else ("A batch size of", "is")
        found.append(
            f"{sizes} {_list_sizes(far)} {p.unit} {are} more than {FAR:g} times off the"
            " run's own: so far off, a learning rate at which the law holds may not exist."
            " Measure a run at a nearer batch size."
        )
    middle = p.critical_or_least
    near = run.batch_size.min() / FAR <= middle <= run.batch_size.max() * FAR
    if not (far or near) and middle > 0 and p.second_run is None:
        found.append(
            f"The critical batch size, {middle:,.4g} {p.unit}, is more than {FAR:g} times off the"
            " run's own: batch sizes around it are not shown. So far off, a learning rate at which"
            " the law holds may not exist. Measure a run at a nearer batch size."
        )
    best = p.recommended
    if best.cost.known and best.basis != "timed":
        devices = "one device" if best.devices == 1 else f"{best.devices:,} devices"
        found.append(
            f"The hours of the recommended batch size on {devices} are"
            " assumed: no such configuration was timed. Time it with `noisescale profile`."
        )
    return found


def assumptions_of(p: Prediction) -> list[str]:
    """Return what a prediction assumes, in whole sentences."""
    calibration, hardware = p.calibration, p.hardware
    kappa = calibration.kappa
    found = [
        "Every batch size is trained at its own best learning rate, to the result that this run"
        " reached, and no further."
    ]
    if calibration.is_theory or p.second_run is not None:
        found.append(calibration.source)
        if calibration.is_theory and p.history.optimizer is None:
            found.append(
                "The run's optimizer was not recorded: the bounds include the error of the"
                " measurement, but not the error of the theory."
            )
    elif calibration.branched is not None:
        found.append(f"B_crit comes from branches: {calibration.source}.")
    else:
        band = "" if kappa.low == kappa.high else f" ({kappa.low:.3g} to {kappa.high:.3g})"
        found.append(
            f"B_crit = kappa·B_simple, kappa = {kappa.value:.3g}{band}: {calibration.source}."
        )
    if p.run.as_logged:
        found.append(
            "The noise scale is the one that was shown at each row, of the last measured steps."
            " While it rises, it may lag behind. The history does not hold what was measured"
            " between its rows."
        )
    if devices_of(p.history) is None:
        found.append("The run's number of devices was not recorded: one device is assumed.")
    if hardware.step_time is None:
        found.append("No seconds a step are known: hours and costs are left out.")
        return found
    found.append(
        f"A device takes at most {hardware.max_device_batch_size:,.4g} {p.unit} at once; larger"
        " batches are accumulated."
    )
    if math.isinf(hardware.devices_per_node):
        found.append("All devices are assumed to be in one node.")
    return [*found, *hardware.step_time.assumptions]


def _reason_without_value(p: Prediction) -> str:
    """Return why the critical batch size has a lower bound alone, and what helps."""
    least, batch = p.critical_batch_size.low, p.run.mean_batch_size
    steps = float(p.history["measured_steps"][-1])
    measured = f"{steps:,.0f} measured steps" if math.isfinite(steps) else "the measured steps"
    return (
        f"The critical batch size of the whole run is not resolved: it is at least {least:.3g}"
        f" {p.unit}. At batch size {batch:,.4g}, {measured} do not tell the mean gradient from its"
        " noise. A longer run may not help: the mean gradient shrinks while a model trains. Measure"
        " more of the steps (`every_n_steps=1`), or train at a larger batch size."
    )


def _list_sizes(sizes: Sequence[float]) -> str:
    shown = [f"{size:,.0f}" for size in sizes]
    if len(shown) > 4:
        shown = [*shown[:2], "...", *shown[-2:]]
    return ", ".join(shown)
