# SPDX-License-Identifier: Apache-2.0
"""The noise along the gradient, as far as the optimizer's momentum points there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from torch.nn import Parameter
from torch.optim import Optimizer

from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.recent import RecentSteps
from noisescale.meter.extra import ExtraMeasurement
from noisescale.meter.options import MeterOptions
from noisescale.methods.inner_product.momentum import MomentumDirection

LEAST_SHARE = 0.5
"""A share of the alignment that momentum would have if only its own noise turned it."""

LEAST_ALIGNMENT = 0.25
"""Even noise that is alike in all directions reads too large by the inverse of the alignment."""

BEYOND = 5.0
"""The noise along G over that along m was 1.1 to 4.3 where the alignment was enough, on four models
of others (benchmarks/scheduling/along_gradient.py), and down to a third with isotropic noise."""


class NoiseAlongGradient(ExtraMeasurement):
    """Measure G'ΣG/|G|⁴ from gradients along v = m/|m|, the direction of the optimizer's momentum.

    At this batch size the noise along the gradient is as large as the gradient. g·v behaves like a
    gradient of one parameter, so its moments are (G·v)² and v'Σv. Their ratio is G'ΣG/|G|⁴ where v
    points along G, and elsewhere it is not: momentum that swings across a valley has next to no
    part along the gradient, and the ratio can be a hundred times too large. The alignment
    (G·v)²/|G|² tells. If all gradients before had the mean G, with the noise of batches of B
    examples, it would be

        a = 1/(1 + c·b/B),  c = (1 - β)/(1 + β),  b = tr(Σ)/|G|²

    Where it is below half of that, or below a quarter, nothing is known of the noise along the
    gradient.

    What is left is not exact. The noise of the momentum adds c·tr(Σ²)/(B·|G|⁴), which counts where
    the noise along the gradient is far below the noise across it. A momentum that points somewhat
    beside G, with an alignment of a half say, may see a third of the noise. So the interval is that
    of the noise along v, and `BEYOND` times as far on both sides.

    A measured step reads gradients and momentum once more for each part, and once for itself. It
    needs whole, dense gradients of one optimizer.

        meter = NoiseScaleMeter(model, extra=[NoiseAlongGradient], optimizer=optimizer)
    """

    name = "along_gradient"
    _saved = ("_level", "_batch_size", "_along", "_alignment")

    def __init__(self, options: MeterOptions, optimizer: Optimizer | None) -> None:
        super().__init__(options, optimizer)
        self._confidence, self._unit = options.confidence, options.unit
        self._along = RecentSteps("auto", self._confidence, self._unit)
        self._alignment = RecentSteps("auto", self._confidence, self._unit)
        self._level = Level()
        self._batch_size = 0.0
        self._entry: MomentumDirection | None = None
        self._persistence = 0.0

    def entry(self, parameters: Sequence[Parameter]) -> MomentumDirection:
        """Return the entry; a ValueError if the optimizer keeps no momentum of all parameters."""
        self._entry = MomentumDirection(self.optimizer, parameters)
        return self._entry

    def update(
        self, moments: GradientMoments, whole: GradientMoments, weight: float, step: int
    ) -> None:
        """Add one step, if there was momentum in it. The first step only sets the level."""
        if not all(map(isfinite, moments)):
            return
        level = self._level.divisor(whole, weight)
        _, self._level = self._level.step(whole, weight)
        self._batch_size = weight
        if level is None:
            return
        signal = moments.grad_sq_norm / level
        along = GradientMoments(signal, moments.noise_trace / level)
        self._along.add_relative(along, weight, step)
        of_all = GradientMoments(whole.grad_sq_norm / level, noise_trace=signal)
        self._alignment.add_relative(of_all, weight, step)

    def alignment(self, least: float = 0.0, step: int | None = None) -> NoiseScale:
        """Return the alignment (G·v)²/|G|² of the last steps, between 0 and 1 but for chance.

        Args:
            least: Steps to use at least: as many as resolve |G|².
            step: Optimizer steps of the run up to now.
        """
        return self._alignment.estimate(step, least=least)

    def estimate(self, noise_scale_at: Callable[[float], NoiseScale], step: int) -> NoiseScale:
        """Return the noise along the gradient now; unknown where momentum points elsewhere."""
        whole, along = noise_scale_at(self._confidence), self._along.estimate(step)
        found, b = (
            x.value if x.resolved else x.low for x in (self.alignment(whole.steps, step), whole)
        )
        noise = (1 - self.persistence) / (1 + self.persistence) * max(b, 0.0)
        expected = 1 / (1 + noise / max(self._batch_size, 1e-9))
        if found >= max(LEAST_SHARE * expected, LEAST_ALIGNMENT):
            return replace(along, low=along.low / BEYOND, high=along.high * BEYOND)
        return NoiseScale.unknown(self._confidence, self._unit, steps=along.steps)

    @property
    def persistence(self) -> float:
        """The largest β of the momentum in its last step."""
        if self._entry is not None:
            self._persistence = self._entry.persistence
        return self._persistence

    def close(self) -> None:
        """Let go of the optimizer."""
        self._persistence, self._entry = self.persistence, None
        super().close()
