# SPDX-License-Identifier: Apache-2.0
"""The rows of a history as sums over the measured steps between them, relative to |g|²."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.estimation.level import Level
from noisescale.estimation.moments import GradientMoments
from noisescale.history.increments import SQUARES, SUMS
from noisescale.refusal import Refusal

Array = NDArray[np.float64]

LARGEST_ROUNDING = 0.1
"""The largest rounding of running sums in float32, as a share of a row's |g|².

A row with a larger rounding error cannot be used.
"""

MANY_ROUNDED = 0.1
"""A run is refused if a larger share of its steps than this is in rows that cannot be used."""


RUNNING_SUMS = ("sum_weight", "sum_noise_trace", "sum_grad_sq_norm")
"""Columns and tags of older logs: totals since the beginning of the run."""


class Rows(NamedTuple):
    """Sums over the measured steps between one row of a history and the next.

    S and Q are tr(Σ) and |G|² of a unit, divided by the |g|² of the units before it. A unit is a
    measured step. In a log that only has running sums, a unit is a whole row.
    """

    units: Array
    """The number of measured units; it may be 0."""
    weight: Array
    """Σw; w is the batch size of a unit times the number of steps that it stands for."""
    sq_weight: Array
    """Σw²."""
    noise_trace: Array
    """Σw·S."""
    grad_sq_norm: Array
    """Σw·Q."""
    noise_trace_squares: Array
    """Σw²(S - S̄)² around the row's own mean."""
    products: Array
    """Σw²(S - S̄)(Q - Q̄) around the row's own means."""
    grad_sq_norm_squares: Array
    """Σw²(Q - Q̄)² around the row's own mean."""

    @classmethod
    def of(cls, history: Mapping[str, Array], batch_size: Array) -> Rows | None:
        """Return the rows; None if a history has neither increments nor running sums.

        If a row has both, its increments are used.

        Args:
            history: A history with at least one row.
            batch_size: Mean global batch size of each row.

        Raises:
            ValueError: If the running sums were rounded to float32 and are too coarse.
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
        """Return the rows with other weights. Rows without measured steps still have weight 0.

        Early steps are measured more often than late ones, so the early noise scale would dominate
        a block whose rows weigh by their measured steps. In runs whose noise scale rises tenfold,
        intervals of B_crit then held the truth in 70 %, at a median of 0.75 of it.
        """
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
        """Mean weight of a unit, weighted by the weights themselves; 0 without measured units."""
        return self.sq_weight / np.maximum(self.weight, 1e-300)

    @property
    def means(self) -> tuple[Array, Array]:
        """S̄ and Q̄ of each row; 0 without measured units."""
        weight = np.maximum(self.weight, 1e-300)
        return self.noise_trace / weight, self.grad_sq_norm / weight


def _from_running_sums(
    history: Mapping[str, Array], batch_size: Array, elsewhere: NDArray[np.bool_]
) -> Rows | None:
    """Return the rows from the running sums of older logs; NaN where a row has no sums."""
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
        raise Refusal(
            "history",
            "have precise sums",
            "running totals in float32",
            "Their rounding error is too large compared with what a row adds. Read the"
            " metrics.csv of the same run, or measure again: the monitor now logs the"
            " sums of each row.",
        )
    return Rows(*columns)
