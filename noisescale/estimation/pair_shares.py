# SPDX-License-Identifier: Apache-2.0
"""The mean share of the products of different parts, where the parts of a step weigh unequally."""

from __future__ import annotations

from noisescale.state import State

_MOST_SIZES = 8
"""Batch sizes with a mean of their own. If there are more, as of tokens, all have one mean."""

_ALL_SIZES = 0.0


class PairShares(State):
    """Means of 1 - Σw² over the steps of each batch size, w the weights of a step's parts.

    With g = Σ w·g_part the products of different parts, |g|² - Σ w²|g_part|², are on average
    |G|²·(1 - Σw²). Both sides are averaged over steps and then divided: a quotient of each step is
    biased where the weights vary, and has a heavy tail where one part has nearly all of the weight.

    Examples:
        >>> shares = PairShares()
        >>> shares.mean(16, 0.75), shares.mean(16, 0.25), shares.mean(8, 0.3)
        (0.75, 0.5, 0.3)
    """

    def __init__(self) -> None:
        self._means: dict[float, tuple[int, float]] = {}

    def mean(self, batch_size: float, share: float) -> float:
        """Add a step's share; return the mean over the steps of its batch size so far."""
        key = _ALL_SIZES if _ALL_SIZES in self._means else batch_size
        steps, mean = self._means.get(key, (0, 0.0))
        mean += (share - mean) / (steps + 1)
        self._means[key] = steps + 1, mean
        if len(self._means) > _MOST_SIZES:
            total = sum(steps for steps, _ in self._means.values())
            mean = sum(steps * mean for steps, mean in self._means.values()) / total
            self._means = {_ALL_SIZES: (total, mean)}
        return mean

    def state_dict(self) -> list[list[float]]:
        """Return everything that `load_state_dict` needs, in builtins."""
        return [[size, *mean] for size, mean in self._means.items()]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Continue from a `state_dict`."""
        self._means = {size: (int(steps), mean) for size, steps, mean in state}
