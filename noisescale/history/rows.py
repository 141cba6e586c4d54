# SPDX-License-Identifier: Apache-2.0
"""The rows of a history as sums over the measured steps between them, relative to |g|²."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noisescale.history.increments import SQUARES, SUMS

Array = NDArray[np.float64]


class Rows(NamedTuple):
    """Sums over the measured steps between one row of a history and the next.

    S and Q are tr(Σ) and |G|² of a unit, divided by the |g|² of the units before it. A unit is a
    measured step.
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
    def of(cls, history: Mapping[str, Array]) -> Rows | None:
        """Return the rows; None if a history has no increments.

        Args:
            history: A history with at least one row.
        """
        names = (*SUMS, *SQUARES)
        unknown = np.full(len(history["step"]), np.nan)
        logged = [np.asarray(history.get(name, unknown), dtype=np.float64) for name in names]
        known = np.asarray(np.isfinite(logged).all(axis=0))
        rows = cls(*logged)
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
