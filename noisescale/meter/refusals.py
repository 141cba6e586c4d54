# SPDX-License-Identifier: Apache-2.0
"""What callbacks say where they cannot measure, whatever the trainer."""

from __future__ import annotations

from typing import NoReturn

from noisescale.checks import refuse


def refuse_setting(
    use: str, setting: str, value: str, reason: str, remedy: str, error: type[Exception]
) -> NoReturn:
    """Raise the error of a setting of the trainer; `use` is what cannot be done under it."""
    refuse(setting, f"be one that {use} under", f"{value}: {reason}", remedy, error=error)


def nothing_to_measure(callback: str, reason: Exception, remedy: str) -> str:
    """Return the warning where one process trains, whose batches have no halves to compare."""
    return (
        f"{callback} has nothing to measure: one process trains, one gradient a step has nothing"
        f" to be compared with, and the halves of a batch cannot be compared: {reason} Training"
        f" goes on without it. Accumulate two or more micro-batches a step {remedy}"
    )
