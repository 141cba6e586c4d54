# SPDX-License-Identifier: Apache-2.0
"""The state of a run that still trains, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from rich.console import Group
from rich.text import Text

from noisescale.bounded import Bounded
from noisescale.history.following import FollowedRun
from noisescale.history.history import History
from noisescale.history.reading import usual_gap
from noisescale.prediction.prediction import Prediction
from noisescale.prediction.statements import NOW, critical_batch_size
from noisescale.printable import printable
from noisescale.report.document import Statement
from noisescale.report.numbers import bounds, count, number, plural
from noisescale.report.sparkline import UNKNOWN, sparkline
from noisescale.report.text import statements_of

WIDTH = 32
"""The width of the noise scale's course, in characters."""


def state_of(
    run: FollowedRun, found: Prediction | ValueError | None, now: float, note: str = ""
) -> Group:
    """Return the state of a run and the present advice.

    Args:
        run: The run, as it was read last.
        found: The prediction from its history, or the reason why there is none; None before the
            first row.
        now: The time in seconds since the epoch.
        note: A last sentence, for example how to end.
    """
    history = run.history
    if history is None:
        return Group(_title(run), Text(_waiting(run)).append(note and f" {note}", style="dim"))
    last = {name: float(values[-1]) for name, values in history.items()}
    if isinstance(found, Prediction):  # the last step may be of an epoch's short batch
        last["batch_size"] = round(found.position.batch_size)
        if found.hardware.own is not None:
            last["accumulation"] = found.hardware.own.plan.accumulation
    said = [*_state(history, last)]
    if isinstance(found, Prediction):
        decision = found.decision
        verdict = Statement("Verdict", f"{decision.headline} {decision.reason}")
        said += [Statement("", ""), verdict, critical_batch_size(found)]
    elif found is not None:
        said += [Statement("", ""), Statement("Prediction", f"not possible yet: {found}")]
    age = _age(run, history, now)
    return Group(_title(run), statements_of(said), age.append(note and f" {note}", style="dim"))


def _title(run: FollowedRun) -> Text:
    title = Text(printable(run.run or run.path), style="bold")
    if run.of_runs > 1:
        of = f"{plural(run.of_runs, 'run')} in {printable(run.path)}"
        title.append(f"\nThe newest of {of}", style="not bold dim")
    if len(run.optimizers) > 1:
        of = f"{', '.join(map(str, run.optimizers))}: choose one with --optimizer"
        title.append(f"\nOptimizer {run.optimizer} of {of}", style="not bold dim")
    return title


def _waiting(run: FollowedRun) -> str:
    if run.run is None:
        return "Waiting for a run with NoiseScaleMonitor. There is none in this folder yet."
    if run.why_nothing:
        return f"Nothing is measured. {printable(run.why_nothing)}"
    return "Waiting for the first row of NoiseScaleMonitor."


def _state(history: History, last: dict[str, float]) -> Iterator[Statement]:
    """Yield the values of the last row, with the batch size of the run's usual steps."""
    unit = history.unit
    yield Statement("Step", f"{count(last['step'])} ({count(last['examples'])} {unit})")
    size = f"{count(last['batch_size'])} {unit}"
    if math.isfinite(last["devices"]):
        size += f" on {plural(last['devices'], 'device')}"
    if last["accumulation"] > 1:
        size += f", {plural(last['accumulation'], 'micro-batch', 'micro-batches')} each"
    yield Statement("Batch size", size)
    course = _course(history)
    parts = [] if course is None else [Statement("so far", course)]
    yield Statement(NOW, _noise_scale(last, unit, history.confidence), parts=parts)
    if math.isfinite(seconds := last["seconds_per_step"]):
        said = f"{number(seconds)} s" if seconds >= 1 else f"{number(1e3 * seconds)} ms"
        yield Statement("Step time", said)
    if math.isfinite(cost := last["measuring_cost"]):
        share = 100 * cost / (last["step"] + cost)
        of = f"{count(last['measured_steps'])} of {count(last['step'])} steps"
        yield Statement("Measuring took", f"about {share:.1f} % of the time ({of})")


def _noise_scale(last: dict[str, float], unit: str, confidence: float) -> str:
    band = Bounded(last["noise_scale"], last["low"], last["high"])
    if math.isfinite(band.high) and math.isfinite(band.value):
        return f"{number(band.value)} {unit} ({100 * confidence:g} % interval {bounds(band)})"
    if math.isfinite(band.low):
        return f"above {number(band.low)} {unit}, only a lower bound yet"
    return "not measured yet"


def _course(history: History) -> str | None:
    """Return the logged noise scale along the run as a line of blocks; None if there is none."""
    steps, values = history["step"], history["noise_scale"]
    values = np.where(np.isfinite(history["high"]) & (values > 0), values, math.nan)
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 2:
        return None
    drawn = sparkline(steps, values, WIDTH)
    lowest, highest = number(float(np.nanmin(values))), number(float(np.nanmax(values)))
    note = f" ({UNKNOWN} only a lower bound)" if UNKNOWN in drawn else ""
    return f"{drawn}  {lowest} to {highest}{note}"


def _age(run: FollowedRun, history: History, now: float) -> Text:
    if run.last_row_at is None:
        return Text()
    age = max(now - run.last_row_at, 0.0)
    if age <= usual_gap(history):
        return Text(f"The last row came {_duration(age)} ago.", style="dim")
    return Text(f"No new row for {_duration(age)}.", style="yellow")


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
