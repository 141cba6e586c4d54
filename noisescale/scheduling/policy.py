# SPDX-License-Identifier: Apache-2.0
"""Policy: it chooses the wanted batch size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from noisescale.estimation.noise_scale import NoiseScale
from noisescale.meter.extra import ExtraMeasurement
from noisescale.plan import Plan
from noisescale.state import State


class Progress(NamedTuple):
    """How far a run is."""

    steps: int
    """Optimizer steps taken."""
    examples: float
    """Examples of all devices in the steps taken."""
    examples_since_move: float = math.inf
    """Examples of all devices since the last change of the batch size."""
    critical_batch_size: float | None = None
    """The critical batch size of the run so far, see `RunSoFar`; None before it is known."""
    learning_rate: float = 1.0
    """The learning rate of the run's own schedule, without the factor of `lr_scaling`.

    It is the mean of the parameter groups that there were when the run began.
    """
    peak_learning_rate: float = 1.0
    """The largest learning rate of the run's own schedule so far."""
    base_batch_size: float = 1.0
    """The batch size that the learning rate was chosen for."""
    share: float | None = None
    """The share of the run that is over, from 0 to 1; None if its end is not known."""
    ends_by: Literal["examples", "steps"] | None = None
    """What ends the run first, as it goes now: a number of examples, or of epochs, or a number of
    optimizer steps; None if its end is not known."""
    examples_of_run: float | None = None
    """The examples of the whole run; None if they are not known, as optimizer steps end it."""
    most_steps: float = math.inf
    """The optimizer steps that the run is limited to."""
    loss_slope: float = math.nan
    """-d ln L/d ln E of the training loss so far, see `TrainingLoss`; NaN if it is not known."""
    first_batch_size: float | None = None
    """The batch size that the run began with, or its policy, in batches as they come now."""
    extra: Mapping[str, NoiseScale] = MappingProxyType({})
    """`NoiseScaleMeter.extra_noise_scales`, for policies that need one."""


class Wanted(float):
    """A wanted batch size with its reason.

    Examples:
        >>> wanted = Wanted(64, "because")
        >>> wanted == 64, wanted.reason
        (True, 'because')
    """

    reason: str
    next_state: Mapping[str, Any] | None
    """The policy's state once it has this batch size; None: its state stays."""

    def __new__(
        cls, batch_size: float, reason: str, next_state: Mapping[str, Any] | None = None
    ) -> Wanted:
        """Attach the reason, and the state that follows."""
        made = super().__new__(cls, batch_size)
        made.reason, made.next_state = reason, next_state
        return made


class Policy(State):
    """Choose the global batch size, in examples, from now on.

    Examples:
        >>> class Twice(Policy):
        ...     def __call__(self, noise_scale, plan, progress):
        ...         return 128.0 if progress.steps >= 1000 else 64.0
        >>> Twice()(None, Plan(64, 1), Progress(steps=1000, examples=64_000.0))
        128.0
    """

    needs_noise_scale: bool = False
    """Whether the policy is asked every few steps, with a measured noise scale.

    Otherwise the policy is asked at every step.
    """
    at_every_step: bool = False
    """Whether a policy whose answer is the same on all ranks is asked at every step on each.

    Ranks then meet only where the answer changes. It must be `by_reduced_values`, and needs no
    noise scale.
    """
    extra: type[ExtraMeasurement] | None = None
    """What the meter has to measure beside the noise scale; `Progress.extra` has it by name."""
    takes_noise_scale: bool = False
    """Whether the policy gets the noise scale, resolved or not, even if it does not need one."""
    follows_schedule: bool = False
    """Whether the batch grows where the run's own schedule lowers the learning rate."""
    needs_a_cap: bool = True
    """Whether the batch size may grow further than the user can see, so that there is a default
    for the largest one."""
    by_reduced_values: bool = False
    """Whether all ranks always want the same, as the policy's inputs are reduced over ranks.

    Ranks then wait for each other only when the plan changes.
    """
    far_below_critical: bool = False
    """Whether, in a run of a known end, it grows no batch to where a step is worth less than its
    examples. Rules by the noise scale then take it for infinite above the first batch size."""
    checksum: int | None = None
    """Checksum of a schedule by steps, of at most 32 bits. Ranks compare it once instead of
    comparing batch sizes at every step. None for any other policy."""

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> float:
        """Return a number of examples; `float(plan.batch_size)` to stay.

        It may be asked several times at a step, so it changes nothing. A state that follows goes
        into `Wanted`.
        """
        raise NotImplementedError

    @property
    def needs_loss(self) -> bool:
        """Whether the policy still needs the slope of the training loss, `Progress.loss_slope`."""
        return False

    @property
    def done(self) -> bool:
        """Whether the batch size stays from now on, so that no more steps need to be measured."""
        return False

    logged: tuple[str, ...] = ()
    """The keys that `metrics` may have."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """What it goes by, for loggers: keys are logged as `batch_size/...`."""
        return {}

    def note(self, plan: Plan, progress: Progress) -> str | None:
        """Say at the start of a run what the user should know of it."""
        return None

    def due(self, share: float | None) -> bool | None:
        """Return whether to ask now, at a share of the run; None: as the flags say.

        It is asked at every step, and on all ranks alike.
        """
        return None

    def take(self, wanted: float) -> None:
        """Go on from an answer that the run goes by from now on."""
        if isinstance(wanted, Wanted) and wanted.next_state is not None:
            self.load_state_dict(wanted.next_state)

    @property
    def kind(self) -> str:
        """Name of this kind of policy, saved with its state."""
        return type(self).__qualname__

    def go_on_from(self, state: dict[str, Any], of_kind: str) -> None:
        """Load a state; if another kind of policy saved it, warn and ignore it."""
        if of_kind == self.kind:
            self.load_state_dict(state)
            return
        warnings.warn(
            f"`policy` is {self.kind}, and the saved run had {of_kind}. The new policy starts at"
            " the current batch size, without the state of the old one. Pass the same policy to"
            " continue as before.",
            stacklevel=3,
        )


class FunctionPolicy(Policy):
    """A user's function, or any other callable, as a policy.

    If its attribute `needs_noise_scale` is True, it is asked every few steps with a measured noise
    scale. Without the attribute it is asked at every step and given what is known of the noise
    scale, and if the attribute is False, nothing. What is in its attribute `extra` is measured too,
    see `Policy`. It may have a state of its own.
    """

    def __init__(self, function: Callable[[NoiseScale, Plan, Progress], float]) -> None:
        self.function: Any = function
        self.extra = getattr(function, "extra", None)
        beside = self.extra is not None
        self.needs_noise_scale = beside or bool(getattr(function, "needs_noise_scale", False))
        self.takes_noise_scale = beside or bool(getattr(function, "needs_noise_scale", True))

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Any:
        """Return what the function returns."""
        return self.function(noise_scale, plan, progress)

    def take(self, wanted: float) -> None:
        """Do nothing: a function may answer with what another policy has returned."""

    @property
    def kind(self) -> str:
        """The function's name, or its class's."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def state_dict(self) -> Any:
        """Return the state of the function, if it has one."""
        return self.function.state_dict() if hasattr(self.function, "state_dict") else {}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`."""
        if hasattr(self.function, "load_state_dict"):
            self.function.load_state_dict(state)
