# SPDX-License-Identifier: Apache-2.0
"""Pure functions from the state of a run and the wanted batch size to the next state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from noisescale.checks import is_positive
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.plan import Bounds, Plan, plan_for
from noisescale.refusal import Refusal
from noisescale.scheduling.learning_rate import BY_NOISE_SCALE, NO_FACTORS, Factors, factors_for
from noisescale.scheduling.policy import Progress, Wanted
from noisescale.scheduling.settings import Settings
from noisescale.tradeoff.run_sums import gain_of, worth

FIRST_DECISION = 4
"""Least steps from which the scatter of two moments can be estimated."""

NOTHING_MEASURED = NoiseScale.unknown()


class RunSoFar(NamedTuple):
    """Sum up what the steps of a run are worth while it goes on; see `Parts`.

    While the noise scale is not resolved, the last resolved value is used, or its current lower
    bound if that is larger. The steps before the first resolved value use that value. The same
    holds if averages of few steps show no noise at all. In a finished run the next value is used
    instead (`fill_gaps`), which is not known yet here.

    Examples:
        >>> b = NoiseScale(20.0, 15.0, 30.0, grad_sq_norm=1.0, noise_trace=20.0, steps=9)
        >>> run = RunSoFar().plus(b, batch_size=20, steps=10)
        >>> run.min_steps, run.critical_batch_size
        (5.0, 20.0)
    """

    min_steps: float = 0.0
    """S_min of what the run has reached, in steps."""
    min_examples: float = 0.0
    """E_min of what the run has reached, in examples."""
    last: float = 0.0
    """The last resolved noise scale; 0 before the first one."""
    unknown: tuple[tuple[float, float], ...] = ()
    """Batch sizes, with numbers of steps, that wait for the first resolved noise scale."""

    @property
    def critical_batch_size(self) -> float | None:
        """E_min/S_min, a mean of the noise scale over the run's progress; None if not known."""
        return self.min_examples / self.min_steps if self.min_steps else None

    def plus(self, noise_scale: NoiseScale, *, batch_size: float, steps: float) -> RunSoFar:
        """Return the sums after some steps at one batch size, with the noise scale at their end."""
        counts = dict(self.unknown)
        counts[batch_size] = counts.get(batch_size, 0.0) + steps
        known = noise_scale.resolved and noise_scale.value > 0
        last = noise_scale.value if known else self.last
        if not last:
            return RunSoFar(self.min_steps, self.min_examples, last, tuple(counts.items()))
        b = last if known else max(last, noise_scale.low)
        worths = [worth(b, size, count) for size, count in counts.items()]
        min_steps, min_examples = map(sum, zip(*worths, strict=True))
        return RunSoFar(self.min_steps + min_steps, self.min_examples + min_examples, last)


class ControllerState(NamedTuple):
    """The saved state of the batch size along a run.

    Examples:
        >>> from noisescale.state import restore, to_builtins
        >>> state = ControllerState(Plan(8, 4), base_batch_size=32.0, wanted=32.0)
        >>> restore(now=state, saved=to_builtins(state)) == state
        True
    """

    plan: Plan
    """How a step is made up now."""
    base_batch_size: float
    """The batch size that the learning rate was chosen for."""
    wanted: float
    """The batch size that the policy asked for last."""
    first_share: float = 1.0
    """The batch size that the run, or its policy, began with over `base_batch_size`."""
    steps: int = 0
    """Optimizer steps taken."""
    examples: float = 0.0
    """Examples of all devices in the steps taken."""
    examples_at_move: float = -math.inf
    """Examples of all devices up to the last change of the batch size."""
    next_decision: int = FIRST_DECISION
    """The step from which the policy is asked again, if it uses the noise scale."""
    peak_learning_rate: float = 0.0
    """The largest learning rate that the run's own schedule has given."""
    lowered_to: int | None = None
    """Rows of the largest micro-batch that may fit into memory; None: the user's limit."""
    gain: float = 1.0
    """AdaScale's gain: the steps of the first batch size that a step is worth now."""
    factors: Factors = NO_FACTORS
    """Factors on the optimizer's settings while it steps."""
    run: RunSoFar = RunSoFar()
    """What the steps so far were worth, and the run's critical batch size."""
    steps_observed: int = 0
    """Optimizer steps that `run` has seen."""
    low: float = 0.0
    """The lower bound of the noise scale at the last decision."""
    measured_step: int = 0
    """The last measured step before the last decision; 0: none, or not given."""

    def progress(self, learning_rate: float) -> Progress:
        """Return the progress of the run, with the learning rate of its own schedule."""
        return Progress(
            self.steps,
            self.examples,
            self.examples - self.examples_at_move,
            self.run.critical_batch_size,
            learning_rate,
            self.peak_learning_rate,
            self.base_batch_size,
            first_batch_size=self.first_share * self.base_batch_size,
        )


@dataclass(frozen=True)
class Move:
    """One change of the batch size.

    Examples:
        >>> print(Move(64, 2048.0, 100.0, Plan(8, 4), Plan(8, 12), 1.732, "asked for"))
        step 64: batch size 32 -> 96 = 8 x 12 micro-batches x 1 device, lr x 1.73: asked for
    """

    step: int
    """Optimizer steps taken before it."""
    examples: float
    """Examples of all devices before it."""
    wanted: float
    """The batch size that the policy asked for."""
    before: Plan
    after: Plan
    lr_factor: float
    """The factor on the learning rate from here on."""
    reason: str

    @classmethod
    def of(cls, before: dict[str, Any], after: dict[str, Any], **rest: Any) -> Move:
        """Return a saved move."""
        return cls(before=Plan(**before), after=Plan(**after), **rest)

    @property
    def changes_batch_size(self) -> bool:
        """Whether the batch size changes: a move may only change how it is made up."""
        return self.before.batch_size != self.after.batch_size

    def __str__(self) -> str:
        return (
            f"step {self.step}: batch size {self.before.batch_size:g} -> {self.after},"
            f" lr x {self.lr_factor:.3g}: {self.reason}"
        )


def most_rows(settings: Settings, state: ControllerState) -> int | None:
    """Return the largest micro-batch to try, in rows; None if micro-batches stay as they are."""
    most = settings.max_device_batch_size
    return most if most is None or state.lowered_to is None else min(most, state.lowered_to)


def lower_rows(settings: Settings, state: ControllerState, rows: int | None) -> ControllerState:
    """Return the state with micro-batches of at most `rows` rows, if that is a lower limit."""
    most = settings.max_device_batch_size
    lower = rows is not None and most is not None and rows < most
    return state._replace(lowered_to=rows if lower else None)


def plan_of(
    settings: Settings,
    state: ControllerState,
    batch_size: float,
    device_batch_size: float | None = None,
) -> Plan:
    """Return the plan nearest to a global batch, see `BatchSizeController.plan_for`."""
    most = most_rows(settings, state)
    if device_batch_size is None and most is None:
        device_batch_size = state.plan.device_batch_size
    return plan_for(
        batch_size,
        devices=state.plan.devices,
        nodes=state.plan.nodes,
        device_batch_size=device_batch_size,
        max_device_batch_size=most,
        examples_per_row=settings.examples_per_row,
        bounds=settings.bounds,
    )


def with_noise_scale(
    settings: Settings,
    state: ControllerState,
    noise_scale: NoiseScale,
    learning_rate: float,
    measured_step: int = 0,
) -> ControllerState:
    """Return the state with the noise scale and the learning rate of the run's schedule."""
    steps = state.steps
    return state._replace(
        run=_run_so_far(state, noise_scale),
        steps_observed=steps,
        next_decision=steps + min(max(steps // 4, 1), settings.decide_every_n_steps),
        low=noise_scale.low,
        measured_step=measured_step,
        peak_learning_rate=max(state.peak_learning_rate, learning_rate),
    )


def with_batches_of(
    settings: Settings, state: ControllerState, size: float, *, bounds: Bounds
) -> tuple[Settings, ControllerState]:
    """Return settings and state whose micro-batches have `size` examples, as those that came have.

    The batch size that the learning rate was chosen for was made up of such micro-batches, too, so
    their ratio stays. Bounds that no such plan meets are widened to the plan: the batches have
    come.

    Args:
        settings: The settings so far.
        state: The state so far.
        size: The mean examples of a micro-batch on one device.
        bounds: The bounds from now on.
    """
    factor = size / state.plan.device_batch_size
    plan = replace(state.plan, device_batch_size=size)
    state = state._replace(
        plan=plan,
        base_batch_size=state.base_batch_size * factor,
        wanted=state.wanted if state.steps else plan.batch_size,
    )
    settings = replace(settings, bounds=bounds, examples_per_row=settings.examples_per_row * factor)
    try:
        plan_of(settings, state, plan.batch_size, size)
    except ValueError:
        least = min(bounds.min_batch_size, plan.batch_size)
        most = max(bounds.max_batch_size, plan.batch_size)
        few = min(bounds.min_accumulation, plan.accumulation)
        settings = replace(settings, bounds=Bounds(least, most, few))
    return settings, state


def decision(
    settings: Settings,
    state: ControllerState,
    answer: Any,
    average: GradientMoments | None = None,
    device_batch_size: float | None = None,
    *,
    far_below_critical: bool = False,
) -> tuple[ControllerState, Move | None]:
    """Return the state with the plan for the wanted batch size, and the move, if there is one.

    Args:
        settings: The settings that the user chose.
        state: The state, from `with_noise_scale`.
        answer: The answer of the policy.
        average: Moments averaged over the run, for the learning rate.
        device_batch_size: Examples of every micro-batch. Default: see
            `BatchSizeController.plan_for`.
        far_below_critical: See `Policy.far_below_critical`.

    Raises:
        ValueError: If the answer is not a positive, finite number.
    """
    if not is_positive(answer):
        raise Refusal(
            "policy",
            "give a positive number of examples",
            f"{answer!r} at step {state.steps}",
            "Return `plan.batch_size` to stay.",
        )
    wanted, reason = float(answer), reason_for(settings, answer)
    plan = plan_of(settings, state, wanted, device_batch_size)
    below = far_below_critical
    return adopt_plan(settings, state, plan, reason, average, wanted, far_below_critical=below)


def reason_for(settings: Settings, answer: float) -> str:
    """Return the reason of an answer, with the bound that it meets."""
    reason = answer.reason if isinstance(answer, Wanted) else "the policy asks for it"
    if answer < settings.bounds.min_batch_size:
        return f"{reason}, `min_batch_size` is {settings.bounds.min_batch_size:g}"
    if answer > settings.bounds.max_batch_size:
        return f"{reason}, `max_batch_size` is {settings.bounds.max_batch_size:g}"
    return reason


def adopt_plan(
    settings: Settings,
    state: ControllerState,
    plan: Plan,
    reason: str,
    average: GradientMoments | None = None,
    wanted: float | None = None,
    *,
    far_below_critical: bool = False,
) -> tuple[ControllerState, Move | None]:
    """Return the state with a plan and its learning rate, and the move; None if nothing changes."""
    rising = plan.batch_size > state.base_batch_size
    b = _noise_scale_of_the_run(state, average, rising=rising)
    if not (b or rising) and settings.lr_scaling in BY_NOISE_SCALE:
        b = math.inf  # not known yet: as linear scaling, or the run may diverge
    of_rule = math.inf if rising and far_below_critical else b
    sizes = {"batch_size": plan.batch_size, "base_batch_size": state.base_batch_size}
    changes: dict[str, Any] = {
        "wanted": state.wanted if wanted is None else wanted,
        "gain": gain_of(b, **sizes),
        "factors": factors_for(settings.lr_scaling, noise_scale=of_rule, **sizes),
    }
    if plan == state.plan:
        return state._replace(**changes), None
    factor = changes["factors"].learning_rate
    move = Move(state.steps, state.examples, changes["wanted"], state.plan, plan, factor, reason)
    if move.changes_batch_size:
        changes["examples_at_move"] = state.examples
    # The steps of this batch size count with it, where the move comes between two decisions.
    run = _run_so_far(state, NOTHING_MEASURED)
    return state._replace(plan=plan, run=run, steps_observed=state.steps, **changes), move


def resume(
    settings: Settings, now: Plan, saved: ControllerState, device_batch_size: float | None = None
) -> ControllerState:
    """Return a saved state to resume from. On other devices the plan is made anew.

    Args:
        settings: Settings of the resumed run.
        now: The plan that the resumed run would start with.
        saved: The loaded state.
        device_batch_size: See `BatchSizeController.load_state_dict`.
    """
    state, plan = lower_rows(settings, saved, saved.lowered_to), saved.plan
    free = most_rows(settings, state) is not None
    if plan.devices == now.devices and (free or plan.device_batch_size == now.device_batch_size):
        plan = replace(plan, nodes=now.nodes)
    else:
        plan = plan_of(settings, state._replace(plan=now), plan.batch_size)
    if device_batch_size not in (None, plan.device_batch_size):
        plan = plan_of(settings, state._replace(plan=plan), plan.batch_size, device_batch_size)
    return state._replace(plan=plan)


def _run_so_far(state: ControllerState, noise_scale: NoiseScale) -> RunSoFar:
    steps = state.steps - state.steps_observed
    return state.run.plus(noise_scale, batch_size=state.plan.batch_size, steps=steps)


def _noise_scale_of_the_run(
    state: ControllerState, average: GradientMoments | None, *, rising: bool
) -> float:
    """Return the noise scale that the learning rate goes by: the ratio of the moments' averages.

    The ratio can be huge by chance while |G|² is lost in the noise. Below the first batch size that
    errs on the safe side. Above it the ratio is capped by the critical batch size so far, or before
    that is known by the lower bound of the noise scale. The cap is also used if there is no ratio.

    It is one noise scale for the run, not the noise scale of the moment. The latter rises along a
    run, and the gain with it, until the run is unstable. In the first steps of a run the average is
    two or three times too low, as |G|² is largest there. No constant corrects this: a constant that
    suits a model whose learning rate is at the edge slows another model by half.
    """
    if average is None:
        return 0.0
    grad_sq_norm, noise_trace = average.grad_sq_norm, average.noise_trace
    ratio = max(noise_trace, 0.0) / grad_sq_norm if grad_sq_norm > 0 else math.inf
    known = state.run.critical_batch_size or state.low
    return min(ratio, known) if rising or math.isinf(ratio) else ratio
