# SPDX-License-Identifier: Apache-2.0
"""The critical batch size of a run up to now."""

from __future__ import annotations

from typing import Any, NamedTuple

from noisescale.estimation.noise_scale import NoiseScale
from noisescale.tradeoff.run_sums import worth


class RunSoFar(NamedTuple):
    """Sum up what the steps of a run are worth while it goes on; see `Parts`.

    While the noise scale is not resolved, the last resolved value is used, or its current lower
    bound if that is larger. The steps before the first resolved value use that value. The same
    holds if averages of few steps show no noise at all. In a finished run the next value is used
    instead (`next_measured`), which is not known yet here.

    Examples:
        >>> b = NoiseScale(20.0, 15.0, 30.0, grad_sq_norm=1.0, noise_trace=20.0, steps=9)
        >>> run = RunSoFar().after(b, batch_size=20, steps=10)
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

    def after(self, noise_scale: NoiseScale, *, batch_size: float, steps: float) -> RunSoFar:
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

    def state_dict(self) -> dict[str, Any]:
        """Return what `loaded` needs, in builtins."""
        return self._asdict() | {"unknown": [list(item) for item in self.unknown]}

    @classmethod
    def loaded(cls, state: dict[str, Any]) -> RunSoFar:
        """Return the record of a `state_dict`."""
        made = cls(*(state[name] for name in cls._fields))
        return made._replace(unknown=tuple((size, count) for size, count in made.unknown))
