# SPDX-License-Identifier: Apache-2.0
"""Steps against examples: the cost of a training run at other batch sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from noisescale.checks import require_positive
from noisescale.refusal import Refusal
from noisescale.tradeoff.run_sums import Parts, fill_gaps

Floats = Sequence[float] | NDArray[np.float64]
Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True)
class Tradeoff:
    """The steps and the examples that a run needs for one result, at every batch size.

    A step of batch size B makes 1/(1 + B_crit/B) of the progress of a noise-free step. Hence

        steps(B)    = S_min·(1 + B_crit/B)
        examples(B) = E_min·(1 + B/B_crit)        B_crit = E_min/S_min

    At B_crit a run takes twice the fewest possible steps and twice the fewest possible
    examples: below it more devices buy time almost freely, above it they buy little.
    Trainings bend a little more gently or more sharply around B_crit, with an exponent α:

        steps(B)    = S_min·(1 + (B_crit/B)^α)^(1/α)

    Eliminating B gives the Pareto front ((steps/S_min)^α - 1)·((examples/E_min)^α - 1) = 1. Moving
    along it, one step saved costs r = B_crit·(B/B_crit)^(1 + α) examples, the exchange rate at B.

    "Critical" has two definitions, which differ severalfold. `critical_batch_size` is McCandlish's,
    `overhead_batch_size` is Zhang's. Always say which one you mean.

    Args:
        min_steps: S_min, the optimizer steps needed at an infinite batch size.
        min_examples: E_min, the examples needed at a vanishing batch size.
        gamma: (Σ √b/(1 + b/B))²/(S_min·E_min) along a run. Where the batch size follows the noise
            scale b, it stands for the 1 of the front: less than 1 is saved steps and examples.
        sharpness: α. The theory of the gradient noise has 1, and a fit to a sweep its own.

    Raises:
        ValueError: If a value is not positive and finite, or `gamma` is not within 0 to 1.

    Examples:
        >>> tradeoff = Tradeoff(min_steps=1000, min_examples=20_000)
        >>> tradeoff.critical_batch_size
        20.0
        >>> tradeoff.steps(20), tradeoff.examples(20)
        (2000.0, 40000.0)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, section 2.3 and appendix D.
    """

    min_steps: float
    min_examples: float
    gamma: float = 1.0
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("min_steps", "min_examples", "sharpness"):
            remedy = "Take it from `Tradeoff.from_run` or from `fit_tradeoff`."
            require_positive(name, getattr(self, name), remedy)
        if not 0 < self.gamma <= 1:
            raise Refusal(
                "gamma",
                "lie between 0 and 1",
                repr(self.gamma),
                "Leave it at 1 for a constant noise scale, or take it from `Tradeoff.from_run`.",
            )

    @property
    def critical_batch_size(self) -> float:
        """B_crit = E_min/S_min, in examples, the definition of McCandlish et al. 2018.

        There a run takes 2^(1/α) times the fewest steps, and 2^(1/α) times the fewest examples.
        """
        return self.min_examples / self.min_steps

    def overhead_batch_size(self, overhead: float, optimal_batch_size: float) -> float:
        """Return the batch size that costs `overhead` more examples than perfect scaling.

        This is the definition of Zhang et al. 2024, who use 0.2 and 256 sequences. With perfect
        scaling a run needs the examples of B_opt at every batch size. The equation
        B·steps(B) = (1 + overhead)·examples(B_opt) has, at α = 1, the solution

            B = (1 + overhead)·B_opt + overhead·B_crit

        Args:
            overhead: Relative, 0.2 for 20 %.
            optimal_batch_size: B_opt, where scaling is taken to start, in examples.

        Examples:
            >>> round(Tradeoff(1000, 20_000_000).overhead_batch_size(0.2, 256), 1)
            4307.2

        References:
            Zhang et al. 2024, arXiv:2410.21676.
        """
        start = _positive("optimal_batch_size", optimal_batch_size)
        extra = _positive("overhead", overhead, "a share, such as 0.2 for 20 %")
        critical, alpha = self.critical_batch_size, self.sharpness
        most = (1 + extra) ** alpha
        return float((start**alpha * most + critical**alpha * (most - 1)) ** (1 / alpha))

    def steps(self, batch_size: Amount) -> Amount:
        """Return the optimizer steps needed at a global batch of `batch_size` examples."""
        return self._bent(self.min_steps, self.min_examples / _positive("batch_size", batch_size))

    def examples(self, batch_size: Amount) -> Amount:
        """Return the examples processed at a global batch of `batch_size` examples."""
        return self._bent(self.min_examples, self.min_steps * _positive("batch_size", batch_size))

    def _bent(self, one: float, other: Amount) -> Amount:
        alpha = self.sharpness
        amount: Amount = (one**alpha + other**alpha) ** (1 / alpha)
        return amount

    def exchange_rate(self, batch_size: float) -> float:
        """Return r = B_crit·(B/B_crit)^(1 + α): at B, saving one step costs r examples."""
        critical = self.critical_batch_size
        ratio = _positive("batch_size", batch_size) / critical
        return float(critical * ratio ** (1 + self.sharpness))

    @classmethod
    def from_run(cls, noise_scale: Floats, batch_size: Floats, steps: Floats) -> Tradeoff:
        """Turn the noise scale along one run into the trade-off at every other batch size.

        A step at batch size B and noise scale b makes 1/(1 + b/B) of the progress of a
        noise-free step and needs 1 + b/B' as many steps at another batch size B'. Summed
        over the run,

            S(B') = Σ (1 + b/B')/(1 + b/B) = S_min + E_min/B'
            S_min = Σ 1/(1 + b/B)          E_min = Σ b/(1 + b/B)

        Args:
            noise_scale: b of each segment of the run, in examples. NaN marks a segment where it was
                not measured, such as the first steps. The next measured value is used for it, and
                the last one at the end of the run.
            batch_size: B of each segment, global, in examples.
            steps: Optimizer steps in each segment.

        Returns:
            The trade-off for the result that the run reached. It assumes B_crit = B_simple, the
            uncalibrated theory, which was derived for SGD.

        Raises:
            ValueError: If the lengths differ, nothing was measured, or a value is negative
                (zero, for batch sizes and steps) or infinite.

        Examples:
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
            raise Refusal(
                ("noise_scale", "batch_size", "steps"),
                "be one-dimensional and equally long",
                f"shapes {b.shape}, {batch.shape} and {count.shape}",
                "Give one value for each segment of the run.",
            )
        measured = ~np.isnan(b)
        if not measured.any():
            raise Refusal(
                "noise_scale",
                "have a measured value",
                f"{b.size} without one",
                "Train longer, or at a larger batch size, until the monitor resolves it.",
            )
        b = fill_gaps(b, measured)
        for name, values, least in (
            ("noise_scale", b, 0.0),
            ("batch_size", batch, np.nextafter(0, 1)),
            ("steps", count, np.nextafter(0, 1)),
        ):
            valid = (values >= least) & (values < math.inf)
            if not valid.all():
                where = int(np.argmin(valid))
                sign = "positive" if least else "not negative"
                raise Refusal(
                    name,
                    f"be finite and {sign}",
                    f"{values[where]} at position {where}",
                    "Leave that segment out.",
                )
        run = Parts.at_noise_scale(b, batch, count)
        return cls(run.sums.min_steps, run.sums.min_examples, run.gamma)


def _positive(name: str, value: Amount, what: str = "a number of examples") -> Amount:
    values = np.asarray(value, dtype=np.float64)
    valid = (values > 0) & (values < math.inf)
    if not valid.all():
        wrong = value if not values.ndim else float(values[~valid][0])
        raise Refusal(name, "be positive and finite", repr(wrong), f"Give {what}.")
    return value
