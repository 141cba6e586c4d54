# SPDX-License-Identifier: Apache-2.0
"""The critical batch size of a run up to now."""

from __future__ import annotations

from typing import Any

from noisescale.estimation.noise_scale import NoiseScale


class RunSoFar:
    """Sum up what a run's steps were worth, as they are taken; see `Tradeoff.from_run`.

    A step at batch size B and noise scale b makes 1/(1 + b/B) of the progress of a noise-free
    one. Summed over the run, S_min = Σ 1/(1 + b/B) and E_min = Σ b/(1 + b/B). Where the noise scale
    is not resolved b is what was known last, or what it is above if that is more; the steps before
    it is resolved for the first time take that value. So it is where averages of few steps show no
    noise at all.

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
        return self.min_examples / self.min_steps if self.min_steps else None

    def observe(self, noise_scale: NoiseScale, *, batch_size: float, steps: float) -> None:
        """Take in some steps at one batch size, and the noise scale at their end."""
        self._unknown[batch_size] = self._unknown.get(batch_size, 0.0) + steps
        known = noise_scale.resolved and noise_scale.value > 0
        if known:
            self._last = noise_scale.value
        b = noise_scale.value if known else max(self._last, noise_scale.low)
        if not self._last:
            return
        for size, count in self._unknown.items():
            noise_free = count / (1 + b / size)
            self.min_steps += noise_free
            self.min_examples += b * noise_free
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
