# SPDX-License-Identifier: Apache-2.0
"""Steps against examples: what a training run costs at another batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Tradeoff:
    """The steps and the examples that reach one and the same result at every batch size.

    A step of batch size B makes 1/(1 + B_crit/B) of the progress of a noise-free step. Hence

        steps(B)    = S_min·(1 + B_crit/B)
        examples(B) = E_min·(1 + B/B_crit)        B_crit = E_min/S_min

    At B_crit a run takes twice the fewest possible steps and twice the fewest possible
    examples: below it more devices buy time almost freely, above it they buy little.

    Args:
        min_steps: S_min, the optimizer steps needed at an infinite batch size.
        min_examples: E_min, the examples needed at a vanishing batch size.

    Raises:
        ValueError: If either is not a positive finite number.

    Example:
        >>> tradeoff = Tradeoff(min_steps=1000, min_examples=20_000)
        >>> tradeoff.critical_batch_size
        20.0
        >>> tradeoff.steps(20), tradeoff.examples(20)
        (2000.0, 40000)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, section 2.3 and appendix D.
    """

    min_steps: float
    min_examples: float

    def __post_init__(self) -> None:
        for name, value in (("min_steps", self.min_steps), ("min_examples", self.min_examples)):
            if not 0 < value < math.inf:
                raise ValueError(
                    f"`{name}` must be positive and finite, got {value!r}."
                    " Take it from `Tradeoff.from_run` or from a fit."
                )

    @property
    def critical_batch_size(self) -> float:
        """B_crit = E_min/S_min, in examples: here steps and examples are twice their least."""
        return self.min_examples / self.min_steps

    def steps(self, batch_size: float) -> float:
        """Return the optimizer steps needed at a global batch of `batch_size` examples."""
        return self.min_steps + self.min_examples / _positive("batch_size", batch_size)

    def examples(self, batch_size: float) -> float:
        """Return the examples processed at a global batch of `batch_size` examples."""
        return self.min_examples + self.min_steps * _positive("batch_size", batch_size)

    @classmethod
    def from_run(cls, noise_scale: Floats, batch_size: Floats, steps: Floats) -> Tradeoff:
        """Turn the noise scale along one run into the trade-off at every other batch size.

        A step at batch size B and noise scale b makes 1/(1 + b/B) of the progress of a
        noise-free step and needs 1 + b/B' as many steps at another batch size B'. Summed
        over the run,

            S(B') = Σ (1 + b/B')/(1 + b/B) = S_min + E_min/B'
            S_min = Σ 1/(1 + b/B)          E_min = Σ b/(1 + b/B)

        Args:
            noise_scale: b of each stretch of the run, in examples. NaN marks a stretch where
                it was not measured (the first steps, say): it takes the next measured value,
                at the end of the run the last one.
            batch_size: B of each stretch, global, in examples.
            steps: Optimizer steps in each stretch.

        Returns:
            The trade-off for reaching what the run reached. It takes B_crit = B_simple, the
            uncalibrated theory, which was derived for SGD.

        Raises:
            ValueError: If the lengths differ, nothing was measured, or a value is negative
                (zero, for batch sizes and steps) or infinite.

        Example:
            >>> run = Tradeoff.from_run([10.0, 30.0], batch_size=[30, 30], steps=[40, 60])
            >>> run.min_steps, run.min_examples, run.critical_batch_size
            (60.0, 1200.0, 20.0)

        References:
            McCandlish et al. 2018, arXiv:1812.06162, appendix D.
        """
        b, batch, count = (
            np.asarray(x, dtype=np.float64) for x in (noise_scale, batch_size, steps)
        )
        if not b.shape == batch.shape == count.shape or b.ndim != 1:
            raise ValueError(
                "`noise_scale`, `batch_size` and `steps` must be one-dimensional and equally"
                f" long, got shapes {b.shape}, {batch.shape} and {count.shape}."
                " Give one value for each stretch of the run."
            )
        measured = np.flatnonzero(~np.isnan(b))
        if not measured.size:
            raise ValueError(
                f"`noise_scale` must have a measured value, got {b.size} without one."
                " Train longer, or at a larger batch size, until the monitor resolves it."
            )
        following = np.searchsorted(measured, np.arange(b.size)).clip(max=measured.size - 1)
        b = b[measured[following]]
        for name, values, least in (
            ("noise_scale", b, 0.0),
            ("batch_size", batch, np.nextafter(0, 1)),
            ("steps", count, np.nextafter(0, 1)),
        ):
            valid = (values >= least) & (values < math.inf)
            if not valid.all():
                where = int(np.argmin(valid))
                sign = "positive" if least else "not negative"
                raise ValueError(
                    f"`{name}` must be finite and {sign}, got {values[where]} at position {where}."
                    " Leave that stretch out."
                )
        noise_free_steps = count / (1 + b / batch)
        return cls(float(noise_free_steps.sum()), float((b * noise_free_steps).sum()))


def _positive(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(
            f"`{name}` must be positive and finite, got {value!r}. Give a number of examples."
        )
    return value
