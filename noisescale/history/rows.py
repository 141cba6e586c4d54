# SPDX-License-Identifier: Apache-2.0
"""The rows of a history as sums of what was measured between them, over the trailing |g|²."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.history.increments import SQUARES, SUMS

Array = NDArray[np.float64]

LARGEST_ROUNDING = 0.1
"""Of a row's |g|²: running sums in float32 that are coarser say nothing about the row."""

MANY_ROUNDED = 0.1
"""Share of a run's steps in such rows from which on the run is refused."""


RUNNING_SUMS = ("sum_weight", "sum_noise_trace", "sum_grad_sq_norm")
"""Columns and tags of earlier logs: totals since the beginning of the run."""


class Rows(NamedTuple):
    """What was measured between one row of a history and the next.

    S and Q are tr(Σ) and |G|² of a unit, over the |g|² of the units before it. A unit is a
    measured step. Where only running sums were logged, a whole row is a unit.
    """

    units: Array
    """Number of units that were measured; 0 where none was."""
    weight: Array
    """Σw, the sum of their batch sizes, each times the steps that the unit stands for."""
    sq_weight: Array
    """Σw²."""
    noise_trace: Array
    """Σw·S."""
    grad_sq_norm: Array
    """Σw·Q."""
    noise_trace_squares: Array
    """Σw²(S - S̄)² around the row's own mean."""
    products: Array
    """Σw²(S - S̄)(Q - Q̄), likewise."""
    grad_sq_norm_squares: Array
    """Σw²(Q - Q̄)², likewise."""

    @classmethod
    def of(cls, history: Mapping[str, Array], batch_size: Array) -> Rows | None:
        """Return the rows; None where a history has neither increments nor running sums.

        Where a row has both, its increments count.

        Args:
            history: With a row or more.
            batch_size: Mean global batch size of each row.

        Raises:
            ValueError: If running sums were rounded to float32 and say nothing.
        """
        names = (*SUMS, *SQUARES)
        unknown = np.full(len(batch_size), np.nan)
        logged = [np.asarray(history.get(name, unknown), dtype=np.float64) for name in names]
        units, weight, sq_weight = logged[:3]
        if not np.isfinite(sq_weight).all():  # earlier logs have none: all units of one weight
            logged[2] = np.where(np.isfinite(sq_weight), sq_weight, weight**2 / np.fmax(units, 1))
        known = np.asarray(np.isfinite(logged).all(axis=0))
        rows = cls(*logged)
        if not known.all() and (summed := _from_running_sums(history, batch_size, known)):
            rows = cls(*(np.where(known, a, b) for a, b in zip(rows, summed, strict=True)))
            known = np.asarray(np.isfinite(rows).all(axis=0))
        if not (rows.weight[known] > 0).any():
            return None
        rows = cls(*(np.where(known & (rows.weight > 0), column, 0.0) for column in rows))
        # After a resume with other log steps a row may hold steps of the row before, too.
        steps = np.diff(history["step"], prepend=0)
        share = np.minimum(1.0, steps / np.maximum(rows.units, 1.0))
        return cls(*(column * share for column in rows)) if (share < 1).any() else rows

    def standing_for(self, weight: Array) -> Rows:
        """Return them with other weights, 0 still where nothing was measured."""
        scale = np.where(self.weight > 0, weight / np.maximum(self.weight, 1e-300), 0.0)
        return Rows(
            self.units,
            self.weight * scale,
            self.sq_weight * scale**2,
            self.noise_trace * scale,
            self.grad_sq_norm * scale,
            self.noise_trace_squares * scale**2,
            self.products * scale**2,
            self.grad_sq_norm_squares * scale**2,
        )

    @property
    def unit_weight(self) -> Array:
        """Mean weight of a unit, each counting by its own; 0 where none was measured."""
        return self.sq_weight / np.maximum(self.weight, 1e-300)

    @property
    def means(self) -> tuple[Array, Array]:
        """S̄ and Q̄ of each row; 0 where nothing was measured."""
        weight = np.maximum(self.weight, 1e-300)
        return self.noise_trace / weight, self.grad_sq_norm / weight


def _from_running_sums(
    history: Mapping[str, Array], batch_size: Array, elsewhere: NDArray[np.bool_]
) -> Rows | None:
    """Difference the sums of earlier logs; NaN where a row has none."""
    if not all(name in history for name in RUNNING_SUMS):
        return None
    sums = np.array([history[name] for name in RUNNING_SUMS], dtype=np.float64)
    known = np.isfinite(sums).all(axis=0)
    coarse = bool((sums[:, known] == sums[:, known].astype(np.float32)).all())
    ulp = np.spacing(np.abs(sums).astype(np.float32)) if coarse else np.zeros_like(sums)
    rounding = ulp[2] + ulp[1] / batch_size
    columns = np.full((len(Rows._fields), len(batch_size)), np.nan)
    rounded = np.zeros(len(batch_size), dtype=bool)
    level = Level()
    where = np.flatnonzero(known)
    added = np.diff(sums[:, where], prepend=0.0).T.tolist()
    for k, (weight, noise, signal) in zip(where.tolist(), added, strict=True):
        if weight > 0:
            moments = GradientMoments(grad_sq_norm=signal / weight, noise_trace=noise / weight)
            size = float(batch_size[k])
            sq_norm = moments.grad_sq_norm + moments.noise_trace / size
            # The first row is its own level: it has many steps, or the whole has many rows.
            level = level if level.sq_norm else Level(max(sq_norm, 0.0))
            relative, level = level.step(moments, size)
            if relative is not None:
                noise_trace = weight * relative.noise_trace
                grad_sq_norm = weight * relative.grad_sq_norm
                # The squares of a single unit are zero.
                columns[:, k] = 1.0, weight, weight**2, noise_trace, grad_sq_norm, 0.0, 0.0, 0.0
            rounded[k] = rounding[k] > LARGEST_ROUNDING * weight * sq_norm
        elif weight == 0:
            columns[:, k] = 0.0
    steps = np.diff(history["step"], prepend=0)
    if steps[rounded & ~elsewhere].sum() > MANY_ROUNDED * steps.sum():
        raise ValueError(
            "`history` must have sums that can be differenced, got running totals that were"
            " rounded to float32 by more than a row adds. Read the metrics.csv of the same run, or"
            " measure again: the monitor now logs what each row adds."
        )
    return Rows(*columns)
