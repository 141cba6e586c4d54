# SPDX-License-Identifier: Apache-2.0
"""The arguments of `predict`: checks, and defaults for what is not given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from noisescale.bounded import Bounded
from noisescale.checks import require_positive
from noisescale.history.history import History, as_history
from noisescale.history.metrics import Goal
from noisescale.history.reading import read_metric, read_run
from noisescale.history.run_law import RunLaw
from noisescale.history.segments import Array, Segments
from noisescale.prediction.costing import Hardware
from noisescale.prediction.run_hardware import (
    find_profile,
    largest_device_batch,
    largest_fitting,
    memory_in,
    own_steps_of,
    peaks_in,
    step_time_of,
    timed_plans,
)
from noisescale.refusal import Refusal, TypeRefusal, rename_arguments
from noisescale.step_time import DeviceTimes, FittedStepTime, fit_step_time

MOST = 1e12
"""The most examples in a batch, or money for an hour: far beyond any, and far from overflow."""

MOST_BATCH_SIZES = 256
"""The most batch sizes at once: each is a row of a table for each number of devices."""

MOST_DEVICES, MOST_NUMBERS_OF_DEVICES = 1_000_000, 64


class HasHistory(Protocol):
    """A monitor, or a meter that logs."""

    @property
    def history(self) -> History:
        """The noise scale along the run."""


Run = HasHistory | Mapping[str, Array] | str | PathLike[str]


def history_of(run: Run, which: Mapping[str, Any]) -> History:
    """Return the history of a run: of a monitor, or read from its folder.

    Args:
        run: The run.
        which: The arguments of `read_run` for a folder.
    """
    if isinstance(run, (str, PathLike)):
        found: Any = read_run(run, **which)
    elif len(meters := getattr(run, "meters", ())) > 1:
        found = meters[which["optimizer"]].history
        found.optimizers = tuple(range(len(meters)))
    else:
        found = run if isinstance(run, Mapping) else getattr(run, "history", None)
    if not isinstance(found, Mapping):
        raise TypeRefusal(
            "run",
            "be a monitor, its history, or the folder of a run",
            repr(run),
            "Give the folder that has the run's `noise_scale.jsonl`.",
        )
    history = as_history(found)
    if history.withheld:
        raise Refusal("run", "have a noise scale", "one that is withheld", history.withheld)
    if history.why_nothing:
        got = "none, as no step was measured"
        raise Refusal("run", "have a noise scale", got, history.why_nothing)
    return history


def check_units(history: History, other: History) -> None:
    """Raise a Refusal if a second run counts its batches in another unit."""
    if history.unit != other.unit:
        raise Refusal(
            "second_run",
            f"count its batches in {history.unit}, as the run does",
            other.unit,
            "Measure both runs in one unit. If they count the same thing, give its name as `unit`.",
        )


def run_to_goal(name: str, history: History, goal: Goal) -> History:
    """Return a run up to the step at which it reached a goal.

    Raises:
        ValueError: If the run did not reach the goal, or its folder has no such metric. The message
            names the argument `name`.
    """
    if history.source is None:
        raise Refusal(
            "goal",
            f"come with run folders in which {goal.metric!r} was logged",
            f"a history as `{name}`",
            "Give the folder, or leave the goal out.",
        )
    steps, values = read_metric(history.source, goal.metric)
    falls = values[-1] < values[0]
    sided = goal.with_side(values)
    if sided.is_past(values[0]) or (not goal.side and falls != (sided.side == "<")):
        raise Refusal(
            name,
            f"reach {goal} after its first value",
            f"{values[0]:.4g} at first, at step {steps[0]:,.0f}, and {values[-1]:.4g} at last",
            "Give a goal that both runs reach later. If a run begins beyond the goal,"
            " give the side with `<=` or `>=`.",
        )
    reached = sided.first_step(steps, values)
    if reached is None:
        best = values.min() if sided.side == "<" else values.max()
        raise Refusal(
            name,
            f"have reached {goal}",
            f"{best:.4g} at best in {steps[-1]:,.0f} steps",
            "Give a goal that both runs reached.",
        )
    # The monitor's last row may be before the last of another metric.
    return history.until(min(reached, float(history["step"][-1])))


def checked_run(history: History) -> Segments:
    """Cut a history into segments, or say what is wrong with it."""
    run = Segments.of(history)
    valid = (run.batch_size > 0) & np.isfinite(run.batch_size)
    if not valid.all():
        where = int(np.argmin(valid))
        step, size = float(history["step"][where]), float(run.batch_size[where])
        raise Refusal(
            "history",
            "have `examples` that rise with the steps",
            f"{size!r} examples a step up to step {step:g}",
            "Give `batch_size_fn` to the monitor if its count is wrong.",
        )
    if not np.isfinite(history["batch_size"]).any():
        raise Refusal(
            "history",
            "have a `batch_size`",
            "none in any row",
            "Copy the file again. In a history of your own, fill the column `batch_size`.",
        )
    return run


def batch_sizes_from(
    given: Iterable[float] | float | None,
    run: Segments,
    law: RunLaw,
    own: float | None,
    far: tuple[float, float],
    timed: Iterable[float] = (),
) -> list[float]:
    """Return batch sizes by rising size; by default powers of two around what matters.

    No default batch size lies outside `far`: beyond it the law may not hold. Whole ones that were
    timed are among them.
    """
    if given is not None:
        given = _values_of("batch_sizes", given, MOST_BATCH_SIZES)
        sizes = sorted({positive_or("batch_sizes", size, math.nan) for size in given})
        if not sizes:
            raise Refusal("batch_sizes", "not be empty", "[]", "Leave it out for a ladder.")
        return sizes
    critical = law.critical_batch_size
    middle = critical.value if 0 < critical.value < math.inf else critical.low
    around = [own or float(run.batch_size.mean())]
    if 0 < middle < math.inf:
        around.append(middle)
    around = [min(size, MOST) for size in around]
    least = math.floor(math.log2(max(min(around), 1.0))) - 2
    most = math.ceil(math.log2(max(*around, 1.0))) + 3
    ladder = {2.0**k for k in range(max(least, 0), most + 1)}
    ladder |= {size for size in timed if not size % 1}
    near = {size for size in ladder if far[0] <= size <= far[1]}
    return sorted((near or {around[0]}) | ({own} if own else set()))


def devices_from(given: Iterable[float] | float | None, own: int) -> list[int]:
    """Return numbers of devices; by default the run's own, doubled three times."""
    if given is None:
        return [own, 2 * own, 4 * own, 8 * own]
    counts = sorted(set(_values_of("devices", given, MOST_NUMBERS_OF_DEVICES)))
    if not counts or any(not 1 <= count <= MOST_DEVICES or count % 1 for count in counts):
        raise Refusal(
            "devices",
            f"be whole numbers from 1 to {MOST_DEVICES:,}",
            repr(counts),
            "Give for instance [1, 2, 4, 8].",
        )
    return [int(count) for count in counts]


def devices_per_node_from(given: float | None) -> float:
    """Return the number of devices in a node; by default all are in one."""
    if given is not None and (not 1 <= given <= MOST_DEVICES or given % 1):
        raise Refusal(
            "devices_per_node",
            f"be a whole number from 1 to {MOST_DEVICES:,}",
            repr(given),
            "Leave it out if all devices are in one node.",
        )
    return math.inf if given is None else float(given)


def positive_or(name: str, value: float | None, otherwise: float) -> float:
    """Return `value` if it is from 1/MOST to MOST, and `otherwise` if it is None."""
    if value is None:
        return otherwise
    positive = require_positive(name, value, "Leave it out if it is unknown.")
    if not 1 / MOST <= positive <= MOST:
        raise Refusal(
            name,
            f"be from {1 / MOST:g} to {MOST:g}",
            repr(value),
            "Leave it out if it is unknown, or give it in another unit.",
        )
    return positive


def _values_of(name: str, given: Iterable[float] | float, most: int) -> list[float]:
    """Return the values, if there are not too many: an endless iterable is not gone through."""
    values = list(islice(given, most + 1)) if isinstance(given, Iterable) else [given]
    if len(values) > most:
        raise Refusal(
            name,
            f"be at most {most} values",
            "more",
            "Give fewer at once: each adds to every table and figure.",
        )
    return values


def _check_price(price: float | None, *, timed: bool) -> None:
    """Refuse a price that is not positive, or that lacks the hours it goes with."""
    positive_or("price_per_device_hour", price, math.nan)
    if price is not None and not timed:
        raise Refusal(
            "price_per_device_hour",
            "come with seconds a step",
            f"{price!r} for a run that has none",
            "Give `step_times`, measured by `noisescale profile`.",
        )


def hardware_from(
    histories: Sequence[History],
    run: Segments,
    step_time: FittedStepTime | None,
    *,
    max_device_batch_size: float | None,
    devices_per_node: float | None,
    price_per_device_hour: float | None,
) -> Hardware:
    """Return what is known of the devices: from the arguments, else from the runs."""
    per_node = devices_per_node_from(devices_per_node)
    plans = tuple(plan for each in histories for plan in timed_plans(each, per_node))
    own = own_steps_of(histories[0], run, () if step_time else plans, per_node)
    most = largest_device_batch(histories[0], run)
    found: DeviceTimes | None = None
    doubts: tuple[str, ...] = ()
    if step_time is None:
        found, doubts = find_profile(histories[0], plans)
        step_time = step_time_of(plans, found.timings if found else ())
    _check_price(price_per_device_hour, timed=step_time is not None)
    if step_time is not None:
        most = step_time.max_device_batch_size
    return Hardware(
        step_time=step_time,
        max_device_batch_size=positive_or("max_device_batch_size", max_device_batch_size, most),
        devices_per_node=per_node,
        price_per_device_hour=price_per_device_hour,
        own=own,
        largest_fitting=_largest_fitting(histories[0], found),
        loader=found.loader if found else None,
        doubts=doubts,
    )


def _largest_fitting(history: History, found: DeviceTimes | None) -> Bounded | None:
    """Return the largest device batch that fits, by the peaks of a profile, or of the run."""
    memory, peaks, too_large = memory_in(history), peaks_in(history), None
    if found is not None:
        memory, too_large = memory or found.memory, found.too_large
        peaks = found.peaks if len(found.peaks) > 1 else peaks
    return None if memory is None else largest_fitting(peaks, memory, too_large)


def step_times_from(
    given: FittedStepTime | str | PathLike[str] | None,
    history: History,
    which: Mapping[str, Any],
) -> tuple[FittedStepTime | None, History | None]:
    """Return a model of step times, or a run whose times count beside those of the history.

    Args:
        given: A model, a file of `noisescale profile`, or the folder of a run.
        history: The run that is predicted from.
        which: See `history_of`.
    """
    if not isinstance(given, (str, PathLike)):
        return given, None
    if Path(given).is_dir():
        with rename_arguments({"run": "step_times", "second_run": "step_times"}):
            timed = history_of(given, which)
            check_units(history, timed)
        return None, timed
    with rename_arguments({"step_time": "step_times"}):
        return fit_step_time(DeviceTimes.read(given).timings), None
