# SPDX-License-Identifier: Apache-2.0
"""The answers of a comparison, in a few lines: who was first, and what the batch sizes show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from noisescale.bounded import Bounded
from noisescale.lab.compare.comparison import Comparison
from noisescale.lab.compare.comparison_words import few, named, time_unit, whose
from noisescale.lab.compare.outcomes import Outcome, Standing
from noisescale.lab.compare.swept import Swept
from noisescale.report.numbers import banded, bounds, count, number, plural, two_digits

_MOST_NAMED = 3
"""Submissions after the first that have an answer."""

_MOST_SWEPT = 6
"""Sweeps over batch sizes that have an answer."""


def headline_of(c: Comparison) -> list[tuple[str, str]]:
    """Return the answers: who was first, by how much, and what the batch sizes show."""
    return [
        *(line for workload in c.workloads for line in _first(c, workload)),
        *_scores(c),
        *_sweeps(c),
    ]


def _sweeps(c: Comparison) -> Iterator[tuple[str, str]]:
    """What batch sizes show; of many sweeps the first ones that show something."""
    if len(c.sweeps) <= _MOST_SWEPT:
        yield from (line for each in c.sweeps for line in sweep_answers(each))
        return
    showing = [each for each in c.sweeps if each.regimes is not None]
    for each in showing[:_MOST_SWEPT]:
        yield from sweep_answers(each)
    if not showing:
        yield "Batch sizes", f"none of {len(c.sweeps)} sweeps shows its regimes: see the tables"
    elif left := len(c.sweeps) - len(showing[:_MOST_SWEPT]):
        yield "Batch sizes", f"{plural(left, 'further sweep')}: see the tables"


def _first(c: Comparison, workload: str) -> Iterator[tuple[str, str]]:
    standings, goal = c.standings_of(workload), c.goals[workload]
    name = f"{workload}: {goal}" if workload else str(goal)
    reached = [standing for standing in standings if standing.best.reached is not None]
    if not reached:
        yield name, _missed(c.outcomes_of(workload))
        return
    first = reached[0]
    tied = [each for each in reached if each.best.at(c.clock) == first.best.at(c.clock)]
    by = few([named(standing) for standing in tied])
    when = _when(c, first.best)
    yield name, f"reached {when}" if len(standings) == 1 else f"first reached by {by}, {when}"
    for standing in reached[len(tied) :][:_MOST_NAMED]:
        yield f"  {named(standing)}", f"{_when(c, standing.best)}{_over(c, standing, first)}"
    missed = [named(standing) for standing in standings if standing.best.reached is None]
    if missed:
        yield "  not by", few(missed)


def _missed(outcomes: Sequence[Outcome]) -> str:
    some = sum(outcome.reached is not None for outcome in outcomes)
    if some:
        runs = f"{count(some)} of {plural(len(outcomes), 'run')}"
        return f"reached by {runs}, but by no run that stands for its submission"
    return f"reached by no run. {_nearest(outcomes)}"


def _nearest(outcomes: Sequence[Outcome]) -> str:
    known = [outcome for outcome in outcomes if not math.isnan(outcome.best)]
    if not known:
        return "No run measured the metric"
    sign = 1 if known[0].goal.side == "<" else -1
    nearest = min(known, key=lambda outcome: sign * outcome.best)
    steps = plural(nearest.best_step, "step")
    return f"The nearest was {nearest.best:.3g}, by {nearest.trial.name} after {steps}"


def _when(c: Comparison, outcome: Outcome) -> str:
    said = [f"after {plural(outcome.at('steps'), 'step')}"]
    for clock in ("examples", "epochs"):
        if not math.isnan(at := outcome.at(clock)):
            said.append(plural(at, clock.removesuffix("s")))
    if not math.isnan(at := outcome.at("seconds")):
        unit = time_unit(c)
        said.append(f"{unit(at / 3600)} {unit.name}")
    return ", ".join(said)


def _over(c: Comparison, slower: Standing, first: Standing) -> str:
    """How fast the one is that is not the reference, if the other one is."""
    if c.reference == slower.submission and first.speed_up.known:
        return f". {named(first)} is {_times(first.speed_up)}"
    if c.reference == first.submission and slower.speed_up.known:
        return f". It is {_times(slower.speed_up)}"
    return ""


def _times(ratio: Bounded) -> str:
    chance = "may be chance" if ratio.low <= 1 <= ratio.high else ""
    around = ": ".join(filter(None, (bounds(ratio, two_digits), chance)))
    said = f"{two_digits(ratio.value)} times as fast"
    return f"{said} ({around})" if around else said


def _scores(c: Comparison) -> Iterator[tuple[str, str]]:
    if c.scores is None:
        return
    ranked = sorted(c.scores.items(), key=lambda item: -item[1])
    yield (
        f"AlgoPerf score by {'time' if c.clock == 'seconds' else c.clock}",
        ", ".join(f"{name} {score:.4f}" for name, score in ranked[:5]),
    )


def sweep_answers(each: Swept) -> Iterator[tuple[str, str]]:
    """Yield what several batch sizes say: the critical one, and the borders of the regimes."""
    name = whose(each.submission, each.workload) or "Batch sizes"
    found = each.regimes
    if found is None:
        yield name, "the goal was reached at fewer than two batch sizes that count: no regimes"
        return
    yield name, f"critical batch size {_border(each, found.critical_batch_size)}"
    yield "  perfect scaling", _border(each, found.perfect_up_to, "up to")
    useful = _border(each, found.maximal_from, "about")
    if math.isfinite(found.maximal_from.high):
        useful += ". Larger batches save few more steps"
    yield "  largest useful", useful


def _border(each: Swept, border: Bounded, word: str = "") -> str:
    """A border of regimes, as far as the sweep shows it."""
    smallest, largest = (batch.batch_size for batch in (each.batches[0], each.batches[-1]))
    if border.low > 0 and math.isfinite(border.high):
        return f"{word} {banded(border)}".lstrip()
    if border.low < smallest and math.isinf(border.high):
        return f"not seen in batch sizes from {count(smallest)} to {count(largest)}"
    known = f"at least {number(border.low)}" if border.low else f"at most {number(border.high)}"
    if not smallest <= border.value <= largest:
        return known
    return f"{word} {number(border.value)} ({known})".lstrip()
