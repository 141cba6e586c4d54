# SPDX-License-Identifier: Apache-2.0
"""A run in segments. Each segment has the noise scale of its own part of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noisescale.bounded import Bounded
from noisescale.history.blocks import Blocks, quantile_of
from noisescale.history.optimizers import has_decayed
from noisescale.history.rows import Rows
from noisescale.refusal import Refusal
from noisescale.tradeoff.run_sums import fill_gaps

Array = NDArray[np.float64]

ALIKE, MOSTLY = 0.1, 0.9
"""A run has one batch size if it is within this share of the median in most rows."""


@dataclass(frozen=True)
class Segments:
    """The segments between one row of a history and the next, as columns of equal length.

    Examples:
        >>> history = {"step": np.array([40.0, 100.0]), "examples": np.array([1200.0, 3000.0]),
        ...            "noise_scale": np.array([10.0, 30.0]), "low": np.array([8.0, 20.0]),
        ...            "high": np.array([15.0, np.inf])}
        >>> run = Segments.of(history)
        >>> run.steps, run.batch_size, run.noise_scale
        (array([40., 60.]), array([30., 30.]), array([10., 20.]))
        >>> run.progress
        array([0.75, 0.6 ])
    """

    steps: Array
    """Optimizer steps in each segment."""
    batch_size: Array
    """Mean global batch size, in examples."""
    noise_scale: Array
    """B_simple of the block; NaN if the averaged |G|² is negative."""
    low: Array
    """Lower end of the interval; 0 without a measured step."""
    high: Array
    """Upper end of the interval; infinite if the noise scale is not resolved."""
    resolved: Array
    """1 if the block's own estimate is resolved, else 0."""
    block: NDArray[np.intp]
    """The number of the segment's block. Blocks have independent estimates."""
    progress: Array
    """Progress of a step, as a share of a noise-free step: 1/(1 + b/B), see `Blocks.progress`.

    In single blocks it may be negative or above 1 by chance. It is NaN if the noise scale of the
    whole run is not resolved; then its ends are bounds of all segments together.
    """
    progress_low: Array
    """Lower end of the progress, at the upper end of the noise scale."""
    progress_high: Array
    """Upper end of the progress. Errors of blocks are independent: their squares add."""
    progress_error: Array
    """Standard error of the progress, common to the segments of a block; 0 if not known."""
    measured: Array
    """1 if a step was measured in the segment. If it is 0, the block's estimate is used."""
    weight: Array
    """What a step counts: its learning rate over their mean in a run whose rate fell, else 1."""
    as_logged: bool = False
    """Whether the estimates are the logged averages, which lag. Better ones were not available."""

    @property
    def counted_steps(self) -> Array:
        """The steps as they count in sums over the run: their sum is that of `steps`."""
        return self.steps * self.weight

    @property
    def examples(self) -> float:
        """The examples of the whole run."""
        return float((self.steps * self.batch_size).sum())

    @property
    def mean_batch_size(self) -> float:
        """The mean batch size of the steps."""
        return self.examples / float(self.steps.sum())

    @classmethod
    def of(cls, history: Mapping[str, Array]) -> Segments:
        """Divide a history into segments. Each has the noise scale of its own part of the run.

        The logged estimates are averages over earlier steps. While |G|² falls, often a hundredfold
        in the first steps, they lag and read low. So the increments of the rows are averaged again,
        in blocks of consecutive rows, see `Blocks`. Where a block says nothing, the lower ends of
        the logged estimates still do: reading low, they hold. If a history only has logged
        estimates, these are used, and their errors are assumed to be fully correlated.

        Raises:
            ValueError: If the history has no rows, its steps do not rise, or its sums are too
                coarse to be used.
        """
        step = history["step"]
        steps = np.diff(step, prepend=0)
        if not step.size or (steps <= 0).any():
            wrong = step[steps <= 0]
            where = f" with step {float(wrong[0]):g} out of order" if wrong.size else ""
            raise Refusal(
                "history",
                "have rows with rising `step`",
                f"{step.size} rows{where}",
                "Measure a run with NoiseScaleMonitor first. If other processes have trained"
                " (`ddp_spawn`, a notebook), give the run's folder.",
            )
        batch_size = np.diff(history["examples"], prepend=0) / steps
        rows = Rows.of(history)
        if rows is None:
            return cls._from_log(history, steps, batch_size)
        confidence = float(getattr(history, "confidence", 0.95))
        blocks = Blocks.of(rows, batch_size, steps)
        block = blocks.of_row
        value, low, high = (x[block] for x in blocks.intervals(confidence))
        logged = np.nan_to_num(history.get("low", np.zeros_like(steps)), nan=0.0)
        most = batch_size / (batch_size + logged)
        weight = _weight(history, steps)
        progress, *ends, error = _progress(blocks, steps * weight, batch_size, confidence, most)
        return cls(
            steps=steps,
            batch_size=batch_size,
            noise_scale=value,
            low=low,
            high=high,
            resolved=(np.isfinite(high) & np.isfinite(value)).astype(np.float64),
            block=block,
            progress=progress,
            progress_low=ends[0],
            progress_high=ends[1],
            progress_error=error,
            measured=(rows.units > 0).astype(np.float64),
            weight=weight,
        )

    @classmethod
    def _from_log(cls, history: Mapping[str, Array], steps: Array, batch_size: Array) -> Segments:
        """Use the logged estimates. One that is not resolved is replaced by the next resolved."""
        value, low, high = (history[name] for name in ("noise_scale", "low", "high"))
        resolved = np.isfinite(high) & np.isfinite(value)
        low = np.nan_to_num(low, nan=0.0)
        high = np.nan_to_num(high, nan=math.inf, posinf=math.inf)
        value = np.clip(fill_gaps(value, resolved), low, high)
        return cls(
            steps=steps,
            batch_size=batch_size,
            noise_scale=value,
            low=low,
            high=high,
            resolved=resolved.astype(np.float64),
            block=np.zeros(steps.size, dtype=np.intp),
            progress=batch_size / (batch_size + value),
            progress_low=batch_size / (batch_size + high),
            progress_high=batch_size / (batch_size + low),
            progress_error=np.zeros(steps.size),
            measured=np.ones(steps.size),
            weight=_weight(history, steps),
            as_logged=True,
        )


def _weight(history: Mapping[str, Array], steps: Array) -> Array:
    """Return the learning rates over their mean, if the rate fell at one batch size.

    Steps at a small rate make little progress, and the noise scale is largest there: counted in
    full, they made B_crit wrong by a factor of 2 in the median of 26 runs, and of 1.4 with these
    weights, see benchmarks/prediction/bands.py. A smaller last batch of an epoch is no other size.
    """
    if not has_decayed(history):
        return np.ones(steps.size)
    size = np.asarray(history["batch_size"], dtype=np.float64)
    alike = np.abs(size / np.median(size) - 1) < ALIKE
    if alike.mean() < MOSTLY:
        return np.ones(steps.size)
    rate = np.asarray(history["learning_rate"], dtype=np.float64)
    rate = fill_gaps(rate, np.isfinite(rate) & (rate >= 0))
    rate = (rate + np.append(rate[0], rate[:-1])) / 2  # from row to row it falls on a line
    return np.asarray(rate * steps.sum() / (rate @ steps))


def noise_scale_at(history: Mapping[str, Array], step: float) -> Bounded:
    """Return B_simple with its interval at a step of the run.

    Raises:
        ValueError: If the run has no such step.
    """
    run = Segments.of(history)
    if not 0 <= step <= history["step"][-1]:
        raise Refusal(
            "step",
            "be a step of the run",
            repr(step),
            f"The run has {history['step'][-1]:,.0f} steps.",
        )
    where = int(np.searchsorted(history["step"], step))
    return Bounded(*(float(x[where]) for x in (run.noise_scale, run.low, run.high)))


def _progress(
    blocks: Blocks, steps: Array, batch_size: Array, confidence: float, most: Array
) -> tuple[Array, Array, Array, Array]:
    """Return the progress of each segment, its ends for sums over the run, and its error.

    Args:
        blocks: The blocks of the run.
        steps: Steps in each segment, as they count.
        batch_size: See `Segments`.
        confidence: Coverage of the ends.
        most: The most progress by the logged estimates, for what the blocks do not say.
    """
    progress, error = blocks.progress(batch_size)
    of_block = np.bincount(blocks.of_row, weights=steps * error).astype(np.float64)
    known = np.isfinite(of_block)
    if not (known.all() and math.isfinite(_quantile(of_block, blocks, confidence))):
        # Few units rule the sum: of their blocks no more is known than what was logged.
        known &= np.isfinite(quantile_of(blocks.units, confidence, blocks.measured))
    of_block = np.where(known, of_block, 0.0)
    total = math.sqrt(float((of_block**2).sum()))
    quantile = _quantile(of_block, blocks, confidence)
    sure = known[blocks.of_row]
    made, margin = float((steps * progress)[sure].sum()), quantile * total
    if sure.all() and made > margin:
        return progress, progress - quantile * error, progress + quantile * error, error
    # The noise scale of the whole has bounds alone. Its lower one is at the upper end of the
    # progress of all blocks together, to which each adds in proportion to its variance. Less than
    # none is not to be had: a negative sum counts as zero.
    lowest, highest = np.zeros_like(progress), most.copy()
    if margin > 0:
        share = error[sure] * of_block[blocks.of_row][sure] / total
        if made > margin:
            lowest[sure] = progress[sure] - quantile * share
        highest[sure] = progress[sure] + quantile * (1 + max(-made, 0.0) / margin) * share
    noise = steps * batch_size
    if (noise * highest.clip(0.0, 1.0)).sum() > (noise * most).sum():
        highest = most
    ends = lowest.clip(0.0, 1.0), highest.clip(0.0, 1.0)
    return np.full_like(progress, math.nan), *ends, np.zeros_like(progress)


def _quantile(of_block: Array, blocks: Blocks, confidence: float) -> float:
    """Return `quantile_of` a sum over blocks with these errors, as of one block."""
    squares = of_block**2
    spread = float((squares**2 / blocks.units).sum())
    units = float(squares.sum()) ** 2 / spread if spread else math.inf
    return float(quantile_of(units, confidence, blocks.measured))
