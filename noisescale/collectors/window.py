# SPDX-License-Identifier: Apache-2.0
"""How the micro-batches of one optimizer step make up the small and the big batch."""

from __future__ import annotations

from typing import NamedTuple


class WindowLayout(NamedTuple):
    """What turns one process's captured squared norms into those of mean gradients."""

    parts: int
    """Small batches that were averaged, over all processes."""
    inverse_sizes: float
    """This process's share of Σ 1/n over the parts, in 1/examples."""
    small_scale: float
    """What makes a captured |g_part|² that of the part's mean gradient."""
    big_scale: float
    """The same for |g|²."""
