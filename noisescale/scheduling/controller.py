# SPDX-License-Identifier: Apache-2.0
"""BatchSizeController: policy, plan and learning rate of a run, behind one object."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from torch.optim import Optimizer

from noisescale.checks import checked_count, checked_positive, checked_state, is_real
from noisescale.estimation.estimator import NoiseScaleEstimator
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.plan import Bounds, Plan, plan_for
from noisescale.scheduling.agreement import Agreement, check_same_schedule
from noisescale.scheduling.clock import Clock
from noisescale.scheduling.critical_batch_size_so_far import RunSoFar
from noisescale.scheduling.gate import Gate
from noisescale.scheduling.learning_rate import Factors, LearningRateScaling, factors_for, gain_of
from noisescale.scheduling.move import Move
from noisescale.scheduling.policies import PolicyLike, Progress
from noisescale.scheduling.scaled_steps import ScaledSteps, check_betas
from noisescale.scheduling.settings import DECIDE_EVERY_N_STEPS, Settings

if TYPE_CHECKING:
    from noisescale.meter.meter import NoiseScaleMeter

Batch = TypeVar("Batch")

_FIRST_DECISION = 4
"""Steps that two moments' scatter can be told from."""

_MOVES_KEPT = 1000

_NOTHING_MEASURED = NoiseScaleEstimator().estimate()

_LATER = {"policy_kind"}
"""What states have not always had, and can do without."""


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

    The last window of an epoch may be a short one. Under DDP put all but its last backward into
    `model.no_sync()`. A loop that draws its own batches asks `controller.plan` instead.

    Args:
        plan: How the run starts.
        optimizers: One, or all of them.
        policy: "tradeoff", "ratio", "norm_test", "doubling"; "seesaw", "smith"; a mapping from
            steps to batch sizes; or a function from (noise scale, plan, progress) to the global
            batch that is wanted. A function is asked at every step unless it has the attribute
            `needs_noise_scale = True`.
        lr_scaling: How the learning rate goes along, see `factors_for`. "auto": under a policy that
            goes by the noise scale "adascale" for SGD and "capped_sqrt" for others, else "sqrt".
        min_batch_size: Least global batch, in examples. Default: one micro-batch a device.
        max_batch_size: Largest global batch, in examples. Default: none.
        max_device_batch_size: Largest micro-batch, in rows of the data. Default: micro-batches stay
            as they are, and only their number changes.
        min_accumulation: Least micro-batches a step: `NoiseScaleMeter.least_micro_batches`, which
            is 2 where one process compares them.
        base_batch_size: The global batch that the learning rate was chosen for. Default: that of
            the plan.
        examples_per_row: Examples in a row of the data, if that is not one.
        decide_every_n_steps: Steps between decisions on the noise scale; each waits for the device
            once. Schedules are kept to the step whatever it is.

    Raises:
        ValueError: If an argument is out of its range, or no plan meets the bounds.
        TypeError: If one has a wrong type.

    Example:
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
        policy: PolicyLike = "tradeoff",
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
            raise ValueError(
                "`optimizers` must have parameters to train, got none. Give the optimizer of the"
                " run, or a list of them."
            )
        if base_batch_size is not None:
            checked_positive("base_batch_size", base_batch_size, "Leave it out for the plan's.")
        checked_positive("examples_per_row", examples_per_row, "Leave it at 1.")
        checked_count("min_accumulation", min_accumulation, "Leave it at 1.")
        settings = Settings.checked(
            policy=policy,
            lr_scaling=lr_scaling,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_device_batch_size=max_device_batch_size,
            decide_every_n_steps=decide_every_n_steps,
        )
        self.settings = settings.resolved(several)
        self.plan = plan
        """How a step is made up now."""
        self.base_batch_size = base_batch_size or plan.batch_size
        """The batch size that the learning rate was chosen for."""
        self.wanted = float(plan.batch_size)
        """What the policy asked for last."""
        self.steps = 0
        """Optimizer steps taken."""
        self.examples = 0.0
        """Examples of all devices in them."""
        self.gain = 1.0
        """The steps of the first batch size that one of now is worth: AdaScale's gain."""
        self.moves: deque[Move] = deque(maxlen=_MOVES_KEPT)
        """The last thousand changes of the batch size."""
        self.run = RunSoFar()
        """What the steps so far were worth, and its critical batch size."""
        self.clock = Clock()
        """How often a schedule that is sized in steps is due, see docs/scheduling.md."""
        self.max_device_batch_size = self.settings.max_device_batch_size
        """The largest micro-batch to try, in rows; lowered where memory ran out."""
        self._examples_per_row = examples_per_row
        self._bounds = self._checked_bounds(plan, min_accumulation)
        self._handed_out: int | None = None  # batches of the window under way
        self._examples_at_move = -math.inf
        self._next_decision = _FIRST_DECISION
        self._steps_observed = 0
        self._low = 0.0  # what the noise scale was above at the last decision
        self._peak_learning_rate = 0.0
        self._same_schedule = False
        self._device = trained[0].device
        self._agreement = Agreement(self._device)
        if self.settings.lr_scaling == "malladi":
            check_betas(several, self._bounds.max_batch_size / self.base_batch_size)
        self._scaled = ScaledSteps(several)

    @property
    def lr_factor(self) -> float:
        """The factor on the learning rate of the next step."""
        return self._scaled.factors.learning_rate

    @property
    def due(self) -> bool:
        """Whether the policy is to be asked before the next step."""
        if not self.settings.needs_noise_scale or self.steps >= self._next_decision:
            return True
        # The learning rate follows the noise scale, but a schedule by steps is kept to the step.
        scheduled = self._schedule_checksum is not None
        return scheduled and not (self._same_schedule and self._asked_for() == self.wanted)

    def windows(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Yield the batches of each step of an epoch: as many as the plan has by then.

        The last list has what is left, so that its length is what to divide losses by.
        """
        iterator = iter(batches)
        while window := list(islice(iterator, self.plan.accumulation)):
            self._handed_out = len(window)
            yield window

    def update(
        self, meter: NoiseScaleMeter | None = None, examples: float | None = None
    ) -> Move | None:
        """Count an optimizer step, and decide on the next ones where that is due.

        Args:
            meter: That measures the run, `follow` called. None where neither the policy nor the
                learning rate goes by the noise scale.
            examples: Of all devices in the step. Default: see `step`.

        Returns:
            The move; None if everything stays.

        Raises:
            ValueError: If there is no meter where one is needed, or if `min_accumulation` allows
                for steps that it cannot measure.
        """
        if meter is None and self.settings.needs_noise_scale:
            raise ValueError(
                "`meter` must be given where the policy or the learning rate goes by the noise"
                " scale, got None. Pass the `NoiseScaleMeter` that measures the run."
            )
        least, needed = self._bounds.min_accumulation, meter.least_micro_batches if meter else 1
        if self.settings.needs_noise_scale and least < needed:
            raise ValueError(
                f"`min_accumulation` must be at least {needed} where micro-batches are compared in"
                f" one process, got {least}. Pass `meter.least_micro_batches`: from fewer nothing"
                " is measured, and the batch size stays for ever."
            )
        self.step(examples)
        if not self.due:
            return None
        return (
            self.decide()
            if meter is None or not self.settings.takes_noise_scale
            else self.decide(meter.recent_noise_scale, meter.average_moments)
        )

    def step(self, examples: float | None = None) -> None:
        """Count an optimizer step.

        Args:
            examples: Of all devices in it. Default: those of the plan; where `windows` handed out
                a short last list, of as many micro-batches as that had.
        """
        if examples is None:
            micro_batches = self._handed_out or self.plan.accumulation
            examples = self.plan.device_batch_size * micro_batches * self.plan.devices
        self.steps += 1
        self.examples += examples
        self._handed_out = None

    def decide(
        self,
        noise_scale: NoiseScale | None = None,
        average: GradientMoments | None = None,
        *,
        device_batch_size: float | None = None,
    ) -> Move | None:
        """Ask the policy, and adopt the plan for what it wants. All ranks have to call it.

        Args:
            noise_scale: Of now, `NoiseScaleMeter.recent_noise_scale`; alike on all ranks.
            average: Moments averaged over the run, `NoiseScaleMeter.average_moments`, for the
                learning rate.
            device_batch_size: Keep micro-batches at so many examples, for the time being.

        Returns:
            The move; None if everything stays.

        Raises:
            ValueError: If the policy gives no positive, finite number.
            RuntimeError: If the ranks do not want the same.
        """
        noise_scale = noise_scale or _NOTHING_MEASURED
        self._next_decision = self.steps + min(
            max(self.steps // 4, 1), self.settings.decide_every_n_steps
        )
        self._observe(noise_scale)
        self._low = noise_scale.low
        self._peak_learning_rate = max(self._peak_learning_rate, self._scaled.learning_rate)
        try:
            wanted = self._asked_for(noise_scale)
        except Exception:
            self._check_agreement(0.0)  # the other ranks would wait for this one
            raise
        if not (is_real(wanted) and 0 < wanted < math.inf):
            self._check_agreement(0.0)
            raise ValueError(
                f"`policy` must give a positive number of examples, got {wanted!r} at step"
                f" {self.steps}. Return `plan.batch_size` to stay."
            )
        plan = self.plan_for(float(wanted), device_batch_size)
        # Gated ones go by reduced values alone. While the plan stays there is nothing to wait for.
        stays = plan == self.plan and isinstance(self.settings.policy, Gate)
        self._check_agreement(float(wanted), in_background=stays)
        self.wanted = float(wanted)
        reason = getattr(wanted, "reason", "the policy asks for it")
        if wanted < self._bounds.min_batch_size:
            reason += f", `min_batch_size` is {self._bounds.min_batch_size:g}"
        elif wanted > self._bounds.max_batch_size:
            reason += f", `max_batch_size` is {self._bounds.max_batch_size:g}"
        return self.adopt(plan, reason, average)

    def adopt(self, plan: Plan, reason: str, average: GradientMoments | None = None) -> Move | None:
        """Go on with a plan; the learning rate follows its batch size. None if it is the same."""
        b = self._noise_scale_of_the_run(average, rising=plan.batch_size > self.base_batch_size)
        sizes = {"batch_size": plan.batch_size, "base_batch_size": self.base_batch_size}
        self.gain = gain_of(b, **sizes)
        self._scaled.factors = factors_for(self.settings.lr_scaling, noise_scale=b, **sizes)
        if plan == self.plan:
            return None
        self._observe(_NOTHING_MEASURED)  # steps of this batch size, where it is not decided now
        move = Move(self.steps, self.examples, self.wanted, self.plan, plan, self.lr_factor, reason)
        self.plan = plan
        if move.before.batch_size != plan.batch_size:
            self._examples_at_move = self.examples
            self.moves.append(move)
        return move

    def plan_for(self, batch_size: float, device_batch_size: float | None = None) -> Plan:
        """Return the plan nearest to a global batch; micro-batches stay, or are of the best size.

        Args:
            batch_size: Global, in examples.
            device_batch_size: Of every micro-batch. Default: as large as `max_device_batch_size`
                allows, where it is given, else that of now.
        """
        stays = device_batch_size
        if stays is None and self.max_device_batch_size is None:
            stays = self.plan.device_batch_size
        return plan_for(
            batch_size,
            devices=self.plan.devices,
            device_batch_size=stays,
            max_device_batch_size=self.max_device_batch_size,
            examples_per_row=self._examples_per_row,
            bounds=self._bounds,
        )

    @property
    def progress(self) -> Progress:
        """What the policy is told of the run."""
        return Progress(
            self.steps,
            self.examples,
            self.examples - self._examples_at_move,
            self.run.critical_batch_size,
            self._scaled.learning_rate,
            self._peak_learning_rate,
        )

    def settle(self) -> None:
        """Wait until all ranks are known to want the same. All ranks have to call it.

        Raises:
            RuntimeError: If they do not.
        """
        self._agreement.settle()

    def _load_policy(self, state: Any, of_kind: str | None) -> None:
        policy, kind = self.settings.policy, _kind_of(self.settings.policy)
        if of_kind not in (None, kind):
            warnings.warn(
                f"`policy` is {kind}, and the run that goes on had {of_kind}. It begins without"
                " what that one had kept, at the batch size of now. Pass the same policy to go on"
                " as before.",
                stacklevel=3,
            )
        elif hasattr(policy, "load_state_dict"):
            policy.load_state_dict(state)

    def close(self) -> None:
        """Leave the optimizers as they were."""
        self._scaled.close()

    def _noise_scale_of_the_run(self, average: GradientMoments | None, *, rising: bool) -> float:
        """The noise scale that the learning rate goes by: the ratio of the moments' averages.

        That is huge by chance while |G|² is lost in the noise, below the first batch size only to
        the safe side. Above it the critical batch size so far is the most that is believed, or
        before that is known what the noise scale is above; likewise where there is no ratio.
        """
        if average is None:
            return 0.0
        grad_sq_norm, noise_trace = average
        ratio = max(noise_trace, 0.0) / grad_sq_norm if grad_sq_norm > 0 else math.inf
        known = self.run.critical_batch_size or self._low
        return min(ratio, known) if rising or math.isinf(ratio) else ratio

    def _observe(self, noise_scale: NoiseScale) -> None:
        steps = self.steps - self._steps_observed
        self.run.observe(noise_scale, batch_size=self.plan.batch_size, steps=steps)
        self._steps_observed = self.steps

    def _asked_for(self, noise_scale: NoiseScale = _NOTHING_MEASURED) -> Any:
        return self.settings.policy(noise_scale, self.plan, self.progress)

    def _check_agreement(self, wanted: float, *, in_background: bool = False) -> None:
        """At every decision; in the background until the next one; or once for a schedule."""
        if self._schedule_checksum is not None:
            if not self._same_schedule:
                self._check_same_schedule()
            return
        self._agreement.propose(wanted)
        if not in_background:
            self._agreement.settle()

    def _check_same_schedule(self) -> None:
        if self._schedule_checksum is not None:
            check_same_schedule(self._schedule_checksum, self._device)
            self._same_schedule = True

    @property
    def _schedule_checksum(self) -> int | None:
        """Of a schedule by steps, which ranks agree on once; None for any other policy."""
        return getattr(self.settings.policy, "checksum", None)

    def _checked_bounds(self, plan: Plan, min_accumulation: int) -> Bounds:
        most = self.settings.max_batch_size
        # A plan that a saved one is about to replace, on more devices say, may be the larger one.
        starts_with = min(plan.batch_size, self.base_batch_size)
        if most is not None and most < starts_with:
            raise ValueError(
                f"`max_batch_size` must be at least the batch size that the run starts with, got"
                f" {most:g} < {starts_with:g}. Raise it, or start with fewer examples a step."
            )
        bounds = Bounds(self.settings.min_batch_size or 0.0, most or math.inf, min_accumulation)
        keeps = plan.device_batch_size if self.max_device_batch_size is None else None
        plan_for(
            plan.batch_size,
            devices=plan.devices,
            device_batch_size=keeps,
            max_device_batch_size=self.max_device_batch_size,
            examples_per_row=self._examples_per_row,
            bounds=bounds,
        )
        return bounds

    def state_dict(self) -> dict[str, Any]:
        """Return all that goes on from here, in builtins. Alike on all ranks."""
        policy = self.settings.policy
        most = self.max_device_batch_size
        return {
            "plan": [self.plan.device_batch_size, self.plan.accumulation, self.plan.devices],
            "base_batch_size": self.base_batch_size,
            "wanted": self.wanted,
            "steps": self.steps,
            "examples": self.examples,
            "examples_at_move": self._examples_at_move,
            "next_decision": self._next_decision,
            "peak_learning_rate": self._peak_learning_rate,
            "lowered_to": None if most == self.settings.max_device_batch_size else most,
            "gain": self.gain,
            "factors": list(self._scaled.factors),
            "clock": self.clock.state_dict(),
            "run": self.run.state_dict(),
            "steps_observed": self._steps_observed,
            "low": self._low,
            "same_schedule": self._same_schedule,
            "policy": policy.state_dict() if hasattr(policy, "state_dict") else None,
            "policy_kind": _kind_of(policy),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. All ranks have to call it.

        On another number of devices the global batch, the factor on the learning rate and the
        clock stay, and the plan is made anew. Another policy than the saved one begins with what
        the run has come to, and with no state of its own.

        Raises:
            ValueError: If something is missing.
            RuntimeError: If the ranks do not go on with the same schedule.
        """
        needed = [name for name in self.state_dict() if name not in _LATER]
        checked_state("BatchSizeController", state, needed)
        for name, part in (("clock", self.clock), ("run", self.run)):
            checked_state(f"BatchSizeController, `{name}`,", state[name], part.state_dict())
        device_batch_size, accumulation, devices = state["plan"]
        saved = Plan(device_batch_size, accumulation, devices)
        self.base_batch_size = state["base_batch_size"]
        self.wanted = state["wanted"]
        self.steps, self.examples = state["steps"], state["examples"]
        self._examples_at_move = state["examples_at_move"]
        self._next_decision = state["next_decision"]
        self._peak_learning_rate = state["peak_learning_rate"]
        if self.max_device_batch_size is not None and state["lowered_to"] is not None:
            self.max_device_batch_size = min(self.max_device_batch_size, state["lowered_to"])
        self.gain = state["gain"]
        self._scaled.factors = Factors(*state["factors"])
        self.clock.load_state_dict(state["clock"])
        self.run.load_state_dict(state["run"])
        self._steps_observed = state["steps_observed"]
        self._low = state["low"]
        if state["policy"] is not None:
            self._load_policy(state["policy"], state.get("policy_kind"))
        if state["same_schedule"]:  # agreed now, or it would take a decision that is not due
            self._check_same_schedule()
        same = saved.devices == self.plan.devices and (
            self.max_device_batch_size is not None
            or saved.device_batch_size == self.plan.device_batch_size
        )
        self.plan = saved if same else self.plan_for(saved.batch_size)


def _kind_of(policy: Any) -> str:
    """What tells a policy's state from that of another kind."""
    return str(getattr(policy, "__qualname__", type(policy).__qualname__))
