# SPDX-License-Identifier: Apache-2.0
"""From the state of a run and what its policy wants to the next state: pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from noisescale.checks import checked_state, is_positive
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.plan import Plan, plan_for
from noisescale.scheduling.critical_batch_size_so_far import RunSoFar
from noisescale.scheduling.learning_rate import NO_FACTORS, Factors, factors_for
from noisescale.scheduling.policy import Progress, Wanted
from noisescale.scheduling.settings import Settings
from noisescale.tradeoff.run_sums import gain_of

FIRST_DECISION = 4
"""Steps that two moments' scatter can be told from."""

LATER = {"measured_step"}
"""What states have not always had, and can do without."""

NOTHING_MEASURED = NoiseScale.unknown()


class ControllerState(NamedTuple):
    """All that changes about the batch size along a run, and is saved.

    Example:
        >>> state = ControllerState(Plan(8, 4), base_batch_size=32.0, wanted=32.0)
        >>> ControllerState.loaded(state.state_dict()).plan
        Plan(device_batch_size=8, accumulation=4, devices=1, nodes=1)
    """

    plan: Plan
    """How a step is made up now."""
    base_batch_size: float
    """The batch size that the learning rate was chosen for."""
    wanted: float
    """What the policy asked for last."""
    steps: int = 0
    """Optimizer steps taken."""
    examples: float = 0.0
    """Examples of all devices in them."""
    examples_at_move: float = -math.inf
    """Likewise when the batch size changed last."""
    next_decision: int = FIRST_DECISION
    """The step from which the policy is asked again, if it goes by the noise scale."""
    peak_learning_rate: float = 0.0
    """The largest that the run's own schedule has given."""
    lowered_to: int | None = None
    """Rows of the largest micro-batch that memory may suffice for; None: as the user said."""
    gain: float = 1.0
    """The steps of the first batch size that one of now is worth: AdaScale's gain."""
    factors: Factors = NO_FACTORS
    """What the optimizer's settings are changed by while it steps."""
    run: RunSoFar = RunSoFar()
    """What the steps so far were worth, and its critical batch size."""
    steps_observed: int = 0
    """Those that `run` has seen."""
    low: float = 0.0
    """What the noise scale was above at the last decision."""
    measured_step: int = 0
    """The last measured step that the last decision knew of; 0: none, or not told."""

    def progress(self, learning_rate: float) -> Progress:
        """Return what a policy is told of the run, at the learning rate of its own schedule."""
        return Progress(
            self.steps,
            self.examples,
            self.examples - self.examples_at_move,
            self.run.critical_batch_size,
            learning_rate,
            self.peak_learning_rate,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `loaded` makes it from, in builtins, but for the nodes, which are of now."""
        return self._asdict() | {
            "plan": [self.plan.device_batch_size, self.plan.accumulation, self.plan.devices],
            "factors": list(self.factors),
            "run": self.run.state_dict(),
        }

    @classmethod
    def loaded(cls, state: dict[str, Any]) -> ControllerState:
        """Return the record of a `state_dict`, which may have more in it.

        Raises:
            ValueError: If something is missing.
        """
        checked_state("BatchSizeController, `run`,", state["run"], RunSoFar._fields)
        fields = {name: state[name] for name in cls._fields if name not in LATER or name in state}
        return cls(**fields)._replace(
            plan=Plan(*state["plan"]),
            factors=Factors(*state["factors"]),
            run=RunSoFar.loaded(state["run"]),
        )


@dataclass(frozen=True)
class Move:
    """One change of the batch size.

    Example:
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

    @property
    def changes_batch_size(self) -> bool:
        """Whether it does: the same batch size may be made up in another way."""
        return self.before.batch_size != self.after.batch_size

    def __str__(self) -> str:
        return (
            f"step {self.step}: batch size {self.before.batch_size:g} -> {self.after},"
            f" lr x {self.lr_factor:.3g}: {self.reason}"
        )


def most_rows(settings: Settings, state: ControllerState) -> int | None:
    """Return the largest micro-batch to try, in rows; None where micro-batches stay."""
    most = settings.max_device_batch_size
    return most if most is None or state.lowered_to is None else min(most, state.lowered_to)


def lowered(settings: Settings, state: ControllerState, rows: int | None) -> ControllerState:
    """Return the state with micro-batches of at most so many rows, if that is fewer."""
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


def informed(
    settings: Settings,
    state: ControllerState,
    noise_scale: NoiseScale,
    learning_rate: float,
    measured_step: int = 0,
) -> ControllerState:
    """Return the state that knows the noise scale and the learning rate of the run's schedule."""
    steps = state.steps
    return state._replace(
        run=_run_so_far(state, noise_scale),
        steps_observed=steps,
        next_decision=steps + min(max(steps // 4, 1), settings.decide_every_n_steps),
        low=noise_scale.low,
        measured_step=measured_step,
        peak_learning_rate=max(state.peak_learning_rate, learning_rate),
    )


def decision(
    settings: Settings,
    state: ControllerState,
    answer: Any,
    average: GradientMoments | None = None,
    device_batch_size: float | None = None,
) -> tuple[ControllerState, Move | None]:
    """Return the state with the plan for what is wanted, and the move to it, if it is one.

    Args:
        settings: That the user chose.
        state: See `informed`.
        answer: Of the policy.
        average: Moments averaged over the run, for the learning rate.
        device_batch_size: Of every micro-batch. Default: see `BatchSizeController.plan_for`.

    Raises:
        ValueError: If the answer is no positive, finite number.
    """
    if not is_positive(answer):
        raise ValueError(
            f"`policy` must give a positive number of examples, got {answer!r} at step"
            f" {state.steps}. Return `plan.batch_size` to stay."
        )
    wanted, bounds = float(answer), settings.bounds
    reason = answer.reason if isinstance(answer, Wanted) else "the policy asks for it"
    if wanted < bounds.min_batch_size:
        reason += f", `min_batch_size` is {bounds.min_batch_size:g}"
    elif wanted > bounds.max_batch_size:
        reason += f", `max_batch_size` is {bounds.max_batch_size:g}"
    plan = plan_of(settings, state, wanted, device_batch_size)
    return adopted(settings, state, plan, reason, average, wanted)


def adopted(
    settings: Settings,
    state: ControllerState,
    plan: Plan,
    reason: str,
    average: GradientMoments | None = None,
    wanted: float | None = None,
) -> tuple[ControllerState, Move | None]:
    """Return the state with a plan, its learning rate following, and the move; None if it stays."""
    b = _noise_scale_of_the_run(state, average, rising=plan.batch_size > state.base_batch_size)
    sizes = {"batch_size": plan.batch_size, "base_batch_size": state.base_batch_size}
    changes: dict[str, Any] = {
        "wanted": state.wanted if wanted is None else wanted,
        "gain": gain_of(b, **sizes),
        "factors": factors_for(settings.lr_scaling, noise_scale=b, **sizes),
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


def resumed(
    settings: Settings, now: Plan, saved: ControllerState, device_batch_size: float | None = None
) -> ControllerState:
    """Return a saved state as it goes on: on other devices the plan is made anew.

    Args:
        settings: Of the run that goes on.
        now: How its steps would be made up.
        saved: As it was loaded.
        device_batch_size: See `BatchSizeController.load_state_dict`.
    """
    state, plan = lowered(settings, saved, saved.lowered_to), saved.plan
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
    return state.run.after(noise_scale, batch_size=state.plan.batch_size, steps=steps)


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
