# SPDX-License-Identifier: Apache-2.0
"""What the halves of a batch are made of: its rows, or groups of rows that belong together.

Rows of one group are not independent (the completions of one prompt, pairs), so whole groups are in
one half. Group k adds C_k = w_k·g_k/Σw to the gradient, w_k the number of its rows or the sum of
their weights. Then Σ|C_k|² follows from |g|² and |g_s|² as for single rows with weights, |G|² is
(|g|² - Σ|C_k|²)/(1 - Σw²/(Σw)²), and tr(Σ) = B·(|g|² - |G|²). B is as it is counted, in rows or in
groups, and so is the noise scale.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from noisescale.batches.row_groups import RowGroups
from noisescale.collectors.rows.window_layout import WindowLayout
from noisescale.guard import NotMeasured

LARGEST_ERROR = 0.05
"""The largest relative error of |G|² from rows without a loss. Above it a step is left out."""


class Parts(NamedTuple):
    """The rows of a batch, or its groups of rows."""

    size: float
    """Examples in the batch, as they are counted."""
    rows: int
    row_weights: Tensor | None
    """What each row has in the mean that the loss is, if that is known."""
    groups: RowGroups | None

    @classmethod
    def from_batch(
        cls, size: float, rows: int | None, row_weights: Tensor | None, groups: RowGroups | None
    ) -> Parts:
        """Return the parts of a batch of `rows` rows; None: as many as are counted.

        Raises:
            NotMeasured: If rows and groups do not fit each other, or what is counted.
        """
        if rows is None:
            counted = groups is not None and size == groups.number
            rows = len(groups.of_rows) if groups is not None and counted else int(size)
        if groups is not None and len(groups.of_rows) != rows:
            raise NotMeasured(
                f"`row_groups` must have one group for each of the {rows} rows of the batch, got"
                f" {len(groups.of_rows)}: return as many from `group_fn`. If the size that is"
                " counted is neither the number of rows nor that of groups, pass `rows` to the"
                " meter."
            )
        if row_weights is not None and len(row_weights) != rows:
            raise NotMeasured(
                f"`weight` must have one number for each of the {rows} rows of the batch, got"
                f" {len(row_weights)}. Return as many from `weight_fn`, or one for the batch."
            )
        return cls(size, rows, row_weights, groups)

    @property
    def number(self) -> int:
        """The number of parts."""
        return self.rows if self.groups is None else self.groups.number

    @property
    def kind(self) -> str:
        """What the parts are, in messages."""
        return "rows" if self.groups is None else "groups"

    def sums(self, of_rows: Tensor) -> Tensor:
        """Sum numbers of rows over each part."""
        return of_rows.float() if self.groups is None else self.groups.sums(of_rows)

    def lack_losses(self, live: Tensor) -> Tensor:
        """Return whether so few of the rows have a loss that halves mislead.

        Zeros do not tell a mean over the n `live` rows from a mean over all rows with a loss of
        zero in some. Halves take it for the second. If it is the first, |G|² is
        (1 - 1/rows)/(1 - 1/n) times as large, as the cross products of n parts say.
        """
        if self.groups is None:
            return live.sum() < _fewest_live(self.rows)
        alive = _pair_share(self.sums(live))
        whole = _pair_share(self.sums(torch.ones(self.rows, device="cpu")))
        return ~(alive * (1 + LARGEST_ERROR) >= float(whole))  # NaN where no row has a loss

    def sq_norms(self, halved: Tensor, whole: Tensor) -> Tensor:
        """Return the squared norms that `layout` describes, from |g_s|² and |g|².

        They are Σ|C_k|², or |g|² + |g_s|² for equal rows.
        """
        if self.groups is None and self.row_weights is None:
            return whole + halved
        # E|g_s|² is Σ|C_k|² - (|g|² - Σ|C_k|²)/(number - 1), and with an odd part in neither half
        # Σ|C_k|² - |g|²/number.
        share = 1.0 if self.number % 2 else 1 - 1 / self.number
        return halved * share + whole / self.number

    def layout(self, loss_divisor: float = 1.0) -> WindowLayout:
        """Say what `sq_norms` are of; the loss is one mean over all rows.

        Of B equal rows an odd one is in neither half. Then g_s has tr(Σ)·(B - 1)/B² of noise
        instead of tr(Σ)/B: |g|² + |g_s|² is that of parts of B²/(2·B - 1) rows.
        """
        squared = loss_divisor**2
        of_rows = self.row_weights
        if self.groups is None and of_rows is None:
            size, rows = self.size, self.rows
            inverse = (1 + (rows - rows % 2) / rows) / size if size else math.inf
            return WindowLayout(squared, squared, inverse, 1 / size if size else math.inf)
        if of_rows is None:
            of_rows = torch.ones(self.rows, device="cpu")
        weights = torch.where((of_rows >= 0).all(), self.sums(of_rows), torch.nan)
        squares = weights.square()
        sizes = self.sums(torch.ones_like(of_rows)) * (self.size / self.rows)
        inverse_size = (squares / sizes).sum()
        return WindowLayout(
            squared, squared, inverse_size, inverse_size, squares.sum(), weights.sum()
        )


def _pair_share(weights: Tensor) -> Tensor:
    """Return the share of the products of two different parts in (Σw)²."""
    return 1 - weights.square().sum() / weights.sum().square()


@lru_cache
def _fewest_live(rows: int) -> int:
    """Return the fewest of `rows` rows that need a loss for halves not to mislead."""
    n = torch.arange(rows + 1.0, device="cpu")
    return int((~((1 - n / n.square()) * (1 + LARGEST_ERROR) >= 1 - n[-1] / n[-1].square())).sum())
