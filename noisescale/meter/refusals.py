# SPDX-License-Identifier: Apache-2.0
"""What callbacks say where they cannot measure, whatever the trainer."""

from __future__ import annotations


def unsupported(callback: str, setting: str, value: str, reason: str, remedy: str) -> str:
    """Return the error of a setting of the trainer under which there is nothing to measure."""
    return (
        f"`{setting}` must be one that {callback} can measure under, got {value}: {reason}."
        f" {remedy}"
    )


def nothing_to_measure(callback: str, reason: Exception, remedy: str) -> str:
    """Return the warning where one process trains, whose batches have no halves to compare."""
    return (
        f"{callback} has nothing to measure: one process trains, one gradient a step has nothing"
        f" to be compared with, and the halves of a batch cannot be compared: {reason} Training"
        f" goes on without it. Accumulate two or more micro-batches a step {remedy}"
    )
