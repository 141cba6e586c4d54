# SPDX-License-Identifier: Apache-2.0
"""BatchSizeController: the policy, the plan and the learning rate of a run in one object."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from noisescale.checks import require_positive, require_state
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.plan import Plan
from noisescale.refusal import Refusal
from noisescale.scheduling.agreement import Agreement
from noisescale.scheduling.ahead import ScheduleForecast
from noisescale.scheduling.clock import Clock
from noisescale.scheduling.decision import (
    NOTHING_MEASURED,
    ControllerState,
    Move,
    RunSoFar,
    adopt_plan,
    decision,
    lower_rows,
    most_rows,
    plan_of,
    reason_for,
    resume,
    with_batches_of,
    with_noise_scale,
)
from noisescale.scheduling.learning_rate import LearningRateScaling
from noisescale.scheduling.policies import PolicyLike
from noisescale.scheduling.policy import Progress, Wanted
from noisescale.scheduling.scaled_steps import ScaledSteps, check_betas
from noisescale.scheduling.settings import DECIDE_EVERY_N_STEPS, SchedulerOptions, Settings
from noisescale.scheduling.training_loss import TrainingLoss
from noisescale.state import restore, to_builtins

if TYPE_CHECKING:
    from noisescale.meter.meter import Meter
    from noisescale.meter.noise_scale_meter import NoiseScaleMeter

Batch = TypeVar("Batch")

_MOVES_KEPT = 1000
_ROUNDING = 1e-6


def _read(path: str) -> Any:
    """Return a property that reads an attribute of the state."""
    return property(attrgetter(path))


class BatchSizeController:
    """Decide on the batch size between optimizer steps, and scale the learning rate with it.

    In a torch loop:

        meter = NoiseScaleMeter(model)
        meter.follow()
        plan = Plan(device_batch_size=32, accumulation=2)
        least = meter.least_micro_batches
        controller = BatchSizeController(plan, optimizer, min_accumulation=least)
        for window in controller.windows(loader):
            for x, y in window:
                loss = loss_function(model(x), y) / len(window)
                meter.backward(loss, local_batch_size=len(x))
            meter.step()
            optimizer.step()
            optimizer.zero_grad()
            if move := controller.update(meter):
                print(move)

    The last window of an epoch may be short. Under DDP put all but the last backward of a window
    into `model.no_sync()`. A loop that draws its own batches reads `controller.plan` instead.

    Args:
        plan: The plan that the run starts with.
        optimizers: One, or all of them.
        policy: "auto" or "find": see `Find`, which needs `add_loss` and `clock.end_with`;
            "tradeoff", "ratio", "norm_test", "doubling"; "seesaw", "smith"; "nanochat";
            "0:64 500k:128"; a mapping from steps to batch sizes; a `Policy`; or a function from
            (noise scale, plan, progress) to the global batch that is wanted. A function is called
            at every step, unless it has the attribute `needs_noise_scale = True`.
        lr_scaling: How the learning rate follows the batch size, see `factors_for`. "auto":
            "adascale" for SGD if the policy uses the noise scale; else "sqrt".
        min_batch_size: Least global batch, in examples. Default: one micro-batch a device.
        max_batch_size: Largest global batch, in examples. Default: none.
        max_device_batch_size: Largest micro-batch, in rows of the data. Default: micro-batches stay
            as they are, and only their number changes.
        min_accumulation: Least micro-batches a step: `NoiseScaleMeter.least_micro_batches`, which
            is 2 where one process compares them.
        base_batch_size: The global batch that the learning rate was chosen for. Default: the
            plan's.
        examples_per_row: Examples in a row of the data, if that is not one.
        decide_every_n_steps: Steps between decisions on the noise scale. Each decision waits for
            the device once. Schedules by steps change the batch size at the exact step, whatever
            this is.

    Raises:
        ValueError: If an argument is out of its range, or no plan meets the bounds.
        TypeError: If an argument has a wrong type.

    Examples:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.1)
        >>> controller = BatchSizeController(Plan(8, 4), optimizer, policy={0: 32, 2: 64})
        >>> for window in controller.windows(range(12)):
        ...     if move := controller.update():
        ...         print(move)
        step 2: batch size 32 -> 64 = 8 x 8 micro-batches x 1 device, lr x 1.41: scheduled from 2 \
steps on
    """

    def __init__(
        self,
        plan: Plan,
        optimizers: Optimizer | Iterable[Optimizer],
        policy: PolicyLike = "auto",
        *,
        lr_scaling: LearningRateScaling = "auto",
        min_batch_size: float | None = None,
        max_batch_size: float | None = None,
        max_device_batch_size: int | None = None,
        min_accumulation: int = 1,
        base_batch_size: float | None = None,
        examples_per_row: float = 1.0,
        decide_every_n_steps: int = DECIDE_EVERY_N_STEPS,
    ) -> None:
        several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        trained = [p for optimizer in several for g in optimizer.param_groups for p in g["params"]]
        if not trained:
            raise Refusal(
                "optimizers",
                "have parameters to train",
                "none",
                "Give the optimizer of the run, or a list of its optimizers.",
            )
        if base_batch_size is not None:
            require_positive(
                "base_batch_size", base_batch_size, "Leave it out for the plan's batch size."
            )
        options = SchedulerOptions(
            policy=policy,
            lr_scaling=lr_scaling,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_device_batch_size=max_device_batch_size,
            decide_every_n_steps=decide_every_n_steps,
        )
        self.settings = Settings.from_options(
            options,
            several,
            min_accumulation=min_accumulation,
            examples_per_row=examples_per_row,
        )
        self.moves: deque[Move] = deque(maxlen=_MOVES_KEPT)
        """The last thousand changes of the batch size, those before a checkpoint included."""
        self.reason: str | None = None
        """Why the policy asked for what it asked for last; None: it was not asked, or said none."""
        self.clock = Clock()
        """How often a schedule that is sized in steps is due, see docs/scheduling.md."""
        base = base_batch_size or plan.batch_size
        first = plan.batch_size / base
        self._state = ControllerState(plan, base, float(plan.batch_size), first)
        # A plan that a saved one is about to replace, on more devices say, may be the larger one.
        starts_with = min(plan.batch_size, self.base_batch_size)
        if (most := self.settings.bounds.max_batch_size) < starts_with:
            raise Refusal(
                "max_batch_size",
                "be at least the batch size that the run starts with",
                f"{most:g} < {starts_with:g}",
                "Raise it, or start with fewer examples a step.",
            )
        self.plan_for(plan.batch_size)  # there has to be one
        self.losses = TrainingLoss()
        """The training loss along the run, for policies that need it."""
        self.ahead: ScheduleForecast | None = None
        """What the run's schedule does until the end, for policies; None if it does not tell."""
        self._handed_out: int | None = None  # batches of the step under way
        self._has_begun = False
        self._agreement = Agreement(trained[0].device, self.settings.policy.checksum)
        if self.settings.lr_scaling == "malladi":
            check_betas(several, most / self.base_batch_size)
        self._scaled = ScaledSteps(several)

    plan: Plan = _read("_state.plan")
    """How a step is made up now."""
    base_batch_size: float = _read("_state.base_batch_size")
    """The batch size that the learning rate was chosen for."""
    wanted: float = _read("_state.wanted")
    """The batch size that the policy asked for last."""
    steps: int = _read("_state.steps")
    """Optimizer steps taken."""
    examples: float = _read("_state.examples")
    """Examples of all devices in the steps taken."""
    gain: float = _read("_state.gain")
    """AdaScale's gain: the steps of the first batch size that a step is worth now."""
    lr_factor: float = _read("_state.factors.learning_rate")
    """The factor on the learning rate of the next step."""
    run: RunSoFar = _read("_state.run")
    """What the steps so far were worth, and the run's critical batch size."""

    @property
    def choice(self) -> str | None:
        """What the policy says at the start of a new run; None: nothing."""
        return None if self.steps else self.settings.policy.note(self.plan, self.progress)

    @property
    def reason_to_stay(self) -> str | None:
        """What to say at the end of a run: why the batch size stayed, if no move was the last word.

        It is None after moves of a policy that goes on moving, and before the first decision.
        """
        last = self.moves[-1] if self.moves else None
        if self.reason is None or (last and not self.settings.policy.done):
            return None
        if last and self.reason == last.reason:
            return None
        least = ""
        too_large = self.wanted < 0.8 * self.plan.batch_size
        if too_large and self.wanted >= self.settings.bounds.min_batch_size:
            least = ", and there is no smaller one: start with fewer or smaller micro-batches"
        since = f" from step {last.step} on" if last else ""
        return f"the batch size stayed {self.plan}{since}: {self.reason}{least}"

    @property
    def progress(self) -> Progress:
        """The progress of the run, as the policy gets it."""
        return self._state.progress(self._scaled.learning_rate)._replace(
            share=self.clock.share(self.steps),
            ends_by=self.clock.ends_by(self.steps),
            examples_of_run=self._examples_of_run,
            most_steps=self.clock.most_steps,
            loss_slope=self.losses.slope if self.settings.policy.needs_loss else math.nan,
        )

    @property
    def _far_below_critical(self) -> bool:
        known_end = self.clock.share(self.steps) is not None
        return self.settings.policy.far_below_critical and known_end

    @property
    def _examples_of_run(self) -> float | None:
        steps = self.clock.steps_of_examples
        ends = math.isfinite(steps) and self.clock.ends_by(self.steps) == "examples"
        return steps * self.base_batch_size if ends else None

    @property
    def metrics(self) -> dict[str, float]:
        """What loggers get, under keys that begin with `batch_size/`."""
        known = {
            "wanted": self.wanted,
            "planned": float(self.plan.batch_size),
            "lr_factor": self.lr_factor,
            **self.settings.policy.metrics,
        }
        if math.isfinite(slope := self.losses.slope):
            known["loss_slope"] = slope
        return {f"batch_size/{name}": value for name, value in known.items()}

    def tell(self, meter: Meter) -> None:
        """Tell a meter the factor on the learning rate, and the last step of the run."""
        meter.lr_factor = self.lr_factor
        if (examples := self._examples_of_run) is not None:
            left = max(examples - self.examples, 0.0) / self.plan.batch_size
            meter.last_step = self.steps + math.ceil(left - _ROUNDING)

    def add_loss(self, loss: Tensor, examples: float) -> None:
        """Add the loss of a micro-batch, for a policy that needs it. Call it on all ranks.

        Args:
            loss: Its mean loss, before it is divided by the number of micro-batches or scaled, with
                its graph: that tells whether it is a cross-entropy.
            examples: How much it weighs: its examples, or its tokens if the loss is a mean of them.
        """
        share = self.clock.share(self.steps)
        if self.settings.policy.needs_loss and share is not None:
            self.losses.add(loss, examples, share)

    @property
    def max_device_batch_size(self) -> int | None:
        """The largest micro-batch to try, in rows; lowered after memory ran out."""
        return most_rows(self.settings, self._state)

    def due_after(self, measured_step: int | None) -> bool:
        """Return whether to ask the policy before the next step.

        Args:
            measured_step: The last measured step, `NoiseScaleMeter.last_measured_step`. A decision
                on the noise scale waits until a step was measured since the last decision. None:
                one was.
        """
        state = self._state
        policy = self.settings.policy
        if (due := policy.due(self.clock.share(self.steps))) is not None:
            return due
        if not (self.settings.needs_noise_scale or policy.at_every_step):
            return True
        news = measured_step is None or measured_step > state.measured_step
        if self.settings.needs_noise_scale and news and state.steps >= state.next_decision:
            return True
        if policy.at_every_step:
            # All ranks have the same answer: they meet only where something changes.
            return bool(self._ask_policy() != state.wanted)
        # The learning rate follows the noise scale, but a schedule by steps is kept to the step.
        scheduled = policy.checksum is not None
        agreed = self._agreement.same_schedule
        return scheduled and not (agreed and self._ask_policy() == state.wanted)

    def begin(self) -> Move | None:
        """Decide before the first step, for a policy that begins with a batch size of its own.

        All ranks must call it; later calls do nothing. `windows` does before the first step. It
        asks no policy that may go by the learning rate, as a loop may set that with its first step.
        """
        if self.steps or self._has_begun:
            return None
        self._has_begun = True
        policy = self.settings.policy
        is_schedule = policy.at_every_step or policy.checksum is not None
        return self.decide() if policy.due(self.clock.share(0)) or is_schedule else None

    def windows(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Yield the batches of each step of an epoch, as many as the plan has at that step.

        The last list has the batches that are left. Divide losses by the length of the list.
        """
        self.begin()
        iterator = iter(batches)
        while window := list(islice(iterator, self.plan.accumulation)):
            self._handed_out = len(window)
            yield window

    def update(
        self, meter: NoiseScaleMeter | None = None, examples: float | None = None
    ) -> Move | None:
        """Count an optimizer step, and decide on the next batch size if that is due.

        Args:
            meter: The meter of the run, after a call of `follow`. None if neither the policy nor
                the learning rate uses the noise scale.
            examples: Examples of all devices in the step. Default: see `step`.

        Returns:
            The move; None if everything stays.

        Raises:
            ValueError: If a meter is needed and not given, or if `min_accumulation` allows steps
                that the meter cannot measure.
        """
        if self.settings.needs_noise_scale:
            self._check_measured_by(meter)
        self.step(examples)
        move = self.decide_if_due(meter if self.settings.takes_noise_scale else None)
        if meter is not None:
            self.tell(meter)
        return move

    def step(self, examples: float | None = None) -> None:
        """Count an optimizer step.

        Args:
            examples: Examples of all devices in the step. Default: those of the plan; after a short
                last list from `windows`, those of its micro-batches.
        """
        state = self._state
        if examples is None:
            plan = state.plan
            micro_batches = self._handed_out or plan.accumulation
            examples = plan.device_batch_size * micro_batches * plan.devices
        self._state = state._replace(steps=state.steps + 1, examples=state.examples + examples)
        self._handed_out = None

    def decide(
        self,
        noise_scale: NoiseScale | None = None,
        average: GradientMoments | None = None,
        *,
        extra: Mapping[str, NoiseScale] = MappingProxyType({}),
        device_batch_size: float | None = None,
        measured_step: int | None = None,
    ) -> Move | None:
        """Ask the policy, and adopt the plan for the wanted batch size. All ranks must call it.

        Args:
            noise_scale: The current noise scale, `NoiseScaleMeter.noise_scale`; equal on all
                ranks.
            average: Moments averaged over the run, `NoiseScaleMeter.average_moments`, for the
                learning rate.
            extra: `NoiseScaleMeter.extra_noise_scales`, for policies that need one.
            device_batch_size: Keep micro-batches at this many examples, for this decision.
            measured_step: The last measured step in the noise scale, see `due_after`.

        Returns:
            The move; None if everything stays.

        Raises:
            ValueError: If the policy does not return a positive, finite number.
            RuntimeError: If the ranks want different batch sizes.
        """
        noise_scale = noise_scale or NOTHING_MEASURED
        if self.settings.policy.needs_loss and (share := self.clock.share(self.steps)) is not None:
            self.losses.read(share)
        self._state = before = with_noise_scale(
            self.settings,
            self._state,
            noise_scale,
            self._scaled.learning_rate,
            measured_step or 0,
        )
        try:
            answer = self._ask_policy(noise_scale, extra)
            state, move = decision(
                self.settings,
                before,
                answer,
                average,
                device_batch_size,
                far_below_critical=self._far_below_critical,
            )
        except Exception:
            self._agreement.check(0.0)  # the other ranks would wait for this one
            raise
        # While the plan stays there is nothing to wait for, unless a rank may be alone in that.
        stays = move is None and self.settings.policy.by_reduced_values
        self._agreement.check(state.wanted, in_background=stays)
        self.settings.policy.take(answer)
        self.reason = reason_for(self.settings, answer) if isinstance(answer, Wanted) else None
        self._go_on(state, move)
        return move

    def decide_if_due(
        self,
        meter: Meter | None,
        *,
        confidence: float | None = None,
        device_batch_size: float | None = None,
    ) -> Move | None:
        """Decide by what a meter has measured, if that is due. All ranks must call it.

        Args:
            meter: The meter; None: nothing is measured.
            confidence: Coverage of the interval of the noise scale. Default: the meter's.
            device_batch_size: See `decide`.
        """
        if meter is not None and self.settings.policy.done:
            meter.follow(False)
        measured_step = 0 if meter is None else meter.last_measured_step
        if not self.due_after(measured_step):
            return None
        if meter is None:
            return self.decide(device_batch_size=device_batch_size)
        now = meter.noise_scale if confidence is None else meter.noise_scale_at(confidence)
        return self.decide(
            now,
            meter.average_moments,
            extra=meter.extra_noise_scales,
            device_batch_size=device_batch_size,
            measured_step=measured_step,
        )

    def adopt(self, plan: Plan, reason: str, average: GradientMoments | None = None) -> Move | None:
        """Adopt a plan; the learning rate follows its batch size. None if nothing changes."""
        below = self._far_below_critical
        state, move = adopt_plan(
            self.settings, self._state, plan, reason, average, far_below_critical=below
        )
        self._go_on(state, move)
        return move

    def plan_for(self, batch_size: float, device_batch_size: float | None = None) -> Plan:
        """Return the plan nearest to a global batch.

        Args:
            batch_size: Global, in examples.
            device_batch_size: Examples of every micro-batch. Default: as large as
                `max_device_batch_size` allows if it is given, else as now.
        """
        return plan_of(self.settings, self._state, batch_size, device_batch_size)

    def follow_batches(
        self, size: float, more: float = 0.0, *, max_batch_size: float | None = None
    ) -> None:
        """Take the batches that came in place of those that were planned. All ranks must call it.

        Plans and the batch size that the learning rate was chosen for are made up of micro-batches
        of this size from now on. It is no move: the number of micro-batches stays.

        Args:
            size: Mean examples of a micro-batch on one device, over all ranks.
            more: How many more examples the steps so far had than were counted.
            max_batch_size: Largest global batch from now on. Default: as before.
        """
        state, bounds = self._state, self.settings.bounds
        if max_batch_size is not None:
            bounds = bounds._replace(max_batch_size=max_batch_size)
        state = state._replace(
            examples=state.examples + more, examples_at_move=state.examples_at_move + more
        )
        if not math.isclose(size, state.plan.device_batch_size, rel_tol=1e-9):
            self.settings, state = with_batches_of(self.settings, state, size, bounds=bounds)
        self._state = state

    def lower_max_device_batch_size(self, rows: int) -> None:
        """Try micro-batches of at most `rows` rows from now on, as memory ran out."""
        self._state = lower_rows(self.settings, self._state, rows)

    def settle(self) -> None:
        """Wait until all ranks are known to want the same. All ranks have to call it.

        Raises:
            RuntimeError: If they do not.
        """
        self._agreement.settle()

    def close(self) -> None:
        """Restore the optimizers."""
        self._scaled.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs, in builtins. It is equal on all ranks."""
        policy = self.settings.policy
        return {
            **to_builtins(self._state),
            "clock": self.clock.state_dict(),
            "losses": self.losses.state_dict(),
            "moves": to_builtins([*self.moves]),
            "reason": self.reason,
            "same_schedule": self._agreement.same_schedule,
            "policy": policy.state_dict(),
            "policy_kind": policy.kind,
        }

    def load_state_dict(
        self, state: dict[str, Any], *, device_batch_size: float | None = None
    ) -> None:
        """Continue from a `state_dict`. All ranks have to call it.

        On another number of devices the plan is made anew; the global batch, the factor on the
        learning rate and the clock stay. A policy that differs from the saved one starts at the
        current batch size, without a state of its own.

        Args:
            state: The saved state.
            device_batch_size: Examples of every micro-batch, for now. Default: as saved, or as
                large as allowed if the plan is made anew.

        Raises:
            ValueError: If a value is missing.
            RuntimeError: If the ranks have different schedules.
        """
        own = self.state_dict()
        require_state("BatchSizeController", state, own)
        for name in ("clock", "run"):
            require_state(f"BatchSizeController, `{name}`,", state[name], own[name])
        saved = restore(self._state, state)
        self._go_on(resume(self.settings, self.plan, saved, device_batch_size))
        self.clock.load_state_dict(state["clock"])
        self.losses.load_state_dict(state["losses"])
        self.moves.clear()
        self.moves.extend(Move.of(**move) for move in state["moves"])
        self.reason = state["reason"]
        policy = self.settings.policy
        if state["policy"]:
            policy.go_on_from(state["policy"], state["policy_kind"])
        if policy.kind != state["policy_kind"]:
            first = self.plan.batch_size / self.base_batch_size
            self._state = self._state._replace(first_share=first)
        if state["same_schedule"]:  # agreed now, or it would take a decision that is not due
            self._agreement.check_schedule()

    def _go_on(self, state: ControllerState, move: Move | None = None) -> None:
        self._state = state
        self._scaled.factors = state.factors
        if move is not None and move.changes_batch_size:
            self.moves.append(move)

    def _ask_policy(
        self,
        noise_scale: NoiseScale = NOTHING_MEASURED,
        extra: Mapping[str, NoiseScale] = MappingProxyType({}),
    ) -> Any:
        return self.settings.policy(noise_scale, self.plan, self.progress._replace(extra=extra))

    def _check_measured_by(self, meter: NoiseScaleMeter | None) -> None:
        if meter is None:
            raise Refusal(
                "meter",
                "be given if the policy or the learning rate uses the noise scale",
                "None",
                "Pass the `NoiseScaleMeter` of the run.",
            )
        policy = self.settings.policy
        extra = policy.extra
        if extra is not None and extra.name not in {one.name for one in meter.extra}:
            raise Refusal(
                "meter",
                f"measure {extra.__name__} for {policy.kind}",
                "one that does not",
                f"Make it with `NoiseScaleMeter(..., extra=[{extra.__name__}],"
                " optimizer=optimizer)`.",
            )
        least, needed = self.settings.bounds.min_accumulation, meter.least_micro_batches
        if least < needed:
            raise Refusal(
                "min_accumulation",
                f"be at least {needed} if one process compares micro-batches",
                least,
                "Pass `meter.least_micro_batches`: with fewer micro-batches nothing is"
                " measured, and the batch size never changes.",
            )
