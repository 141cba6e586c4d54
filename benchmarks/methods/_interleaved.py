# SPDX-License-Identifier: Apache-2.0
"""One way to combine ranks against the plain one, timed in turn on gloo ranks over loopback."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist


class Round(NamedTuple):
    """What one call costs on a rank."""

    seconds: float
    """Until all ranks are done."""
    cpu_seconds: float
    """Of all threads of this rank, which other work on the machine changes less."""
    bytes: int
    """That the loopback interface sends."""


Timed = list[Round]

PLAIN, AGAIN = "plain", "plain again"


def timed(work: Callable[[], object]) -> Round:
    """Call the work on all ranks."""
    dist.barrier()
    before, began, cpu = carried(), time.perf_counter(), time.process_time()
    work()
    dist.barrier()
    return Round(time.perf_counter() - began, time.process_time() - cpu, carried() - before)


def in_turn(
    plain: Callable[[], object],
    other: Callable[[], object],
    rounds: int,
    prepare: Callable[[], object],
) -> dict[str, Timed]:
    """Time on this rank the plain way, the other one and the plain one again, in each round.

    Args:
        plain: What both are compared with.
        other: The other way.
        rounds: One more is run, to warm up.
        prepare: Called before each of the three, untimed.
    """
    found: dict[str, Timed] = {PLAIN: [], "other": [], AGAIN: []}
    for _ in range(rounds + 1):
        for what, times in found.items():
            prepare()
            times.append(timed(other if what == "other" else plain))
    return found


def compared(results: list[dict[str, Timed]], plain: str, other: str) -> dict[str, Any]:
    """Return medians over rounds of the slowest rank in each, and of ratios within a round.

    Args:
        results: Of each rank, from `in_turn`.
        plain: What the plain way is called in the names of the values.
        other: What the other way is called.
    """
    slowest: dict[str, list[float]] = {}
    cpu_of: dict[str, list[float]] = {}
    bytes_of: dict[str, list[int]] = {}
    for what in results[0]:
        of_rounds = list(zip(*(found[what] for found in results), strict=True))[1:]
        slowest[what] = [max(each.seconds for each in ranks) for ranks in of_rounds]
        cpu_of[what] = [sum(each.cpu_seconds for each in ranks) for ranks in of_rounds]
        bytes_of[what] = [ranks[0].bytes for ranks in of_rounds]

    def ratio(of: dict[str, list[Any]], what: str) -> float:
        pairs = zip(of[what], of[PLAIN], strict=True)
        return round(statistics.median([a / b for a, b in pairs]), 4)

    def a_rank(what: str) -> int:
        return int(statistics.median(bytes_of[what]) / len(results))

    return {
        f"seconds_{plain}": round(statistics.median(slowest[PLAIN]), 4),
        f"seconds_{other}": round(statistics.median(slowest["other"]), 4),
        "ratio": ratio(slowest, "other"),
        "ratio_of_second_copy": ratio(slowest, AGAIN),
        "cpu_ratio": ratio(cpu_of, "other"),
        "cpu_ratio_of_second_copy": ratio(cpu_of, AGAIN),
        "bytes_ratio": ratio(bytes_of, "other"),
        f"bytes_a_rank_{plain}": a_rank(PLAIN),
        f"bytes_a_rank_{other}": a_rank("other"),
        "load": round(psutil.getloadavg()[0], 1),
    }


def carried() -> int:
    """Bytes that the loopback interface has sent."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
