# SPDX-License-Identifier: Apache-2.0
"""What a prediction advises, how sure that is, and what measuring cost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from noisescale.bounded import Bounded
from noisescale.history.optimizers import has_decayed
from noisescale.prediction.costing import PredictedRow, best_row_on, candidate_rows
from noisescale.prediction.prediction import PredictionRecord
from noisescale.prediction.questions import (
    device_counts,
    measuring,
    on_twice_the_devices,
    own_batch_size,
    same,
    share_text,
    time_ratio,
    timed,
)
from noisescale.prediction.second_run import advice_on
from noisescale.report.document import Basis, Statement
from noisescale.report.numbers import count, number, plural, two_digits, with_bounds

CRITICAL = "Critical batch size"


def advice_of(p: PredictionRecord) -> Iterator[Statement]:
    """Yield the advice for the run's devices, then for more devices."""
    best, more, twice = p.recommended, p.on_more_devices, on_twice_the_devices(p).row
    at_least = "" if p.resolved else " or more"
    here = _best_here(p)

    def size(row: PredictedRow) -> str:
        return f"a batch of {count(row.batch_size)}{at_least} {p.unit}{share_text(row)}"

    def statement(label: str, what: str, row: PredictedRow) -> Statement:
        return Statement(label, what, bounds=time_ratio(p, row), basis=_basis(p, row))

    if here is not None:
        what = f"{size(here)} is the {'fastest' if timed(p) else 'best'}: "
        what += "as in this run" if here.batch_size == p.own_batch_size else _against_run(p, here)
        if time_ratio(p, here).high > 1 and here.basis == "assumed":
            what += ". Step times are assumed: `noisescale profile` measures them"
        yield statement(f"On {_device_words(p)}", what, here)
    costed = best.cost_with_waiting.known
    shown = [here]
    if here is None or costed:
        shown.append(best)
        what = f"{plural(best.devices, 'device')}, {size(best)}: {_against_run(p, best)}"
        if best == here:
            what = f"the same, on {_device_words(p)}"
        yield statement("Cheapest with waiting" if costed else "Best of your choices", what, best)
    elif more is not None:
        shown.append(more)
        what = f"up to {count(more.devices)} pay off, with {size(more)}: {_against_run(p, more)}"
        yield statement("More devices", what, more)
    elif max(device_counts(p)) > p.own_devices:
        said = "do not pay off: the compute grows by more than the time shrinks"
        if not p.resolved:
            said = "may or may not pay off: the critical batch size is not resolved"
        yield Statement("More devices", said)
    if not any(row is not None and same(row, twice) for row in shown):
        on = plural(twice.devices, "device")
        what = f"{on}, {size(twice)}: {_against_run(p, twice)}"
        yield statement("Twice the devices", what, twice)


def certainty_of(p: PredictionRecord) -> Statement:
    """State the critical batch size with its bounds, and the parts of these bounds."""
    by_noise_scale = p.critical_batch_size_by_noise_scale
    interval = f"{100 * p.confidence:g} % interval"

    def statement(band: Bounded, what: str, *parts: Statement) -> Statement:
        return Statement(
            CRITICAL, _critical_text(p, band, what), band, basis="measured", parts=parts
        )

    in_run = Statement(
        "by the noise scale", _critical_text(p, by_noise_scale, interval), by_noise_scale
    )
    if p.second_run is not None:
        of = Statement("from", "two runs, each assumed to have its best learning rate")
        return statement(p.critical_batch_size, interval, of, in_run)
    if not p.calibration.is_theory:
        return statement(p.critical_batch_size, interval, in_run)
    band = p.calibration.kappa
    if band.low == band.high:
        unknown = "has an error that depends on the optimizer, which was not recorded"
        return statement(by_noise_scale, interval, Statement("theory", unknown))
    kind = getattr(p.history, "optimizer", None)
    of_kind = "this optimizer" if kind is None else kind.title
    of_kind += " at a falling learning rate" if has_decayed(p.history) else ""
    return statement(
        p.critical_batch_size,
        "with the theory's error",
        Statement("measured", in_run.sentence + _at_the_end(p), by_noise_scale),
        Statement(
            "theory",
            f"with {of_kind} B_crit was {band.low:g} to {band.high:g} x the noise scale",
            band,
        ),
        Statement("more certainty", advice_on(own_batch_size(p), p.critical_batch_size.value)),
    )


def cost_of_measuring(p: PredictionRecord) -> Iterator[Statement]:
    """Yield the share of the run's time that measuring took, if it was recorded."""
    if (found := measuring(p)) is not None:
        steps, share = found
        of = f"{count(steps)} of {count(p.run.steps.sum())} steps"
        yield Statement("Measuring took", f"about {100 * share:.1f} % of the run's time ({of})")


def _basis(p: PredictionRecord, row: PredictedRow) -> Basis:
    return row.basis or "measured"


def _best_here(p: PredictionRecord) -> PredictedRow | None:
    """Return the best row on the run's own devices, if there are rows for them."""
    return best_row_on(p.own_devices, candidate_rows(p.rows, p.law, p.own_batch_size), p.law)


def _against_run(p: PredictionRecord, row: PredictedRow) -> str:
    time, compute = ("time", "compute") if timed(p) else ("steps", p.unit)
    ratio = time_ratio(p, row)
    if timed(p) and row.devices == p.own_devices:
        return f"{_times(ratio)} the time and the compute of this run"
    by = row.devices / p.own_devices if timed(p) else row.batch_size / own_batch_size(p)
    return f"{_times(ratio)} the {time} and {_times(ratio * by)} the {compute} of this run"


def _times(ratio: Bounded) -> str:
    """Write a ratio with its bounds: '0.65 x (0.51 to 1.1 x)'."""
    return f"{with_bounds(ratio, two_digits)} x"


def _device_words(p: PredictionRecord) -> str:
    return "this device" if p.own_devices == 1 else f"these {p.own_devices} devices"


def _at_the_end(p: PredictionRecord) -> str:
    """Return a remark on the last value of the progress bar. It is not the run's noise scale."""
    logged = np.asarray(p.history.get("noise_scale", ()), dtype=np.float64)
    high = np.asarray(p.history.get("high", ()), dtype=np.float64)
    if not (len(logged) and np.isfinite(logged[-1]) and np.isfinite(high[-1])):
        return ""
    return f" over the run. The progress bar shows the noise scale at its end, {number(logged[-1])}"


def _critical_text(p: PredictionRecord, band: Bounded, what: str) -> str:
    """Write a critical batch size with its bounds."""
    if not math.isfinite(band.value):
        if math.isfinite(band.high):
            return f"{number(band.low)} to {number(band.high)} {p.unit}, not resolved further"
        if not band.low:
            return "not resolved, and without a lower bound"
        return f"at least {number(band.low)} {p.unit}, not resolved"
    if not band.value:
        return f"at most {number(band.high)} {p.unit}: a larger batch did not need fewer steps"
    around = f"at least {number(band.low)}"
    if math.isfinite(band.high):
        around = f"{number(band.low)} to {number(band.high)}"
    return f"{number(band.value)} {p.unit} ({what} {around})"
