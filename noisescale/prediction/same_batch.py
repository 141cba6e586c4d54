# SPDX-License-Identifier: Apache-2.0
"""The same global batch on another number of devices: how it is accumulated, and what differs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.plan import Plan
from noisescale.prediction.decision import TARGET
from noisescale.prediction.run_hardware import nodes_of
from noisescale.refusal import Refusal
from noisescale.report.document import Basis, Statement
from noisescale.report.numbers import bounds, count, duration_for, number, plural

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

_FLAGS = {
    "lightning": ("`accumulate_grad_batches={}`", " and {} in the loader"),
    "transformers": ("`gradient_accumulation_steps={}`", " and `per_device_train_batch_size={}`"),
}
"""What to set for the micro-batches, and for their size, by the loop of the run."""


@dataclass(frozen=True)
class SharedBatch:
    """The global batch of a run on a number of devices."""

    plan: Plan
    own: Plan
    """The plan of the run."""
    seconds_per_step: Bounded
    hours: Bounded
    """The hours of a run of as many steps."""
    basis: Basis | None
    """Whether the seconds were timed or are assumed; None if they are not known."""


def same_batch_of(
    p: Prediction, devices: Iterable[int], most: float | None
) -> tuple[SharedBatch, ...]:
    """Return the run's global batch on numbers of devices.

    Args:
        p: What was predicted from the run.
        devices: Devices that train together.
        most: The most examples of a micro-batch. Default: those of the run's micro-batches.

    Raises:
        ValueError: If the run had several batch sizes, or the devices cannot share the batch in
            equal micro-batches.
    """
    if p.hardware.own is None:
        raise Refusal(
            "same_batch",
            "be used with a run of one batch size",
            "a batch size or a number of devices that changed",
            "Give a run that kept both, or leave it out.",
        )
    own = p.hardware.own.plan
    return tuple(
        _share(p, plan_on(own, number, most, p.hardware.devices_per_node)) for number in devices
    )


def plan_on(own: Plan, devices: int, most: float | None = None, per_node: float = math.inf) -> Plan:
    """Return the plan of the same global batch on a number of devices.

    The micro-batches of the run are kept if they can be shared. Otherwise they are the largest
    equal ones that are no larger.

    Args:
        own: The plan of the run.
        devices: Devices that train together.
        most: The most examples of a micro-batch. Default: those of the run's.
        per_node: Devices in a node.

    Examples:
        >>> own = Plan(device_batch_size=8, accumulation=1, devices=8)
        >>> print(plan_on(own, 1))
        64 = 8 x 8 micro-batches x 1 device
        >>> print(plan_on(own, 16))
        64 = 4 x 1 micro-batch x 16 devices
    """
    most, nodes = most or own.device_batch_size, nodes_of(devices, per_node)
    micro_batches = own.accumulation * own.devices
    in_examples = own.batch_size % 1 == 0
    if not in_examples and most < own.device_batch_size:
        raise Refusal(
            "max_device_batch_size",
            f"be at least {number(own.device_batch_size)}, as batches of a mean size are not cut",
            f"{most:g}",
        )
    kept = most == own.device_batch_size or not in_examples
    if kept and micro_batches % devices == 0:
        return Plan(own.device_batch_size, micro_batches // devices, devices, nodes)
    shared = round(own.batch_size) if in_examples else micro_batches
    if shared % devices:
        below, above = (
            next((k for k in numbers if shared % k == 0), None)
            for numbers in (range(min(devices, shared), 0, -1), range(devices, shared + 1))
        )
        fitting = " or ".join(str(k) for k in (below, above) if k)
        of_what = f"a batch of {count(own.batch_size)} equally"
        raise Refusal("devices", f"share {of_what}", f"{devices}", f"Give {fitting}.")
    each = shared // devices
    least = min(max(math.ceil(each / most), 1), each)
    shares = next(k for k in range(least, each + 1) if each % k == 0)
    return Plan(float(each // shares), shares, devices, nodes)


def _share(p: Prediction, plan: Plan) -> SharedBatch:
    own, model = p.hardware.own, p.hardware.step_time
    assert own is not None
    seconds: Bounded = UNKNOWN
    basis: Basis | None = None
    if plan == own.plan and own.seconds:
        seconds, basis = Bounded(own.seconds, own.seconds, own.seconds), "timed"
    elif model is not None:
        seconds = model.seconds(*astuple(plan))
        basis = "timed" if model.is_timed(*astuple(plan)) else "assumed"
    hours = seconds * (float(p.run.steps.sum()) / 3600)
    return SharedBatch(plan, own.plan, seconds, hours, basis)


def same_batch(p: Prediction) -> Iterator[Statement]:
    """Yield what to set on each number of devices, what stays, what differs and the time."""
    for shared in p.same_batch:
        plan = shared.plan
        size, times = count(plan.device_batch_size), count(plan.accumulation)
        micro = "micro-batch" if plan.accumulation == 1 else "micro-batches"
        each = "" if plan.devices == 1 else " on each"
        said = f"{count(plan.batch_size)} {p.unit} are {times} {micro} of {size}{each}"
        if flags := _FLAGS.get(p.history.loop):
            said += f": set {flags[0].format(plan.accumulation)}"
            # The size of a loader is in whole rows.
            if p.unit != "tokens" and plan.device_batch_size % 1 == 0:
                said += flags[1].format(round(plan.device_batch_size))
        yield Statement(
            f"Same batch, {plural(plan.devices, 'device')}",
            said,
            parts=[
                Statement(
                    "Stays",
                    "the learning rate, its schedule in optimizer steps, and the number of steps",
                ),
                Statement("Differs", _what_differs(p, shared)),
                _time(p, shared),
            ],
        )


def _what_differs(p: Prediction, shared: SharedBatch) -> str:
    """Return what the mean over a batch does not say, for the micro-batches of a plan."""
    plan, own = shared.plan, shared.own
    before, after = own.device_batch_size, plan.device_batch_size
    if before == after and own.devices == plan.devices:
        return "nothing"
    found = []
    if before != after:
        found.append(
            f"BatchNorm's statistics, and a contrastive loss within a device, see {count(after)}"
            f" {p.unit} at a time, not {count(before)}"
        )
        found.append(
            "A loss that is a mean over the tokens of a micro-batch weighs tokens otherwise, where"
            " sequences differ in length"
        )
    rows, others = before * own.devices, after * plan.devices
    if rows != others:
        found.append(
            "SyncBatchNorm, and a contrastive loss over the rows of all devices, see"
            f" {count(others)} {p.unit} at a time, not {count(rows)}"
        )
    if before == after:
        found.append(
            "BatchNorm, a contrastive loss within a device and a mean over tokens still see"
            f" {count(after)} {p.unit} at a time"
        )
    return ". ".join(found)


def _time(p: Prediction, shared: SharedBatch) -> Statement:
    seconds, hours = shared.seconds_per_step, shared.hours
    if shared.basis == "timed":
        unit = duration_for([hours])
        step, run = _band(seconds), _band(unit.convert(hours))
        said = f"{step} s a step, {run} {unit.name} for the steps of this run, as timed"
        return Statement("Time", said, hours, "yes", "timed")
    devices = shared.plan.devices
    run = "RUN" if p.history.source is None else shlex.quote(str(p.history.source))
    size, own = shared.plan.device_batch_size, shared.own.device_batch_size
    sizes = "" if own / 2 <= size <= 8 * own else f" --device-batch-sizes {size:g}"
    profile = f"profile {TARGET} --run {run}"
    if p.history.loop in ("", "lightning"):
        how = f"noisescale {profile} --devices {devices}{sizes}"
    elif p.history.loop == "transformers":
        start = f"torchrun --nproc-per-node {devices} -m " if devices > 1 else ""
        how = f"{start}noisescale {profile}{sizes}"
    else:
        how = f"train 100 steps there, then noisescale predict {run} --step-times RUN2"
    said = f"not known: no such step was timed. To time it: {how}"
    return Statement("Time", said, hours if hours.known else None, "unknown", shared.basis)


def _band(band: Bounded) -> str:
    around = bounds(band)
    return f"{number(band.value)} ({around})" if around else number(band.value)


def as_records(shared: Sequence[SharedBatch]) -> list[dict[str, object]]:
    """Return the plans in builtins and bands."""
    return [
        {
            "batch_size": one.plan.batch_size,
            "devices": one.plan.devices,
            "device_batch_size": one.plan.device_batch_size,
            "accumulation": one.plan.accumulation,
            "seconds_per_step": one.seconds_per_step,
            "hours": one.hours,
            "basis": one.basis,
        }
        for one in shared
    ]
