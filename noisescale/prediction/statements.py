# SPDX-License-Identifier: Apache-2.0
"""What a prediction says below its headline: time, more devices, how sure it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from noisescale.bounded import Bounded
from noisescale.history.optimizers import has_decayed
from noisescale.prediction.costing import PredictedRow
from noisescale.prediction.learning_rate import state_learning_rate
from noisescale.prediction.same_batch import same_batch
from noisescale.prediction.second_run import advice_on
from noisescale.prediction.two_levels import two_levels
from noisescale.report.document import Statement, Verdict
from noisescale.report.numbers import count, number, plural, rough, two_digits, with_bounds

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

CRITICAL = "Critical batch size"
NOW = "Noise scale now"


def statements_of(p: Prediction) -> Iterator[Statement]:
    """Yield the answers in reading order."""
    yield from _other_optimizers(p)
    yield from _data_loader(p)
    yield from state_learning_rate(p)
    yield time_here(p)
    if p.same_batch:
        yield from same_batch(p)
    elif max(p.device_counts) > p.own_devices:
        yield more_devices(p)
    yield from noise_scales_of(p)
    yield from _best_for_budget(p)
    yield from two_levels(p)
    yield _how_sure(p)
    result = "the result that this run has reached so far" if p.under_way else "this run's result"
    yield Statement("Valid for", f"{result}, at the best learning rate of each batch size")


def _other_optimizers(p: Prediction) -> Iterator[Statement]:
    """Yield the verdict on each other optimizer, or why there is none."""
    for n, found in p.by_optimizer.items():
        if n != p.number:
            said = f"not known: {found}" if isinstance(found, str) else found.headline
            yield Statement(f"Optimizer {n}", said)


def _data_loader(p: Prediction) -> Iterator[Statement]:
    """Yield a statement if the data loader, not the device, decides how long a step takes."""
    loader = p.hardware.loader
    if loader is not None and loader.bounds_training:
        took = f"{number(1e3 * loader.seconds)} ms a batch, {number(1e3 * loader.step_seconds)} ms"
        yield Statement(
            "Data loader",
            f"bounds this training: {took} a step without waiting. A larger batch saves no time"
            f" until the loader is faster (`num_workers`, now {loader.workers})",
            verdict="yes",
            basis="timed",
        )


def time_here(p: Prediction) -> Statement:
    """State which batch size is the fastest on the run's devices, if several were timed."""
    here = p.these_devices
    sizes = [count(row.batch_size) for row in p.timed_rows]
    own = count(p.run_batch_size)
    if (best := p.fastest_timed) is None:
        any_timed = sizes or p.own_row.basis == "timed"
        known = f"only {own} was timed" if any_timed else "no step was timed"
        fits = f"A larger batch may not fit on {here}, or may not be faster"
        if (most := p.hardware.largest_fitting) is not None:
            fits = (
                f"By the memory that was used, a device takes about {band_text(most)} {p.unit};"
                " a larger batch may not be faster"
            )
        what = f"unknown at other batch sizes: {known}. {fits}"
        return Statement("Time", what, verdict="unknown")
    timed = f"of {', '.join(sizes)}, as timed"
    ratio = p.time_ratio(best)
    if best.batch_size == p.own_batch_size:
        others = [p.time_ratio(row) for row in p.timed_rows if row is not best]
        sure = all(other.low > 1 for other in others)
        how = "is" if sure else "is probably"
        what = f"on {here} the run's own batch size, {own}, {how} the fastest {timed}"
        return Statement("Time", what, ratio, "yes" if sure else "probably", "timed")
    verdict = verdict_on(ratio)
    how = "is" if verdict == "yes" else "is probably"
    what = f"on {here} {count(best.batch_size)} {how} the fastest {timed}: {_times(ratio)} the time"
    if verdict == "unknown":
        what = f"on {here} no batch size is surely faster than this run, {timed}"
    return Statement("Time", what, ratio, verdict, "timed")


def more_devices(p: Prediction) -> Statement:
    """State what several times the devices, each with the same batch, save."""
    row = _on_many_devices(p)
    each = count(row.batch_size / row.devices)
    label = "More devices"
    plan = f"{plural(row.devices, 'device')} with {each} each, a batch of {count(row.batch_size)}"
    by = row.devices / p.own_devices
    if row.basis == "timed":
        ratio = p.time_ratio(row)
        verdict = verdict_on(ratio)
        pays = {"yes": "", "probably": "probably ", "unknown": "perhaps "}[verdict]
        if ratio.low > 1:
            verdict, pays = "yes", "slower, "
        cost = f"{_times(ratio * by)} the device-time, as timed"
        return Statement(
            label, f"{plan}: {pays}{_times(ratio)} the time for {cost}", ratio, verdict, "timed"
        )
    ratio = p.position.steps(row.batch_size)
    return Statement(
        label,
        f"{plan}: {_times(ratio)} the steps and {_times(ratio * by)} the {p.unit}. The time is"
        " unknown: no step on so many devices was timed",
        ratio,
        "unknown",
        "assumed",
    )


def _on_many_devices(p: Prediction) -> PredictedRow:
    """Return the row of the most devices whose batch size is at most the critical one.

    Each device has the same plan as in the run. If the batch size is above the critical one on all
    numbers of devices beyond the run's, return the row of the smallest of these numbers.
    """
    more = [p.row_on(devices) for devices in p.device_counts if devices > p.own_devices]
    useful = [row for row in more if row.batch_size <= p.critical_or_least]
    return useful[-1] if useful else more[0]


def noise_scales_of(p: Prediction) -> Iterator[Statement]:
    """Yield the noise scale now and the critical batch size of the run, each with its bounds."""
    now = p.noise_scale_now
    interval = f"{100 * p.confidence:g} % interval"
    if now.known:
        what = _with_unit(p, now, interval)
        if of_steps := p.steps_of_noise_scale:
            what += f", of {of_steps}"
        if (found := p.measuring) is not None:
            steps, share = found
            of = f"{count(round(steps))} of {count(round(p.run.steps.sum()))} steps"
            what += f"; {of} were measured (about {100 * share:.1f} % of the time)"
        yield Statement(NOW, what, now, basis="measured")
    if (look := p.look) is not None:
        said = f"Noise scale measured at step {count(look.step)}"
        at = f"{100 * look.confidence:g} % interval"
        what = f"{_with_unit(p, look.bounds, at)}, from {count(look.batches)} batches"
        yield Statement(said, what, look.bounds, basis="measured")
    yield critical_batch_size(p)


def critical_batch_size(p: Prediction) -> Statement:
    """State the critical batch size of the run with its bounds."""
    band = p.critical_batch_size
    known = p.second_run is not None or not p.calibration.is_theory
    exact = p.calibration.kappa.low == p.calibration.kappa.high
    what = f"{100 * p.confidence:g} % interval" if known or exact else "with the theory's error"
    said = f"{_with_unit(p, band, what)}, of the whole run"
    if p.position.at_end:
        said += f"; at its end, which decides, {_with_unit(p, p.position.critical, what)}"
    return Statement(CRITICAL, said, band, basis="measured")


def _best_for_budget(p: Prediction) -> Iterator[Statement]:
    """Yield the batch size that the run's number of examples allows, if it is known."""
    if (best := p.best_batch_size).known:
        of_run = f"{rough(p.budget.examples)} {p.unit}"
        what = (
            f"about {band_text(best)} {p.unit}: the largest batch that keeps the loss of a run of"
            f" {of_run}, by its training loss and noise scale. The critical batch size is about the"
            f" time to a result; this one is about a fixed number of {p.unit}"
        )
        yield Statement("Best for this budget", what, best, basis="measured")


def verdict_on(ratio: Bounded) -> Verdict:
    """Return how sure it is that something takes less time, from the bounds of the ratio."""
    if ratio.high < 1:
        return "yes"
    return "probably" if ratio.value < 1 else "unknown"


def _how_sure(p: Prediction) -> Statement:
    """State what the bounds rest on, and what would narrow them."""
    band = p.calibration.kappa
    if p.second_run is not None:
        what = "by two runs, each assumed to have its best learning rate"
        return Statement("How sure", what, p.critical_batch_size, basis="measured")
    if not p.calibration.is_theory:
        return Statement("How sure", p.calibration.source, p.critical_batch_size, basis="measured")
    if band.low == band.high:
        what = "the theory's error depends on the optimizer, which was not recorded"
        return Statement("How sure", what, basis="assumed")
    kind = p.history.optimizer
    of_kind = "this optimizer" if kind is None else kind.title
    of_kind += " at a falling learning rate" if has_decayed(p.history) else ""
    what = f"with {of_kind} the critical batch size is expected at {p.calibration.expected}"
    what += '. "Likely" held in four of five of our runs'
    if p.position.resolved:
        what += f". {advice_on(p.run_batch_size, p.position.critical.value)}"
    return Statement("How sure", what, band, basis="assumed")


def band_text(band: Bounded) -> str:
    """Write a batch size or a ratio with its bounds: '230 (94 to 780)'."""
    return with_bounds(band, two_digits)


def _times(ratio: Bounded) -> str:
    return f"{band_text(ratio)} x"


def _with_unit(p: Prediction, band: Bounded, what: str) -> str:
    """Write a batch size with its bounds."""
    if not math.isfinite(band.value):
        if math.isfinite(band.high):
            return f"{number(band.low)} to {number(band.high)} {p.unit}, only bounds yet"
        if not band.low:
            return "not known, not even a lower bound"
        return f"at least {number(band.low)} {p.unit}, only a lower bound yet"
    if not band.value:
        return f"at most {number(band.high)} {p.unit}: a larger batch did not need fewer steps"
    around = f"at least {number(band.low)}"
    if math.isfinite(band.high):
        around = f"{number(band.low)} to {number(band.high)}"
    return f"{number(band.value)} {p.unit} ({what} {around})"
