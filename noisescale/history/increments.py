# SPDX-License-Identifier: Apache-2.0
"""The sums of the measured steps between two rows of a history. They can average any segment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.state import State

Array = NDArray[np.float64]

_NOISE, _SIGNAL = "increment_noise_trace", "increment_grad_sq_norm"

MEASURED = "increment_measured_steps"

SUMS = (MEASURED, "increment_weight", "increment_sq_weight", _NOISE, _SIGNAL)
"""n, Σw, Σw², Σw·S and Σw·Q of a row. S and Q are a step's moments divided by its level of |g|².

w is the batch size of a measured step times the number of steps that it stands for.
"""

SQUARES = {
    "increment_noise_trace_squares": (_NOISE, _NOISE),
    "increment_products": (_NOISE, _SIGNAL),
    "increment_grad_sq_norm_squares": (_SIGNAL, _SIGNAL),
}
"""Σw²(S - S̄)², Σw²(S - S̄)(Q - Q̄) and Σw²(Q - Q̄)² of a row, around its own weighted means."""

LOSS = "training_loss"
"""Σw·L/Σw of the steps' mean losses L; NaN if they are not known."""

INCREMENTS = (*SUMS, *SQUARES, LOSS)
"""The columns of a history that contain sums and means since the row before."""


class Increments(State):
    """Sum up measured steps, until a row of the history takes the sums.

    The sums are centred on the moving mean of the row: raw squares would cancel in float32. A row
    has the sums of its own steps alone, so that rows merge into blocks of any length.

    Examples:
        >>> increments = Increments()
        >>> for noise_trace in (10.0, 9.0, 11.0):  # the first step only sets the level
        ...     increments.add(GradientMoments(1.0 - noise_trace / 32, noise_trace), batch_size=32)
        >>> row = increments.take()
        >>> row["increment_weight"], row["increment_noise_trace"]
        (64.0, 640.0)
        >>> row["increment_noise_trace_squares"]
        2048.0
    """

    _saved = ("_level", "_row")

    def __init__(self) -> None:
        self._level = Level()
        self._row = _Row()

    def add(
        self, moments: GradientMoments, batch_size: float, steps: int = 1, loss: float = math.nan
    ) -> None:
        """Add one measured step.

        Args:
            moments: The step's two moments. They must be finite, and may be negative.
            batch_size: The global batch size of the step.
            steps: The number of steps that this step stands for: itself, and the steps before it
                that were not measured.
            loss: The mean loss of the step.
        """
        relative, self._level = self._level.step(moments, batch_size)
        if relative is not None:
            self._row = self._row.add(relative, batch_size * steps, loss)

    def take(self) -> dict[str, float]:
        """Return the columns of a row, and begin the next row."""
        row, self._row = self._row, _Row()
        noise, signal = row.weight * row.s, row.weight * row.q
        sums = (float(row.steps), row.weight, row.sq_weight, noise, signal)
        loss = row.loss if row.steps else math.nan
        return dict(zip(INCREMENTS, (*sums, row.ss, row.sq, row.qq, loss), strict=True))


class _Row(NamedTuple):
    """Sums over the steps of a row; s and q are their relative tr(Σ) and |G|²."""

    steps: int = 0
    weight: float = 0.0
    """Σw."""
    s: float = 0.0
    """Σw·s/Σw."""
    q: float = 0.0
    ss: float = 0.0
    """Σw²(s - s̄)². `sq` and `qq` are Σw²(s - s̄)(q - q̄) and Σw²(q - q̄)²."""
    sq: float = 0.0
    qq: float = 0.0
    sq_weight: float = 0.0
    """Σw²."""
    offset_s: float = 0.0
    """Σw²(s - s̄); it is zero if all steps have the same weight."""
    offset_q: float = 0.0
    loss: float = 0.0

    def add(self, relative: GradientMoments, weight: float, loss: float) -> _Row:
        """Add one step. As the mean shifts, all squares around the mean change."""
        q, s = relative.grad_sq_norm, relative.noise_trace
        share = weight / (self.weight + weight)
        shift_s, shift_q = share * (s - self.s), share * (q - self.q)
        mean_s, mean_q = self.s + shift_s, self.q + shift_q
        off_s = self.offset_s - self.sq_weight * shift_s
        off_q = self.offset_q - self.sq_weight * shift_q
        own, square = weight * weight, self.sq_weight
        ds, dq = s - mean_s, q - mean_q
        return _Row(
            self.steps + 1,
            self.weight + weight,
            mean_s,
            mean_q,
            self.ss - (2 * self.offset_s - square * shift_s) * shift_s + own * ds * ds,
            self.sq
            - self.offset_s * shift_q
            - self.offset_q * shift_s
            + square * shift_s * shift_q
            + own * ds * dq,
            self.qq - (2 * self.offset_q - square * shift_q) * shift_q + own * dq * dq,
            square + own,
            off_s + own * ds,
            off_q + own * dq,
            self.loss + share * (loss - self.loss),
        )


def merge_increments(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, Array]:
    """Merge the increments of two successive rows into the increments of one row.

    Sums add, and the loss is averaged. The squares around the common mean are the squares around
    each row's own mean, plus a term for the distance of the row's mean from the common mean.
    """
    row = {name: first[name] + second[name] for name in SUMS}
    weight = np.maximum(row["increment_weight"], 1e-300)
    for name in SQUARES:
        row[name] = first[name] + second[name]
    row[LOSS] = np.where(row["increment_weight"] > 0, 0.0, np.nan)
    for part in (first, second):
        own = np.maximum(part["increment_weight"], 1e-300)
        row[LOSS] = row[LOSS] + np.where(own > 1e-300, own / weight * part[LOSS], 0.0)
        apart = {name: part[name] / own - row[name] / weight for name in (_NOISE, _SIGNAL)}
        sq_weight = part["increment_sq_weight"]
        for name, (one, other) in SQUARES.items():
            row[name] = row[name] + sq_weight * apart[one] * apart[other]
    return row
