# SPDX-License-Identifier: Apache-2.0
"""What was measured of a trial: a metric along its steps, examples, epochs and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from noisescale.refusal import Refusal

Array = NDArray[np.float64]

CLOCKS = ("steps", "examples", "epochs", "seconds")
"""What a trial's progress is counted in; the units of budgets."""


@dataclass(frozen=True, eq=False, init=False)
class Measurements:
    """The evaluations of one trial, in the order of their steps.

    They may be given in any order. Of several with one step the last one counts, as after a
    training that was resumed.

    Args:
        steps: The optimizer step of each evaluation, shape (n,).
        values: The metric at each, shape (n,). NaN and infinities never reach a goal.
        examples: Examples processed until each, shape (n,), if known.
        epochs: Epochs until each, shape (n,), if known.
        seconds: Time until each, without the evaluations themselves, shape (n,), if known.

    Raises:
        ValueError: If the shapes differ, a step is negative or not finite, or a clock is infinite
            or runs back.

    Examples:
        >>> Measurements([200, 100], [0.3, 0.5]).values
        array([0.5, 0.3])
    """

    steps: Array
    values: Array
    examples: Array | None = None
    epochs: Array | None = None
    seconds: Array | None = None

    def __init__(
        self,
        steps: ArrayLike,
        values: ArrayLike,
        examples: ArrayLike | None = None,
        epochs: ArrayLike | None = None,
        seconds: ArrayLike | None = None,
    ) -> None:
        columns = {"steps": steps, "values": values}
        clocks = {"examples": examples, "epochs": epochs, "seconds": seconds}
        columns |= {name: given for name, given in clocks.items() if given is not None}
        arrays = {name: np.asarray(given, np.float64) for name, given in columns.items()}
        at = arrays["steps"]
        for name, array in arrays.items():
            if array.ndim != 1 or array.shape != at.shape:
                raise Refusal(
                    name,
                    "have one number for each step",
                    f"shape {array.shape} beside {at.shape} of `steps`",
                    "Give one number for each evaluation.",
                )
        wrong = ~((at >= 0) & (at < math.inf))
        if wrong.any():
            raise Refusal(
                "steps",
                "be finite and not negative",
                at[np.argmax(wrong)],
                "Leave this evaluation out.",
            )
        order = np.argsort(at, kind="stable")
        last = np.append(at[order][1:] > at[order][:-1], True)[: len(at)]
        for name, array in arrays.items():
            object.__setattr__(self, name, array[order][last])
        for name in clocks.keys() & arrays.keys():
            _check_clock(name, getattr(self, name))

    def __len__(self) -> int:
        return len(self.steps)

    def clock(self, name: str) -> Array | None:
        """Return one of `CLOCKS` at each evaluation; None if it is not known."""
        found: Array | None = getattr(self, name)
        return found


def _check_clock(name: str, clock: Array) -> None:
    known = clock[~np.isnan(clock)]
    if np.isinf(known).any():
        raise Refusal(
            name,
            "be finite",
            np.array2string(known, threshold=6),
            "Give NaN where it is not known.",
        )
    if (known < 0).any() or (np.diff(known) < 0).any():
        raise Refusal(
            name,
            "not be negative and must rise with the steps",
            np.array2string(known, threshold=6),
            "Give what had passed until each evaluation, not since the one before.",
        )


@dataclass(frozen=True, eq=False)
class Trial:
    """One training, and where it belongs."""

    name: str
    """Unique among the trials that are compared, for example the path of its log."""
    measurements: Measurements
    submission: str = ""
    """What is compared: an optimizer, a schedule, a batch size rule."""
    workload: str = ""
    """Model and data: goals and times of different workloads do not compare."""
    study: str = ""
    """Repetitions of a whole search, for example with other seeds."""
    batch_size: float = math.nan
    """Global, in examples."""
    learning_rate: float = math.nan
    """The peak of the schedule."""
    hyperparameters: Mapping[str, float | str] = field(default_factory=lambda: MappingProxyType({}))
    """The others: numbers and words."""
    doubtful_clocks: frozenset[str] = frozenset()
    """Clocks that a logger kept in its own way: steps that are calls of it, seconds of its log."""
    feasible: bool = True
    """False if its own study says that it failed."""
    optimizer: str = ""
    """The name of its optimizer, if known. Trials with other optimizers are no repetitions."""
    unmeasured: str = ""
    """Why its noise scale was not measured, or is withheld; "" if there is no such reason."""
    fault: str = ""
    """Why the trial cannot count: what is wrong with its files; "" if nothing is."""

    @property
    def diverged(self) -> bool:
        """Whether the last evaluation is not a number, or the study says that it failed."""
        values = self.measurements.values
        return not self.feasible or (len(values) > 0 and not math.isfinite(values[-1]))
