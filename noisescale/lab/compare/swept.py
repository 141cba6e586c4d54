# SPDX-License-Identifier: Apache-2.0
"""Steps to result against batch size: the best trial at each, the law, the regimes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from noisescale.lab.compare.outcomes import Outcome, best_setting, middle
from noisescale.tradeoff.regimes import Regimes, find_regimes

DRAWN = 4
"""Learning rates seem drawn by chance if they rise, and fall, by more than this factor."""

SOME = 0.1
"""Batch sizes seem drawn along with learning rates if so many pairs rise, and as many fall."""


class SweptBatch(NamedTuple):
    """What was found at one batch size."""

    batch_size: float
    steps: tuple[float, ...]
    """The steps to the goal of each repetition of the best setting that reached it after step 0."""
    best: Outcome
    """The middle repetition of the best setting."""
    learning_rates: tuple[float, ...]
    """All that were tried with the optimizer and the other words of the best, in rising order."""
    tried: int
    """Number of trials."""
    reached: int
    diverged: int
    edge: str
    """"low" or "high" if no lower, or no higher, learning rate was tried than the best; else ""."""
    unsearched: bool = False
    """Whether the goal was reached, and at most one learning rate is known, which nothing says to
    be the best one: see `sweep_of`."""

    @property
    def searched(self) -> bool:
        """Whether several learning rates are known."""
        return len(self.learning_rates) > 1

    @property
    def counts(self) -> bool:
        """Whether the goal was reached after step 0, by a learning rate that was searched.

        That is one between others, or the only one, by a rule or from a search elsewhere.
        """
        return bool(self.steps) and not self.edge and not self.unsearched


@dataclass(frozen=True, eq=False)
class Swept:
    """One submission on one workload, over its batch sizes."""

    submission: str
    workload: str
    batches: tuple[SweptBatch, ...]
    """One for each batch size, in rising order."""
    regimes: Regimes | None
    """None if the goal was reached at fewer than two batch sizes that count."""
    warnings: tuple[str, ...]

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest batch size."""
        return self.batches[0].batch_size, self.batches[-1].batch_size


def sweep_of(
    submission: str, workload: str, outcomes: Sequence[Outcome], confidence: float = 0.95
) -> Swept | None:
    """Return what several batch sizes did; None if fewer than two are known.

    A batch size whose best learning rate is at the edge of those that were tried does not count
    for the law, as Shallue et al. ask: a better one may lie beyond. Neither does one with a single
    rate, or an unknown one, where two batch sizes or more have several: it was not searched.

    Where at most one batch size has several rates, the others may have theirs from a rule or from
    searches elsewhere, and count. Each single rate that counts widens the bounds, see
    `find_regimes`. Rates that go up and down more than fourfold, in a tenth of the pairs of batch
    sizes each, seem drawn along with the batch sizes, and do not count.

    References:
        Shallue et al. 2019, arXiv:1811.03600, sections 3.2 and 4.
    """
    known = {outcome.trial.batch_size for outcome in outcomes}
    sizes = sorted(size for size in known if not math.isnan(size))
    if len(sizes) < 2:
        return None
    batches = tuple(
        _batch(size, [outcome for outcome in outcomes if outcome.trial.batch_size == size])
        for size in sizes
    )
    if sum(batch.searched for batch in batches) > 1 or _were_drawn(batches):
        batches = tuple(b._replace(unsearched=bool(b.steps) and not b.searched) for b in batches)
    counting = [batch for batch in batches if batch.counts]
    points = [(b.batch_size, steps, b.searched) for b in counting for steps in b.steps]
    regimes = None
    if len(counting) > 1:
        at, steps, searched = zip(*points, strict=True)
        regimes = find_regimes(at, steps, confidence=confidence, searched=searched)
    return Swept(submission, workload, batches, regimes, _warnings(batches, regimes))


def _were_drawn(batches: Sequence[SweptBatch]) -> bool:
    """Return whether the best learning rates go up and down, so that no rule gave them.

    Neither a rule nor a search at each batch size has them both rise and fall so far.
    """
    rates = [b.best.trial.learning_rate for b in batches if b.learning_rates]
    pairs = [(low, high) for k, low in enumerate(rates) for high in rates[k + 1 :]]
    rising = sum(high > DRAWN * low for low, high in pairs)
    falling = sum(low > DRAWN * high for low, high in pairs)
    return min(rising, falling) >= max(SOME * len(pairs), 1)


def _batch(size: float, outcomes: Sequence[Outcome]) -> SweptBatch:
    repeated = best_setting(outcomes, "steps")
    best = middle(repeated, "steps")
    alike = [o.trial.learning_rate for o in outcomes if o.words == best.words]
    rates = sorted({rate for rate in alike if rate > 0})
    edge = ""
    if len(rates) > 1 and best.reached is not None:
        edge = {rates[0]: "low", rates[-1]: "high"}.get(best.trial.learning_rate, "")
    return SweptBatch(
        size,
        tuple(steps for o in repeated if 0 < (steps := o.at("steps")) < math.inf)
        if 0 < best.at("steps") < math.inf
        else (),
        best,
        tuple(rates),
        len(outcomes),
        sum(outcome.reached is not None for outcome in outcomes),
        sum(outcome.trial.diverged for outcome in outcomes),
        edge,
    )


def _warnings(batches: Sequence[SweptBatch], regimes: Regimes | None) -> tuple[str, ...]:
    found = []
    at_edge = [batch for batch in batches if batch.edge]
    if at_edge:
        named = ", ".join(f"{batch.batch_size:,.6g}" for batch in at_edge)
        found.append(
            f"At batch size {named} the best learning rate is at the edge of those that were"
            " tried, so the law leaves it out. Search beyond the edge."
        )
    if unsearched := sum(batch.unsearched for batch in batches):
        found.append(
            f"At {unsearched} of {len(batches)} batch sizes at most one learning rate is known, so"
            " the law leaves them out. Search the learning rate at each batch size, and log it."
        )
    single = [batch for batch in batches if batch.counts and not batch.searched]
    if single and regimes is not None:
        found.append(
            f"At {len(single)} of {len(batches)} batch sizes the learning rate was not searched."
            " A batch size with too low or too high a learning rate needs more steps. The bounds"
            " are wider for that. Search the learning rate at each batch size. If each rate is the"
            " best of a search, give the other runs of that search, too."
        )
    missed = [batch for batch in batches if not batch.reached]
    if missed:
        named = ", ".join(f"{batch.batch_size:,.6g}" for batch in missed)
        found.append(f"No run reached the goal at batch size {named}.")
    return tuple(found)
