# SPDX-License-Identifier: Apache-2.0
"""Fit step times: from timed configurations to other devices and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from noisescale.refusal import Refusal
from noisescale.step_time.device_times import StepTiming
from noisescale.step_time.model import FittedStepTime
from noisescale.step_time.pollux import (
    GROWTHS,
    NAMES,
    PARAMETERS,
    Array,
    Plans,
    identifiable_parameters,
    relative_seconds,
)

REFITS = 256
"""Enough for bounds, at 2.5 and 97.5 % of them, that do not hang on the seed."""

REPEATABILITY = 0.01
"""Times of one configuration repeat to 1 % at best, and where there are too few to tell."""

STARTS = 6
"""Points to begin from, as the errors are not convex in the overlap."""

PULL = 1e-3
"""The pull of a parameter that timings only hint at to its assumed value: far below any scatter."""


def fit_step_time(timings: Sequence[StepTiming]) -> FittedStepTime:
    """Fit a model of the time of a step to measured configurations.

    The model is Pollux's. With b examples on each of W devices and K micro-batches

        T_grad  = a_c + b_c·b                         gradients of a micro-batch
        T_sync  = a + c·max(W - 2, 0)                 0 for one device; others across nodes
        T_step  = (T_grad^p + T_sync^p)^(1/p)         1 <= p <= 10: how well they overlap
        seconds = (K - 1)·T_grad + T_step + u

    This differs from the paper in u, what a step costs once, such as the optimizer's update. The
    paper has it in T_grad, where K micro-batches pay for it K times.

    The logarithms are fitted by least squares, from several starting points. What the timings do
    not determine is assumed: one batch size does not show what share of T_grad is fixed, and one
    device does not show T_sync. The bounds come from refits to the timings with noise as large as
    their errors. Each refit has the assumed values at one or the other end of their ranges.

    Args:
        timings: Of one or more configurations; repeats are welcome.

    Returns:
        The model, with bounds for 95 % of further timings. In simulations the bounds held
        93 to 98 % of them, the fewest with only one timing more than parameters.

    Raises:
        ValueError: If there are no timings.

    Examples:
        >>> timings = [StepTiming(b, 1, 1, 1, 0.01 + 0.001 * b) for b in (8, 16, 32, 64)]
        >>> f"{fit_step_time(timings).seconds(48).value:.4f}"
        '0.0580'
        >>> half = fit_step_time([StepTiming(32, 1, devices=1, nodes=1, seconds=0.1)]).seconds(16)
        >>> f"{half.low:.2f} {half.value:.3f} {half.high:.2f}"
        '0.05 0.075 0.10'

    References:
        Qiao et al. 2021, "Pollux", OSDI, section 3.2.
    """
    if not timings:
        raise Refusal("timings", "not be empty", "[]", "Make some with `noisescale profile`.")
    reference = max(timing.device_batch_size for timing in timings)
    plans, logs = Plans.of(timings, reference), np.log([t.seconds for t in timings])
    told, hinted = identifiable_parameters(plans)
    middle, low, high = (
        np.array([getattr(parameter, end) for parameter in PARAMETERS.values()])
        for end in ("middle", "low", "high")
    )
    rng = np.random.default_rng(0)

    starts = [middle, *(_start(rng) for _ in range(STARTS - 1))]
    fits = [_fit(plans, logs, told, hinted, middle, start) for start in starts]
    fit, squares = min(fits, key=lambda found: found[1])
    spare = max(len(timings) - 1 - len(told), 0)
    mean_square = max(squares / max(spare, 1), REPEATABILITY**2)
    freedom = max(spare, 2)  # one error alone would say nearly nothing
    scatter = np.sqrt(mean_square * freedom / rng.chisquare(freedom, REFITS))  # Student's t
    refits = []
    for size in scatter:
        assumed = np.where(rng.random(len(NAMES)) < 0.5, low, high)
        start = fit[1:].copy()
        start[NAMES.index("overlap")] = rng.uniform(1, 10)  # timings may determine it but weakly
        noisy = logs + size * rng.standard_normal(len(timings))
        refits.append(_fit(plans, noisy, told, hinted, assumed, start)[0])
    factor = np.exp(scatter * rng.standard_normal(REFITS))
    held = [name for index, name in enumerate(NAMES) if index not in told]
    sentences = assumptions(held, checked=spare > 0)
    return FittedStepTime(tuple(timings), reference, fit, np.array(refits).T, factor, sentences)


def _fit(
    plans: Plans, logs: Array, told: list[int], hinted: list[int], assumed: Array, start: Array
) -> tuple[Array, float]:
    """Return the best unit and parameters, undetermined ones as assumed, and the squared errors."""
    free = [*told, *hinted]

    def complete(values: Array) -> Array:
        parameters = assumed.copy()
        parameters[free] = values
        for growth, of in GROWTHS.items():
            if NAMES.index(growth) not in told:
                parameters[NAMES.index(growth)] *= parameters[NAMES.index(of)]
        return parameters

    def errors(values: Array) -> Array:
        relative = logs - np.log(relative_seconds(complete(values), plans))
        pulls = PULL * (values[len(told) :] - assumed[hinted])
        return np.concatenate([relative - relative.mean(), pulls])  # the best unit is known

    def slopes(values: Array) -> Array:
        step = 1e-7
        moved = values + step * np.vstack([np.zeros(len(free)), np.eye(len(free))])
        parameters = np.array([complete(row) for row in moved]).T[..., None]
        fitted = np.log(relative_seconds(parameters, plans))
        relative = (fitted[0] - fitted[1:]) / step
        pulls = PULL * np.eye(len(free))[:, len(told) :]
        return np.hstack([relative - relative.mean(axis=1, keepdims=True), pulls]).T

    values = np.concatenate([start[told], assumed[hinted]])
    if free:
        least, most = (
            np.array([getattr(PARAMETERS[NAMES[index]], end) for index in free])
            for end in ("least", "most")
        )
        inside = np.clip(values, least + 1e-6, most - 1e-6)
        bounds = least, most
        values = least_squares(errors, inside, slopes, bounds, x_scale="jac", ftol=1e-6).x
    parameters = complete(values)
    unit = np.exp(np.mean(logs - np.log(relative_seconds(parameters, plans))))
    squares = float(np.sum(errors(values)[: len(logs)] ** 2))
    return np.array([unit, *parameters]), squares


def _start(rng: np.random.Generator) -> Array:
    start: Array = 10 ** rng.uniform(-3, 0.5, len(NAMES))
    start[NAMES.index("overlap")] = rng.uniform(1, 10)
    return start


def assumptions(held: Sequence[str], *, checked: bool) -> tuple[str, ...]:
    """Return a sentence for each assumption, with its range.

    Args:
        held: Parameters that the timings do not determine, by their names in `PARAMETERS`.
        checked: Whether there are more timings than the fitted parameters need.

    Examples:
        >>> assumptions(["growth", "growth_across"], checked=True)
        ('How synchronisation grows with the devices was not timed: ...',)
    """
    found = []
    if "fixed" in held:
        found.append(
            "How the time of a micro-batch depends on its size was not timed: half of it is assumed"
            " to be fixed (range: none to all)."
        )
    if "sync" in held:
        found.append(
            "How long devices synchronise was not timed: a quarter of the largest micro-batch's"
            " time is assumed (range: none to all of it)"
            + (
                "; across nodes half of it (none to four times it)." * ("sync_across" in held)
                or "."
            )
        )
    elif "sync_across" in held:
        found.append(
            "How long nodes synchronise was not timed: half of the largest micro-batch's time is"
            " assumed (range: none to four times it)."
        )
    if "growth" in held or ("growth_across" in held and "sync_across" not in held):
        found.append(
            "How synchronisation grows with the devices was not timed: each device beyond the"
            " second is assumed to add 1/16 of the time for two devices (range: nothing to 1/4)."
        )
    if "overlap" in held and not {"sync", "sync_across"} <= {*held}:
        found.append(
            "How much of synchronisation overlaps with the computing of gradients was not timed: no"
            " overlap is assumed (range: none to nearly all)."
        )
    if "update" in held:
        found.append(
            "The part of a step that does not depend on the number of micro-batches was not timed:"
            " none is assumed (range: none to a quarter of the largest micro-batch's time)."
        )
    if not checked:
        found.append(
            "There are no more timings than the model needs: they are assumed to repeat to 1 %."
        )
    return tuple(found)
