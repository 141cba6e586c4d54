# SPDX-License-Identifier: Apache-2.0
"""Policy: what is asked for the batch size that is wanted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from noisescale.estimation.noise_scale import NoiseScale
from noisescale.plan import Plan


class Progress(NamedTuple):
    """How far a run is."""

    steps: int
    """Optimizer steps taken."""
    examples: float
    """Examples of all devices in them."""
    examples_since_move: float = math.inf
    """Likewise since the batch size changed last."""
    critical_batch_size: float | None = None
    """That of the run so far, see `RunSoFar`; None before it is known."""
    learning_rate: float = 1.0
    """What the run's own schedule gives now, without our factor."""
    peak_learning_rate: float = 1.0
    """The largest it has given so far."""


class Wanted(float):
    """A wanted batch size with its reason.

    Example:
        >>> wanted = Wanted(64, "because")
        >>> wanted == 64, wanted.reason
        (True, 'because')
    """

    reason: str

    def __new__(cls, batch_size: float, reason: str) -> Wanted:
        """Attach the reason."""
        made = super().__new__(cls, batch_size)
        made.reason = reason
        return made


class Policy:
    """Say which global batch size, in examples, is wanted from now on.

    Example:
        >>> class Twice(Policy):
        ...     def __call__(self, noise_scale, plan, progress):
        ...         return 128.0 if progress.steps >= 1000 else 64.0
        >>> Twice()(None, Plan(64, 1), Progress(steps=1000, examples=64_000.0))
        128.0
    """

    needs_noise_scale: bool = False
    """Whether it is asked every few steps, with a noise scale that has been measured. Else it is
    asked at every step."""
    takes_noise_scale: bool = False
    """Whether it is given what is known of the noise scale, which may be nothing, where it does not
    need it."""
    by_reduced_values: bool = False
    """Whether all ranks are known to want the same, as it goes by values that are reduced over
    them: while the plan stays nobody waits for the others."""
    checksum: int | None = None
    """Of a schedule by steps, of at most 32 bits: it is kept to the step, and ranks agree on it
    once, rather than at every step. None for any other policy."""

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> float:
        """Return a number of examples; `float(plan.batch_size)` to stay."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """What tells its state from that of another kind."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any] | None:
        """Return what `load_state_dict` needs, in builtins; None where it keeps nothing."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""

    def go_on_from(self, state: dict[str, Any], of_kind: str | None) -> None:
        """Load a state, unless it is known to be that of another kind, which is warned of."""
        if of_kind in (None, self.kind):
            self.load_state_dict(state)
            return
        warnings.warn(
            f"`policy` is {self.kind}, and the run that goes on had {of_kind}. It begins without"
            " what that one had kept, at the batch size of now. Pass the same policy to go on"
            " as before.",
            stacklevel=3,
        )


class FunctionPolicy(Policy):
    """A function of a user's own, or anything else that can be called, as a policy.

    With an attribute `needs_noise_scale` that is true it is asked as one that needs it, with none
    it is given what is known, and where it is False, nothing. It may have a state of its own.
    """

    def __init__(self, function: Callable[[NoiseScale, Plan, Progress], float]) -> None:
        self.function: Any = function
        self.needs_noise_scale = bool(getattr(function, "needs_noise_scale", False))
        self.takes_noise_scale = bool(getattr(function, "needs_noise_scale", True))

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Any:
        """Return what the function does, whatever it is."""
        return self.function(noise_scale, plan, progress)

    @property
    def kind(self) -> str:
        """The function's name, or its class's."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def state_dict(self) -> dict[str, Any] | None:
        """Return that of the function, if it has one."""
        state: dict[str, Any] | None = None
        if hasattr(self.function, "state_dict"):
            state = self.function.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        if hasattr(self.function, "load_state_dict"):
            self.function.load_state_dict(state)
