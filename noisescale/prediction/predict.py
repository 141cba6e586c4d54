# SPDX-License-Identifier: Apache-2.0
"""Predict steps, examples, hours and cost at other batch sizes from one run's history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from os import PathLike
from typing import Any

from noisescale.checks import require_positive
from noisescale.history.history import History
from noisescale.history.metrics import Goal
from noisescale.prediction import arguments
from noisescale.prediction.calibrating import Branches, Sweep, calibration_from, law_of
from noisescale.prediction.calibration import Calibration
from noisescale.prediction.costing import FAR
from noisescale.prediction.prediction import Prediction
from noisescale.prediction.ramp import ramp_of
from noisescale.prediction.run_hardware import devices_of, own_batch_size
from noisescale.prediction.same_batch import same_batch_of
from noisescale.prediction.second_run import SecondRun
from noisescale.refusal import Refusal, rename_arguments
from noisescale.step_time import FittedStepTime
from noisescale.tradeoff.profile import STEPS_SCATTER


@rename_arguments({"history": "run", "kappa": "calibration"})
def predict(
    run: arguments.Run,
    batch_sizes: Iterable[float] | float | None = None,
    devices: Iterable[float] | float | None = None,
    price_per_device_hour: float | None = None,
    *,
    calibration: Calibration | float | None = None,
    sweep: Sweep | None = None,
    branches: Branches | None = None,
    branch_step: float | None = None,
    branch_examples: float | None = None,
    loss_scatter: float | None = None,
    step_times: FittedStepTime | str | PathLike[str] | None = None,
    max_device_batch_size: float | None = None,
    devices_per_node: int | None = None,
    unit: str | None = None,
    second_run: arguments.Run | None = None,
    goal: str | None = None,
    steps_scatter: float | None = None,
    cost_per_prompt: float | None = None,
    cost_per_generation: float | None = None,
    same_batch: bool = False,
    ramp: str | None = None,
    sequence_length: int | None = None,
    optimizer: int | None = None,
    monitor: str | None = None,
) -> Prediction:
    """Predict what the result of one run costs at other batch sizes, on other devices.

    At noise scale b a step of batch size B makes 1/(1 + b/B) of the progress of a noise-free
    one. Summed along the run, with its own changes of the batch size,

        S(B') = Σ steps·(1 + b/B')/(1 + b/B)

    are the steps to the same result at batch size B'. The bounds of a prediction come from both
    ends of the interval of b. Hours come from the seconds of a step, measured or assumed.

    Args:
        run: A `NoiseScaleMonitor` or its `history`, the folder of a run, with its file
            noise_scale.jsonl, or a checkpoint of it.
        batch_sizes: Global, in `unit`, at most 256 of them. Default: powers of two around the
            run's own and the critical one.
        devices: Numbers of devices, whole, at most 64 of them. Default: the run's, and 2, 4 and 8
            times as many.
        price_per_device_hour: Price of one device for one hour, in any currency.
        calibration: kappa of B_crit = kappa·B_simple, from 1e-6 to 1e6, or a `Calibration`.
            Default: what is expected with optimizers of the run's kind, 1.6 under Adam, 3.1 under
            Muon, and else 1, with bounds that hold 95 % of further models.
        sweep: A sweep of the same model, instead of a calibration: what `fit` returned, or a file
            for it.
        branches: Branches of the run, instead of a calibration: what `branch` returned, or its
            file, or a CSV file with the columns batch_size and loss.
        branch_step: For a CSV file of `branches`: the step of the run at which branches start.
        branch_examples: For a CSV file of `branches`: the examples of each branch.
        loss_scatter: For a CSV file of `branches`: the scatter of losses. Default: that of repeated
            branches, or 0.01.
        step_times: The file of `noisescale profile`, a model from `fit_step_time`, or the folder of
            a run of some steps at another batch size on the same device, whose times count beside
            the run's own. Default: the times that `profile` left in the run's folder. Without
            these, the times of the run's own steps, with wide bounds where other configurations
            have to be assumed.
        max_device_batch_size: The most examples on a device at once; larger batches are
            accumulated. Default: the largest number that was timed.
        devices_per_node: Devices in a node. Default: all devices are in one node.
        unit: Unit of batch sizes, for example "sequences". Default: the unit of the run.
        second_run: A run of the same model to the same result at another batch size, given like
            the first run. Two equations then give S_min and E_min, for any optimizer.
        goal: For `second_run`: a result that both runs reached, as "val_loss=0.25", by a metric in
            their folders. Default: the ends of the runs.
        steps_scatter: For `second_run`: the scatter of the logarithm of the steps, from seeds and
            tuning. Default: 0.15.
        cost_per_prompt: What a prompt, or another group of rows, costs beside its generations, in
            any unit: the seconds of reading it, for example. The best number of generations follows
            from both costs, if groups of rows were given.
        cost_per_generation: What a generation, or another row, costs in the same unit.
        same_batch: Also say how the run's batch is shared by these numbers of `devices`, and what
            differs there.
        ramp: Also write a batch size that grows along the run for this launcher: "megatron",
            "torchtitan", "nanochat" or "lightning"; see `Ramp`.
        sequence_length: Tokens of a sequence, for a `ramp` in another unit than the run's.
        optimizer: Number of the optimizer, if several were measured. Default: all.
        monitor: Name of the monitor, if it has a name.

    Returns:
        Rows of batch size, devices, steps, examples, hours, device-hours and cost, each with its
        bounds, and the recommended row. They hold for the result that the run reached. The
        recommended row is on the run's own devices: the fastest of the batch sizes that were timed
        or, if no other one was timed, the largest that costs few more examples.

    Raises:
        ValueError: If the run has no measured rows, an argument is out of its range, or the two
            runs cannot be compared.
        OSError: If the folder cannot be read.

    Examples:
        >>> from noisescale import History
        >>> history = History()
        >>> for k in range(1, 11):
        ...     history.append(step=50 * k, examples=3200 * k, batch_size=64, noise_scale=20 + k,
        ...                    low=15 + k, high=30 + k, seconds_per_step=0.1)
        >>> prediction = predict(history, batch_sizes=[32, 64, 128])
        >>> [f"{row.steps.value:.0f}" for row in prediction.rows_for(1)]
        ['642', '500', '429']
        >>> prediction.recommended_batch_size
        64

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix D.
    """
    if isinstance(devices, Iterator):  # it is read several times
        devices = tuple(islice(devices, arguments.MOST_BATCH_SIZES + 1))
    if optimizer is None and not isinstance(run, Mapping):
        found = _least_of_all(locals())
        return _with_plans(found, max_device_batch_size, devices, same_batch, ramp, sequence_length)
    ways: dict[str, object] = {"second_run": second_run, "calibration": calibration}
    ways |= {"sweep": sweep, "branches": branches}
    if len(given := tuple(name for name, value in ways.items() if value is not None)) > 1:
        raise Refusal(given, "not be combined", "several of them", "Give the one that you trust.")
    for name, value in {"goal": goal, "steps_scatter": steps_scatter}.items():
        if second_run is None and value is not None:
            remedy = f"Give the second run, or leave `{name}` out."
            raise Refusal(name, "come with `second_run`", f"{value!r} alone", remedy)
    costs = _costs_from(cost_per_prompt, cost_per_generation)
    which = {"optimizer": optimizer or 0, "monitor": monitor}
    history = arguments.history_of(run, which)
    step_times, timed_run = arguments.step_times_from(step_times, history, which)
    other, second = None, None
    if second_run is not None:
        with rename_arguments({"run": "second_run"}):
            other = arguments.history_of(second_run, which)
        if unit is None:
            arguments.check_units(history, other)
        history, other, second = _compare_runs(history, other, goal, steps_scatter)
    calibration = calibration_from(
        *(history, calibration, sweep, branches),
        branch_step=branch_step,
        branch_examples=branch_examples,
        loss_scatter=loss_scatter,
    )
    segments = arguments.checked_run(history)
    law, calibration = law_of(history, segments, second, calibration)
    hardware = arguments.hardware_from(
        [each for each in (history, other, timed_run) if each is not None],
        segments,
        step_times,
        max_device_batch_size=max_device_batch_size,
        devices_per_node=devices_per_node,
        price_per_device_hour=price_per_device_hour,
    )
    own, own_devices = own_batch_size(history, segments), devices_of(history) or 1
    trained_at = [*segments.batch_size, *(second.batch_sizes if second else ())]
    far = min(trained_at) / FAR, max(trained_at) * FAR
    timed = hardware.timed_batch_sizes(own_devices) if own else set()  # a schedule has many
    sizes = arguments.batch_sizes_from(batch_sizes, segments, law, own, far, timed)
    counts = arguments.devices_from(devices, own_devices)
    rows = tuple(
        hardware.row(law, size, count, far=not far[0] <= size <= far[1])
        for count in counts
        for size in sizes
        if size >= count
    )
    if not rows:
        raise Refusal(
            "batch_sizes",
            "reach the number of devices",
            f"at most {max(sizes):g} for {min(counts)} devices",
            "Each device needs an example.",
        )
    predicted = Prediction(
        rows=rows,
        own_batch_size=own,
        own_devices=own_devices,
        law=law,
        calibration=calibration,
        second_run=second,
        run=segments,
        history=history,
        hardware=hardware,
        unit=unit or history.unit,
        under_way=history.under_way,
        costs=costs,
    )
    return _with_plans(predicted, max_device_batch_size, devices, same_batch, ramp, sequence_length)


_WITHOUT_PLANS = {"same_batch": False, "ramp": None, "sequence_length": None}


def _with_plans(
    p: Prediction,
    max_device_batch_size: float | None,
    devices: Iterable[float] | float | None,
    same_batch: bool,
    ramp: str | None,
    sequence_length: int | None,
) -> Prediction:
    """Return a prediction with the batch on other devices, and with a ramp, if asked for."""
    if same_batch and devices is None:
        raise Refusal("same_batch", "come with `devices`", "it alone", "Give `devices`, as 1.")
    if sequence_length is not None and ramp is None:
        remedy = "Give `ramp`, or leave `sequence_length` out."
        raise Refusal("sequence_length", "come with `ramp`", f"{sequence_length!r} alone", remedy)
    if same_batch:
        counts = arguments.devices_from(devices, p.own_devices)
        p = replace(p, same_batch=same_batch_of(p, counts, max_device_batch_size))
    return p if ramp is None else replace(p, ramp=ramp_of(p, ramp, sequence_length))


def _costs_from(
    cost_per_prompt: float | None, cost_per_generation: float | None
) -> tuple[float, float] | None:
    """Return both costs, or none of them."""
    given = {"cost_per_prompt": cost_per_prompt, "cost_per_generation": cost_per_generation}
    known = {name: cost for name, cost in given.items() if cost is not None}
    if not known:
        return None
    if len(known) == 1:
        (alone,), (other,) = known, given.keys() - known
        raise Refusal(alone, f"come with `{other}`", "it alone", f"Give `{other}`, too.")
    per_prompt, per_generation = (
        require_positive(name, cost, "Pass seconds, or any other unit, for both.")
        for name, cost in known.items()
    )
    return per_prompt, per_generation


def _least_of_all(given: dict[str, Any]) -> Prediction:
    """Return the prediction of the optimizer that allows the smallest batch size.

    A GAN has an optimizer for each of its losses. One of which nothing is known is told of beside.
    """
    if isinstance(sizes := given["batch_sizes"], Iterator):  # it is read for each optimizer
        given["batch_sizes"] = tuple(islice(sizes, arguments.MOST_BATCH_SIZES + 1))
    found: dict[int, Prediction] = {}
    reasons: dict[int, ValueError] = {}
    left = [0]
    for number in left:
        try:
            found[number] = predict(**given | _WITHOUT_PLANS | {"optimizer": number})
            left += set(found[number].history.optimizers) - {*left}
        except ValueError as error:
            reasons[number] = error
            left += [1] if left == [0] else []
    if not found:
        raise reasons[0]
    least = min(found, key=lambda number: found[number].critical_or_least)
    if len(left) == 1:
        return found[0]
    others = {n: found[n].decision for n in found} | {n: str(reasons[n]) for n in reasons}
    return replace(found[least], number=least, by_optimizer=dict(sorted(others.items())))


def _compare_runs(
    history: History,
    other: History,
    goal: str | None,
    steps_scatter: float | None,
) -> tuple[History, History, SecondRun]:
    """Return two runs up to their goal, and what they say about the critical batch size."""
    scatter, result = STEPS_SCATTER, "the ends of both runs"
    if steps_scatter is not None:
        scatter = require_positive("steps_scatter", steps_scatter, "Pass 0.15 for 15 %.")
    if goal is not None:
        reached = Goal.read(goal)
        result = str(reached)
        history = arguments.run_to_goal("history", history, reached)
        other = arguments.run_to_goal("second_run", other, reached)
    second = SecondRun.of(
        history, other, result=result, scatter=scatter, confidence=history.confidence
    )
    return history, other, second
