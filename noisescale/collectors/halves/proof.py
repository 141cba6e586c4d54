# SPDX-License-Identifier: Apache-2.0
"""The proof of a cut: with the factor 2 for all rows the gradient has to be twice what it is.

A way that the cut misses gives 1 there, and one that is cut twice gives 4. Rows that are set to
zero would not tell the latter from what is right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from noisescale.collectors.squared_norms import squared_norm

LARGEST_ERROR = 0.01
"""Share of |2g|² by which twice the gradient may be missed."""

_NAMED = 3


class Proof:
    """Compares what a pass with the factor 2 gave with the gradients of the training's own pass.

    Args:
        names: Of the parameters.
        left_out: Indices of those that are not measured.
    """

    def __init__(self, names: Sequence[str], left_out: Collection[int]) -> None:
        self._names = names
        self._left_out = left_out
        self._doubled: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self._seen_twice = False

    def take_doubled(self, index: int, gradient: Tensor) -> None:
        """Keep a gradient of the pass with the factor 2: see `row_pass`."""
        self._doubled[index] = gradient.detach().clone()

    def take_own(self, index: int, gradient: Tensor) -> None:
        """Compare it with that of the training's own pass, and let go of it."""
        if index in self._left_out:
            return
        self._seen_twice |= index in self._totals
        twice = 2 * gradient.detach()
        doubled = self._doubled.pop(index, None)
        self._totals[index] = _sq_norm(twice)
        self._errors[index] = self._totals[index] if doubled is None else _sq_norm(doubled - twice)

    @property
    def reached(self) -> bool:
        """Whether the training's own pass came to a parameter."""
        return bool(self._totals)

    def share(self) -> float:
        """Share of |2g|² by which it was missed, read off the device; NaN where nobody can tell."""
        if not self._totals or self._seen_twice:
            return math.nan
        errors, totals = (
            float(torch.stack(list(some.values())).sum(dtype=torch.float64))
            for some in (self._errors, self._totals)
        )
        return errors / totals if 0 < totals < math.inf and errors < math.inf else math.nan

    def worst(self) -> str:
        """Name the parameters that miss it by most, and their share of the error."""
        errors = {self._names[i]: float(error) for i, error in self._errors.items()}
        whole = sum(errors.values())
        most = sorted(errors, key=errors.__getitem__, reverse=True)[:_NAMED]
        more = f" and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
        return ", ".join(f"{name} ({errors[name] / whole:.0%})" for name in most if whole) + more


def _sq_norm(gradient: Tensor) -> Tensor:
    return squared_norm([gradient], device=gradient.device)
