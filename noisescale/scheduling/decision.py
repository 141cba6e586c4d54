# SPDX-License-Identifier: Apache-2.0
"""From the state of a run and what its policy wants to the next state: pure functions."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from noisescale.checks import checked_count, checked_positive, is_real
from noisescale.estimation.estimator import NoiseScaleEstimator
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.plan import Bounds, Plan, plan_for
from noisescale.scheduling.learning_rate import factors_for, gain_of
from noisescale.scheduling.move import Move
from noisescale.scheduling.policy import Wanted
from noisescale.scheduling.settings import Settings
from noisescale.scheduling.state import ControllerState

if TYPE_CHECKING:
    from noisescale.meter.meter import NoiseScaleMeter

NOTHING_MEASURED = NoiseScaleEstimator().estimate()


@dataclass(frozen=True)
class Terms:
    """What decisions keep to, which stays as it is along a run."""

    settings: Settings
    bounds: Bounds
    examples_per_row: float

    @classmethod
    def checked(
        cls,
        settings: Settings,
        start: ControllerState,
        *,
        min_accumulation: int,
        examples_per_row: float,
    ) -> Terms:
        """Return them, or raise a ValueError where no plan of the run's beginning meets them."""
        checked_positive("examples_per_row", examples_per_row, "Leave it at 1.")
        checked_count("min_accumulation", min_accumulation, "Leave it at 1.")
        most = settings.max_batch_size
        # A plan that a saved one is about to replace, on more devices say, may be the larger one.
        starts_with = min(start.plan.batch_size, start.base_batch_size)
        if most is not None and most < starts_with:
            raise ValueError(
                f"`max_batch_size` must be at least the batch size that the run starts with, got"
                f" {most:g} < {starts_with:g}. Raise it, or start with fewer examples a step."
            )
        bounds = Bounds(settings.min_batch_size or 0.0, most or math.inf, min_accumulation)
        terms = cls(settings, bounds, examples_per_row)
        terms.plan_for(start, start.plan.batch_size)
        return terms

    def check_measured_by(self, meter: NoiseScaleMeter | None) -> None:
        """Raise a ValueError unless the meter measures what decisions go by."""
        if not self.settings.needs_noise_scale:
            return
        if meter is None:
            raise ValueError(
                "`meter` must be given where the policy or the learning rate goes by the noise"
                " scale, got None. Pass the `NoiseScaleMeter` that measures the run."
            )
        least, needed = self.bounds.min_accumulation, meter.least_micro_batches
        if least < needed:
            raise ValueError(
                f"`min_accumulation` must be at least {needed} where micro-batches are compared in"
                f" one process, got {least}. Pass `meter.least_micro_batches`: from fewer nothing"
                " is measured, and the batch size stays for ever."
            )

    def max_device_batch_size(self, state: ControllerState) -> int | None:
        """Return the largest micro-batch to try, in rows; None where micro-batches stay."""
        most = self.settings.max_device_batch_size
        return most if most is None or state.lowered_to is None else min(most, state.lowered_to)

    def lowered(self, state: ControllerState, rows: int | None) -> ControllerState:
        """Return the state with micro-batches of at most so many rows, if that is fewer."""
        most = self.settings.max_device_batch_size
        lower = rows is not None and most is not None and rows < most
        return replace(state, lowered_to=rows if lower else None)

    def plan_for(
        self, state: ControllerState, batch_size: float, device_batch_size: float | None = None
    ) -> Plan:
        """Return the plan nearest to a global batch, see `BatchSizeController.plan_for`."""
        most = self.max_device_batch_size(state)
        if device_batch_size is None and most is None:
            device_batch_size = state.plan.device_batch_size
        return plan_for(
            batch_size,
            devices=state.plan.devices,
            nodes=state.plan.nodes,
            device_batch_size=device_batch_size,
            max_device_batch_size=most,
            examples_per_row=self.examples_per_row,
            bounds=self.bounds,
        )


def informed(
    terms: Terms, state: ControllerState, noise_scale: NoiseScale, learning_rate: float
) -> ControllerState:
    """Return the state that knows what is known when a decision is taken.

    Args:
        terms: That decisions keep to.
        state: Of now.
        noise_scale: Of now.
        learning_rate: That the run's own schedule gives.
    """
    until_next = min(max(state.steps // 4, 1), terms.settings.decide_every_n_steps)
    return replace(
        _observed(state, noise_scale),
        next_decision=state.steps + until_next,
        low=noise_scale.low,
        peak_learning_rate=max(state.peak_learning_rate, learning_rate),
    )


def wanted_from(answer: Any, steps: int) -> Wanted:
    """Return what a policy gave after so many steps, or raise a ValueError where that is nothing.

    Example:
        >>> wanted_from(64, steps=1).reason
        'the policy asks for it'
    """
    if not (is_real(answer) and 0 < answer < math.inf):
        raise ValueError(
            f"`policy` must give a positive number of examples, got {answer!r} at step {steps}."
            " Return `plan.batch_size` to stay."
        )
    return answer if isinstance(answer, Wanted) else Wanted(answer, "the policy asks for it")


def decision(
    terms: Terms,
    state: ControllerState,
    wanted: Wanted,
    average: GradientMoments | None = None,
    device_batch_size: float | None = None,
) -> tuple[ControllerState, Move | None]:
    """Return the state with the plan for what is wanted, and the move to it, if it is one.

    Args:
        terms: That decisions keep to.
        state: See `informed`.
        wanted: By the policy.
        average: Moments averaged over the run, for the learning rate.
        device_batch_size: Of every micro-batch. Default: see `BatchSizeController.plan_for`.
    """
    bounds, reason = terms.bounds, wanted.reason
    if wanted < bounds.min_batch_size:
        reason += f", `min_batch_size` is {bounds.min_batch_size:g}"
    elif wanted > bounds.max_batch_size:
        reason += f", `max_batch_size` is {bounds.max_batch_size:g}"
    plan = terms.plan_for(state, float(wanted), device_batch_size)
    return adopted(terms, replace(state, wanted=float(wanted)), plan, reason, average)


def adopted(
    terms: Terms,
    state: ControllerState,
    plan: Plan,
    reason: str,
    average: GradientMoments | None = None,
) -> tuple[ControllerState, Move | None]:
    """Return the state with a plan, its learning rate following, and the move; None if it stays."""
    b = _noise_scale_of_the_run(state, average, rising=plan.batch_size > state.base_batch_size)
    sizes = {"batch_size": plan.batch_size, "base_batch_size": state.base_batch_size}
    factors = factors_for(terms.settings.lr_scaling, noise_scale=b, **sizes)
    after = replace(state, gain=gain_of(b, **sizes), factors=factors)
    if plan == state.plan:
        return after, None
    after = _observed(after, NOTHING_MEASURED)  # of this batch size, where it is not decided now
    factor = factors.learning_rate
    move = Move(state.steps, state.examples, state.wanted, state.plan, plan, factor, reason)
    if move.changes_batch_size:
        after = replace(after, examples_at_move=state.examples)
    return replace(after, plan=plan), move


def resumed(
    terms: Terms, now: Plan, saved: ControllerState, device_batch_size: float | None = None
) -> ControllerState:
    """Return a saved state as it goes on: on other devices the plan is made anew.

    Args:
        terms: Of the run that goes on.
        now: How its steps would be made up.
        saved: As it was loaded.
        device_batch_size: Of every micro-batch. Default: as it was saved, or as large as it may be
            where the plan is made anew.
    """
    state = terms.lowered(saved, saved.lowered_to)
    before = state.plan
    free = terms.max_device_batch_size(state) is not None
    if before.devices == now.devices and (
        free or before.device_batch_size == now.device_batch_size
    ):
        state = replace(state, plan=replace(before, nodes=now.nodes))
    else:
        made_anew = terms.plan_for(replace(state, plan=now), before.batch_size)
        state = replace(state, plan=made_anew)
    if device_batch_size not in (None, state.plan.device_batch_size):
        plan = terms.plan_for(state, state.plan.batch_size, device_batch_size)
        state = replace(state, plan=plan)
    return state


def _observed(state: ControllerState, noise_scale: NoiseScale) -> ControllerState:
    run = copy.deepcopy(state.run)
    steps = state.steps - state.steps_observed
    run.observe(noise_scale, batch_size=state.plan.batch_size, steps=steps)
    return replace(state, run=run, steps_observed=state.steps)


def _noise_scale_of_the_run(
    state: ControllerState, average: GradientMoments | None, *, rising: bool
) -> float:
    """The noise scale that the learning rate goes by: the ratio of the moments' averages.

    That is huge by chance while |G|² is lost in the noise, below the first batch size only to
    the safe side. Above it the critical batch size so far is the most that is believed, or
    before that is known what the noise scale is above; likewise where there is no ratio.
    """
    if average is None:
        return 0.0
    grad_sq_norm, noise_trace = average.grad_sq_norm, average.noise_trace
    ratio = max(noise_trace, 0.0) / grad_sq_norm if grad_sq_norm > 0 else math.inf
    known = state.run.critical_batch_size or state.low
    return min(ratio, known) if rising or math.isinf(ratio) else ratio
