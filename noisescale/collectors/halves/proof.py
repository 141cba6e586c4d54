# SPDX-License-Identifier: Apache-2.0
"""The proof of a cut: with the factor ½ on all rows, the gradient must halve.

A path that the cut misses gives the factor 1, and a path that is cut twice gives ¼. Setting rows to
zero would not show paths that are cut twice, and doubling the gradient may overflow in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch import Tensor

from noisescale.collectors.squared_norms import squared_norm, sums_of

FACTOR = 0.5
"""The factor on all rows."""

LARGEST_ERROR = 0.01
"""The most error that a proof allows, as a share of |g/2|²."""

_NAMED = 3


class Proof:
    """Compares the gradients of a pass with the factor ½ with those of the training's own pass."""

    def __init__(self, names: Sequence[str], left_out: Collection[int]) -> None:
        self._names = names
        self._left_out = left_out
        self._halved: dict[int, Tensor] = {}
        self._errors: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self._seen_twice = False

    def take_halved(self, index: int, gradient: Tensor) -> None:
        """Keep a gradient of the pass with the factor ½: see `row_pass`."""
        self._halved[index] = gradient.detach().clone()

    def take_own(self, index: int, gradient: Tensor) -> None:
        """Compare a halved gradient with that of the training's own pass, and release both."""
        if index in self._left_out:
            return
        if index in self._totals:
            self._seen_twice = True
        half = FACTOR * gradient.detach()
        halved = self._halved.pop(index, None)
        self._totals[index] = _sq_norm(half)
        self._errors[index] = self._totals[index] if halved is None else _sq_norm(halved - half)

    @property
    def reached(self) -> bool:
        """Whether the training's own pass reached a parameter."""
        return bool(self._totals)

    def share(self) -> float:
        """Return the error as a share of |g/2|², read from the device; NaN if it is not known."""
        if not self._totals or self._seen_twice:
            return math.nan
        device = next(iter(self._totals.values())).device
        both = [list(some.values()) for some in (self._errors, self._totals)]
        errors, totals = sums_of(both, device=device).tolist()
        return errors / totals if 0 < totals < math.inf and errors < math.inf else math.nan

    def worst(self) -> str:
        """Name the parameters with the largest errors, and their share of the error."""
        errors = {self._names[i]: float(error) for i, error in self._errors.items()}
        whole = sum(errors.values())
        most = sorted(errors, key=errors.__getitem__, reverse=True)[:_NAMED]
        more = f" and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
        return ", ".join(f"{name} ({errors[name] / whole:.0%})" for name in most if whole) + more


def _sq_norm(gradient: Tensor) -> Tensor:
    return squared_norm([gradient], device=gradient.device)
