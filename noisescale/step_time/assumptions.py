# SPDX-License-Identifier: Apache-2.0
"""What is assumed about step times that were not measured."""

from __future__ import annotations

from collections.abc import Sequence


def assumptions(held: Sequence[str], *, checked: bool) -> tuple[str, ...]:
    """Return a sentence for each assumption, with its range.

    Args:
        held: Parameters that the timings do not determine, by their names in `PARAMETERS`.
        checked: Whether there are more timings than the fitted parameters need.

    Examples:
        >>> assumptions(["growth", "growth_across"], checked=True)
        ('How synchronisation grows with the devices was not timed: ...',)
    """
    found = []
    if "fixed" in held:
        found.append(
            "How the time of a micro-batch depends on its size was not timed: half of it is assumed"
            " to be fixed (range: none to all)."
        )
    if "sync" in held:
        found.append(
            "How long devices synchronise was not timed: a quarter of the largest micro-batch's"
            " time is assumed (range: none to all of it)"
            + (
                "; across nodes half of it (none to four times it)." * ("sync_across" in held)
                or "."
            )
        )
    elif "sync_across" in held:
        found.append(
            "How long nodes synchronise was not timed: half of the largest micro-batch's time is"
            " assumed (range: none to four times it)."
        )
    if "growth" in held or ("growth_across" in held and "sync_across" not in held):
        found.append(
            "How synchronisation grows with the devices was not timed: each device beyond the"
            " second is assumed to add 1/16 of the time for two devices (range: nothing to 1/4)."
        )
    if "overlap" in held and not {"sync", "sync_across"} <= {*held}:
        found.append(
            "How much of synchronisation overlaps with the computing of gradients was not timed: no"
            " overlap is assumed (range: none to nearly all)."
        )
    if "update" in held:
        found.append(
            "The part of a step that does not depend on the number of micro-batches was not timed:"
            " none is assumed (range: none to a quarter of the largest micro-batch's time)."
        )
    if not checked:
        found.append(
            "There are no more timings than the model needs: they are assumed to repeat to 1 %."
        )
    return tuple(found)
