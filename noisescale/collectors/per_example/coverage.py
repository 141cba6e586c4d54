# SPDX-License-Identifier: Apache-2.0
"""The share of the gradient that is measured, if only some layers have a formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.batches.to_device import to_device
from noisescale.collectors.squared_norms import squared_norm

LEAST_COVERAGE = 0.9
"""The least share of |g|² from which the noise scale counts as that of the whole gradient.

The rest may be all noise or none. Tied embeddings, a few percent of a model's numbers, hold half of
its |g|², and its noise scale is then half of what it should be.
"""

_DECAY = 0.99  # a step's; the share changes slowly


class Coverage:
    """The share of |g|² in measured parameters, averaged over some hundred steps."""

    def __init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device="cpu")
        self._read: list[float] | None = [0.0, 0.0]
        """The values of the sums, once they were read from the device; else None."""

    def add(
        self, measured: Sequence[Parameter], left_out: Sequence[Parameter], *, device: torch.device
    ) -> None:
        """Add a step, on the device, from `p.grad`."""
        with torch.no_grad():
            parts = [
                squared_norm([p.grad for p in some if p.grad is not None], device=device)
                for some in (measured, left_out)
            ]
            # Steps count alike, whatever the scale of their losses.
            step = torch.stack(parts)
            step = torch.nan_to_num(step / step.sum(), 0.0, 0.0, 0.0)
            self._sums = to_device(self._sums, device, step.dtype) * _DECAY + step
            self._read = None

    def unread(self) -> list[Tensor]:
        """Return the sums, if steps were added since they were read."""
        return [self._sums] if self._read is None else []

    def take(self, numbers: Sequence[Sequence[float]]) -> None:
        """Receive the sums."""
        for sums in numbers:
            self._read = list(sums)

    def share(self) -> float:
        """Return the share, read from the device unless it has been; 1 before the first step."""
        measured, left_out = self.state_dict()
        return measured / (measured + left_out) if measured + left_out else 1.0

    def state_dict(self) -> list[float]:
        """Return what `load_state_dict` needs."""
        if self._read is None:
            self._read = self._sums.tolist()
        return list(self._read)

    def load_state_dict(self, sums: Sequence[float]) -> None:
        """Continue from a `state_dict`."""
        self._sums, self._read = self._sums.new_tensor(sums), list(sums)
