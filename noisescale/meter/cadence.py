# SPDX-License-Identifier: Apache-2.0
"""Which optimizer steps are measured."""

from __future__ import annotations

from typing import Literal

from noisescale.checks import is_whole

_WITH_A_PASS = 10
"""One step in so many is measured where that takes a backward pass more, and "auto" decides."""


class Cadence:
    """Measure the first step and every n-th from there.

    Args:
        every_n_steps: n, or "auto": every step, but one in ten where that takes a backward pass
            more.

    Example:
        >>> cadence = Cadence("auto")
        >>> [steps for steps in range(30) if cadence.is_due(steps, takes_a_pass=True)]
        [0, 10, 20]
    """

    def __init__(self, every_n_steps: int | Literal["auto"]) -> None:
        self._asked_for = every_n_steps

    def every_n_steps(self, *, takes_a_pass: bool) -> int:
        """Return n, where a measured step takes a backward pass more or does not."""
        if self._asked_for != "auto":
            return self._asked_for
        return _WITH_A_PASS if takes_a_pass else 1

    def is_due(self, steps: int, *, takes_a_pass: bool) -> bool:
        """Whether the step after the first `steps` is to be measured. Ranks must agree."""
        return steps % self.every_n_steps(takes_a_pass=takes_a_pass) == 0


def checked_every_n_steps(value: int | Literal["auto"]) -> int | Literal["auto"]:
    """Return `value`, or raise a ValueError that says what is wrong with it."""
    if value == "auto":
        return "auto"
    if not is_whole(value) or value < 1:
        raise ValueError(
            f"`every_n_steps` must be at least 1, got {value!r}. Pass 1 to measure every step,"
            ' or "auto".'
        )
    return int(value)
