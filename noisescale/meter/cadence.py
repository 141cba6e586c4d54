# SPDX-License-Identifier: Apache-2.0
"""Cadence: which steps of a run are measured."""

from __future__ import annotations

from typing import Literal

from noisescale.checks import is_whole, refuse

_WITH_A_PASS = 10
"""One step in so many is measured where that takes a backward pass more, and "auto" decides."""


class Cadence:
    """Measure the first step and every n-th from there.

    Args:
        every_n_steps: n, or "auto": every step, but one in ten where that takes a backward pass
            more.

    Raises:
        ValueError: If n is not a whole number of steps.

    Example:
        >>> cadence = Cadence("auto")
        >>> [steps for steps in range(30) if steps % cadence.every_n_steps(True) == 0]
        [0, 10, 20]
    """

    def __init__(self, every_n_steps: int | Literal["auto"]) -> None:
        self._asked_for = checked_every_n_steps(every_n_steps)

    def every_n_steps(self, takes_a_pass: bool) -> int:
        """Return n, where a measured step takes a backward pass more or does not."""
        if self._asked_for == "auto":
            return _WITH_A_PASS if takes_a_pass else 1
        return self._asked_for


def checked_every_n_steps(every_n_steps: int | Literal["auto"]) -> int | Literal["auto"]:
    """Return n as Python's own number, or "auto"; a ValueError if it is neither."""
    if every_n_steps == "auto":
        return "auto"
    if not is_whole(every_n_steps) or every_n_steps < 1:
        remedy = 'Pass 1 to measure every step, or "auto".'
        refuse("every_n_steps", "be at least 1", repr(every_n_steps), remedy)
    return int(every_n_steps)
