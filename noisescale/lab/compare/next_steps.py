# SPDX-License-Identifier: Apache-2.0
"""What to do after a comparison, in sentences."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from noisescale.lab.compare.comparison import ComparisonRecord
from noisescale.lab.compare.names import full_list, name_of_sweep
from noisescale.report.numbers import count

_FARTHER = {"low": ("lower", "lowest"), "high": ("higher", "highest")}


def next_steps_of(c: ComparisonRecord, chance: tuple[str, ...]) -> list[str]:
    """Return what to do next.

    Args:
        c: The comparison.
        chance: The submissions whose order may be chance.
    """
    if not c.reached:
        return list(_goals_that_were_reached(c))
    found = list(_rates_to_try(c))
    if chance:
        again = f"train {full_list(chance)} again with other seeds, and compare all runs"
        found.append(f"{again}. Runs of the same settings are repetitions.")
    return [f"{'And' if number else 'Next'}: {step}" for number, step in enumerate(found)]


def _goals_that_were_reached(c: ComparisonRecord) -> Iterator[str]:
    """Yield the command with a goal that the best run reached, if there is one workload."""
    known = [o for w in c.workloads for o in c.outcomes_of(w) if not math.isnan(o.best)]
    if len(c.workloads) > 1 or not known:
        return
    best = min(known, key=lambda outcome: outcome.rank(c.clock))
    goal = f"{best.goal.metric}{best.goal.side}={best.best!r}"
    yield (
        f"Next: ask for the value that the best run reached\n"
        f"  noisescale compare RUNS --goal {shlex.quote(goal)}"
    )


def _rates_to_try(c: ComparisonRecord) -> Iterator[str]:
    """Yield where the best learning rate has no worse one beyond it."""
    for each in c.sweeps:
        for edge, (farther, farthest) in _FARTHER.items():
            sizes = [batch.batch_size for batch in each.batches if batch.edge == edge]
            if sizes:
                at = "batch sizes" if len(sizes) > 1 else "batch size"
                yield (
                    f"try {farther} learning rates for {name_of_sweep(each) or 'the sweep'}: at"
                    f" {at} {full_list([count(size) for size in sizes])} the {farthest} one was"
                    " the best."
                )
