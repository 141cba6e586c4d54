# SPDX-License-Identifier: Apache-2.0
"""What is said about the step time where it was not timed."""

from __future__ import annotations

from collections.abc import Sequence


def assumptions(held: Sequence[str], *, checked: bool) -> tuple[str, ...]:
    """Return a sentence for each thing that had to be assumed, with its range.

    Args:
        held: Parameters that the timings do not tell, by their names in `PARAMETERS`.
        checked: Whether there are more timings than were needed for the others.

    Example:
        >>> assumptions(["growth", "growth_across"], checked=True)
        ('How synchronisation grows with the devices was not timed: ...',)
    """
    found = []
    if "fixed" in held:
        found.append(
            "How the time of a micro-batch depends on its size was not timed: half of it is taken"
            " to be fixed, at least none of it and at most all."
        )
    if "sync" in held:
        found.append(
            "How long devices synchronise was not timed: a quarter of the largest micro-batch's"
            " time is taken, at least none and at most all of it"
            + ("; across nodes half of it, at most four times it." * ("sync_across" in held) or ".")
        )
    elif "sync_across" in held:
        found.append(
            "How long nodes synchronise was not timed: half of the largest micro-batch's time is"
            " taken, at least none and at most four times it."
        )
    if "growth" in held or ("growth_across" in held and "sync_across" not in held):
        found.append(
            "How synchronisation grows with the devices was not timed: each beyond the second is"
            " taken to add 1/16 of what two take, at least nothing and at most 1/4."
        )
    if "overlap" in held and not {"sync", "sync_across"} <= {*held}:
        found.append(
            "How much of synchronisation overlaps with the computing of gradients was not timed:"
            " none is taken to, at most nearly all."
        )
    if "update" in held:
        found.append(
            "What a step costs but once, however many micro-batches it has, was not timed: nothing"
            " is taken, at most a quarter of the largest micro-batch's time."
        )
    if not checked:
        found.append(
            "There are no more timings than the model needs: they are taken to repeat to 1 %."
        )
    return tuple(found)
