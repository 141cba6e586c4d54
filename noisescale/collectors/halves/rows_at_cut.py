# SPDX-License-Identifier: Apache-2.0
"""|dL/dz_i| of the rows at the cut, which show how alike rows are: see `RowSimilarity`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from noisescale.estimation.row_similarity import RowSimilarity


class RowsAtCut:
    """Collects means and variances of log|dL/dz_i|, on the device until measured steps are read.

    Args:
        found: What receives them.
    """

    def __init__(self, found: RowSimilarity) -> None:
        self._found = found
        self._rows: list[tuple[float, Tensor]] = []
        self._sent = 0

    def add(self, sq_norms: Tensor, size: float) -> None:
        """Receive |dL/dz_i|² of all rows, shape (rows,). Rows without a loss do not count."""
        some = sq_norms > 0
        logs = torch.where(some, sq_norms, 1.0).log() / 2
        number = some.sum()
        mean = logs.sum() / number
        variance = torch.where(some, (logs - mean).square(), 0.0).sum() / (number - 1)
        self._rows.append((size, torch.stack([number.to(mean.dtype), mean, variance])))

    def unread(self) -> Sequence[Tensor]:
        """Return the numbers on the device."""
        self._sent = len(self._rows)
        return [numbers for _, numbers in self._rows]

    def take(self, numbers: Sequence[Sequence[float]]) -> None:
        """Receive what is in them."""
        for (size, _), one in zip(self._rows, numbers, strict=False):
            self._found.add_rows(*one, size=size)
        del self._rows[: self._sent]
