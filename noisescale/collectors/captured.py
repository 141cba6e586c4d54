# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients that hooks on parameters bring, one after another."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisescale.collectors.devices import current_stream, keep_from
from noisescale.collectors.gradient_norms import GradientNorms, Piece

# On an accelerator small gradients are kept until they are worth one fused norm, at most a DDP
# bucket of them. One that is kept while it becomes `p.grad` is cloned, so large ones never are.
_LARGE_BYTES = 2**20
_MOST_BYTES_KEPT = 25 * 2**20


@dataclass
class _Kept:
    """Gradients of one stream, to be normed together."""

    pieces: list[Piece] = field(default_factory=list)
    bytes: int = 0

    def take(self) -> list[Piece]:
        """Return what was kept, and keep nothing."""
        pieces, self.pieces, self.bytes = self.pieces, [], 0
        return pieces


class Captured:
    """The norms of whole parameters' gradients.

    Args:
        norms: The parameters, and the entries that their norms are summed up in.
    """

    def __init__(self, norms: GradientNorms) -> None:
        self._norms = norms
        self.found = norms.empty()
        """The norms of all gradients that came before `norm_kept`."""
        self._kept: defaultdict[torch.Stream | torch.device, _Kept] = defaultdict(_Kept)
        """Gradients still to be normed, by their stream, or by device if it has no streams.

        Autograd has a thread for each device, which alone changes what is kept of that device. What
        all threads change are lists and sets that they only add to.
        """

    def add(self, index: int, gradient: Tensor) -> None:
        """Norm a gradient, now or in `norm_kept`."""
        size = gradient.numel() * gradient.element_size()
        if size >= _LARGE_BYTES or gradient.is_cpu or gradient.is_sparse:
            self._norms.add_one(self.found, index, gradient)
            return
        kept = self._kept[current_stream(gradient.device) or gradient.device]
        kept.pieces.append(Piece(index, gradient))
        kept.bytes += size
        if kept.bytes >= _MOST_BYTES_KEPT:
            self._norms.add(self.found, kept.take())

    def norm_kept(self) -> None:
        """Norm what is kept of all streams. The current ones have waited for them by now."""
        pieces: list[Piece] = []
        for stream, kept in self._kept.items():
            pieces += (taken := kept.take())
            if isinstance(stream, torch.Stream):
                keep_from(stream, (piece.gradient for piece in taken))
        self._norms.add(self.found, pieces)
