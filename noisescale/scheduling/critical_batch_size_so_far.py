# SPDX-License-Identifier: Apache-2.0
"""The critical batch size of a run up to now."""

from __future__ import annotations

from typing import Any

import numpy as np

from noisescale.estimation.noise_scale import NoiseScale
from noisescale.tradeoff.run_sums import Parts, Sums


class RunSoFar:
    """Sum up what a run's steps were worth, as they are taken; see `Parts`.

    Where the noise scale is not resolved it is taken to be what was known last, or what it is above
    if that is more; the steps before it is resolved for the first time take that value. So it is
    where averages of few steps show no noise at all. A finished run has the value that follows,
    see `next_measured`, which is not known yet here.

    Example:
        >>> run = RunSoFar()
        >>> b = NoiseScale(20.0, 15.0, 30.0, grad_sq_norm=1.0, noise_trace=20.0, steps=9)
        >>> run.observe(b, batch_size=20, steps=10)
        >>> run.min_steps, run.critical_batch_size
        (5.0, 20.0)
    """

    def __init__(self) -> None:
        self.min_steps = 0.0
        """S_min of what the run has reached, in steps."""
        self.min_examples = 0.0
        """E_min of what the run has reached, in examples."""
        self._last = 0.0  # noise scale when it was resolved last; 0 before
        self._unknown: dict[float, float] = {}  # steps by batch size

    @property
    def critical_batch_size(self) -> float | None:
        """E_min/S_min: a mean of the noise scale over the run's progress; None if not known."""
        sums = Sums(self.min_steps, self.min_examples)
        return sums.critical_batch_size if self.min_steps else None

    def observe(self, noise_scale: NoiseScale, *, batch_size: float, steps: float) -> None:
        """Take in some steps at one batch size, and the noise scale at their end."""
        self._unknown[batch_size] = self._unknown.get(batch_size, 0.0) + steps
        known = noise_scale.resolved and noise_scale.value > 0
        if known:
            self._last = noise_scale.value
        b = noise_scale.value if known else max(self._last, noise_scale.low)
        if not self._last:
            return
        sizes, counts = np.array(list(self._unknown.items()), dtype=np.float64).T
        sums = Parts.at_noise_scale(b, sizes, counts).sums
        self.min_steps += sums.min_steps
        self.min_examples += sums.min_examples
        self._unknown = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs, in builtins."""
        return {
            "min_steps": self.min_steps,
            "min_examples": self.min_examples,
            "last": self._last,
            "unknown": [list(item) for item in self._unknown.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.min_steps, self.min_examples = state["min_steps"], state["min_examples"]
        self._last = state["last"]
        self._unknown = dict(state["unknown"])
