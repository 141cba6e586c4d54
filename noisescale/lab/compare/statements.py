# SPDX-License-Identifier: Apache-2.0
"""What a comparison says: who was first, in the headline and below, and what batch sizes show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from noisescale.bounded import Bounded
from noisescale.lab.compare.measurements import CLOCKS
from noisescale.lab.compare.names import clock_of, name_of, name_of_sweep, short_list
from noisescale.lab.compare.outcomes import Outcome, Standing
from noisescale.lab.compare.swept import Swept
from noisescale.report.document import Statement
from noisescale.report.numbers import bounds, count, number, plural, two_digits, with_bounds

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

_MOST_FOLLOWERS = 3
"""The most submissions after the first that have a line."""

_MOST_SWEEPS = 6
"""The most sweeps over batch sizes that have lines."""

_UNKNOWN = "the goal was reached at fewer than two batch sizes that count"


def headline_of(c: Comparison) -> str:
    """Return who was first, as a sentence without its point."""
    if not c.reached:
        goals = {str(goal) for goal in c.goals.values()}
        return f"No run reached {goals.pop() if len(goals) == 1 else 'its goal'}"
    if len(c.workloads) > 1:
        return _headline_of_workloads(c)
    standings = [standing for standing in c.standings if standing.best.reached is not None]
    goal = c.goals[c.workloads[0]]
    if not standings:
        return f"{goal} was reached by some runs only"
    first = short_list([name_of(each) for each in _leaders(c, standings)])
    said = f"{first} reached {goal}{' first' if len(c.standings) > 1 else ''}"
    return f"{said}, which may be chance" if leaders_by_chance(c) else said


def _leaders(c: Comparison, standings: Sequence[Standing]) -> list[Standing]:
    """Return those who were first."""
    return [each for each in standings if each.best.at(c.clock) == standings[0].best.at(c.clock)]


def leaders_by_chance(c: Comparison) -> tuple[str, ...]:
    """Return the first and the next submission of one workload if their order may be chance.

    It may be if the bounds of the lead over the next include 1.
    """
    standings = [standing for standing in c.standings if standing.best.reached is not None]
    tied = len(_leaders(c, standings)) if standings else 0
    if len(c.workloads) > 1 or tied == len(standings):
        return ()  # one submission, or all of them at once
    first, following = standings[0], standings[tied]
    lead = _lead_over(c, following, first)
    chance = lead is not None and lead.low <= 1 <= lead.high
    return (name_of(first), name_of(following)) if chance else ()


def _headline_of_workloads(c: Comparison) -> str:
    workloads = plural(len(c.workloads), "workload")
    if not c.scores or not any(c.scores.values()):
        return f"Time to result on {workloads}"
    names = {standing.submission: name_of(standing) for standing in c.standings}
    best = max(c.scores.values())
    first = [names[submission] for submission, score in c.scores.items() if score == best]
    verb = "have" if len(first) > 1 else "has"
    return f"{short_list(first)} {verb} the highest score on {workloads}: {best:.2f}"


def statements_of(c: Comparison) -> list[Statement]:
    """Return the answers: who was first, by how much, and what the batch sizes show."""
    return [
        *(statement_of_workload(c, workload) for workload in c.workloads),
        *_scores(c),
        *_sweeps(c),
    ]


def statement_of_workload(c: Comparison, workload: str) -> Statement:
    """Say who was first on a workload. The parts are the others, and who missed the goal."""
    standings, goal = c.standings_of(workload), c.goals[workload]
    label = f"{workload}: {goal}" if workload else str(goal)
    reached = [standing for standing in standings if standing.best.reached is not None]
    if not reached:
        return Statement(label, _failure_of(c.outcomes_of(workload)), basis="measured")
    first, tied = reached[0], _leaders(c, reached)
    by = short_list([name_of(standing) for standing in tied])
    when = _time_of(c, first.best)
    said = f"reached {when}" if len(standings) == 1 else f"first reached by {by}, {when}"
    parts = [_follower(c, each, first) for each in reached[len(tied) :][:_MOST_FOLLOWERS]]
    missed = [name_of(standing) for standing in standings if standing.best.reached is None]
    if missed:
        parts.append(Statement("not by", short_list(missed)))
    return Statement(label, said, basis="measured", parts=parts)


def _follower(c: Comparison, slower: Standing, first: Standing) -> Statement:
    """Say when a submission reached the goal that was not the first to reach it.

    The speed-up is that of the first over this one, or of this one over the first, as one of both
    is the reference.
    """
    said, ratio = _time_of(c, slower.best), _lead_over(c, slower, first)
    if ratio is not None:
        who = name_of(first) if c.reference == slower.submission else "It"
        said += f". {who} is {_ratio(ratio)}"
    return Statement(name_of(slower), said, ratio, basis="measured")


def _lead_over(c: Comparison, slower: Standing, first: Standing) -> Bounded | None:
    """Return the speed-up of the first over another, or of that over the first; None if unknown."""
    if c.reference == slower.submission and first.speed_up.known:
        return first.speed_up
    if c.reference == first.submission and slower.speed_up.known:
        return slower.speed_up
    return None


def _failure_of(outcomes: Sequence[Outcome]) -> str:
    """Say that no submission reached the goal, and which run was the nearest."""
    some = sum(outcome.reached is not None for outcome in outcomes)
    if some:
        runs = f"{count(some)} of {plural(len(outcomes), 'run')}"
        return f"reached by {runs}, but by no run that stands for its submission"
    return f"reached by no run. {_nearest_miss(outcomes)}"


def _nearest_miss(outcomes: Sequence[Outcome]) -> str:
    known = [outcome for outcome in outcomes if not math.isnan(outcome.best)]
    if not known:
        return "No run measured the metric"
    sign = 1 if known[0].goal.side == "<" else -1
    nearest = min(known, key=lambda outcome: sign * outcome.best)
    steps = plural(nearest.best_step, "step")
    return f"The nearest was {nearest.best:.3g}, by {nearest.trial.name} after {steps}"


def _time_of(c: Comparison, outcome: Outcome) -> str:
    """Write when a run reached the goal, in all clocks that are known."""
    known = [name for name in CLOCKS if not math.isnan(outcome.at(name))]
    return "after " + ", ".join(clock_of(c, name).say(outcome.at(name)) for name in known)


def _ratio(ratio: Bounded) -> str:
    """Write a speed-up with its bounds. If these include 1, it may be chance."""
    chance = "may be chance" if ratio.low <= 1 <= ratio.high else ""
    around = ": ".join(filter(None, (bounds(ratio, two_digits), chance)))
    said = f"{two_digits(ratio.value)} times as fast"
    return f"{said} ({around})" if around else said


def _scores(c: Comparison) -> Iterator[Statement]:
    """Yield the scores of the best five submissions over all workloads."""
    if c.scores is None:
        return
    ranked = sorted(c.scores.items(), key=lambda item: -item[1])
    label = f"AlgoPerf score by {'time' if c.clock == 'seconds' else c.clock}"
    yield Statement(label, ", ".join(f"{name} {score:.4f}" for name, score in ranked[:5]))


def _sweeps(c: Comparison) -> Iterator[Statement]:
    """Yield what batch sizes show. Of many sweeps only the first that show something."""
    if len(c.sweeps) <= _MOST_SWEEPS:
        yield from map(_sweep, c.sweeps)
        return
    showing = [each for each in c.sweeps if each.regimes is not None]
    yield from map(_sweep, showing[:_MOST_SWEEPS])
    if not showing:
        said = f"none of {len(c.sweeps)} sweeps shows its regimes: see the tables"
        yield Statement("Batch sizes", said)
    elif left := len(c.sweeps) - len(showing[:_MOST_SWEEPS]):
        yield Statement("Batch sizes", f"{plural(left, 'further sweep')}: see the tables")


def _sweep(each: Swept) -> Statement:
    """Return what a sweep shows below its name: the critical batch size, then the borders."""
    label = name_of_sweep(each) or "Batch sizes"
    if each.regimes is None:
        return Statement(label, f"{_UNKNOWN}: no regimes")
    critical, *borders = statements_of_sweep(each)
    said = f"critical batch size {critical.sentence}"
    return Statement(label, said, critical.bounds, basis="measured", parts=borders)


def statements_of_sweep(each: Swept) -> list[Statement]:
    """Return what a sweep shows: the critical batch size, and the borders of the regimes."""
    found = each.regimes
    if found is None:
        return [Statement("critical batch size", f"unknown: {_UNKNOWN}")]
    critical, perfect, useful = found.critical_batch_size, found.perfect_up_to, found.maximal_from
    after = ". Larger batches save few more steps" if math.isfinite(useful.high) else ""
    said = {
        "critical batch size": (_border(each, critical), critical),
        "perfect scaling": (_border(each, perfect, "up to"), perfect),
        "largest useful": (_border(each, useful, "about") + after, useful),
    }
    return [Statement(name, *known, basis="measured") for name, known in said.items()]


def _border(each: Swept, border: Bounded, word: str = "") -> str:
    """Write a border of regimes, as far as the sweep shows it."""
    smallest, largest = (batch.batch_size for batch in (each.batches[0], each.batches[-1]))
    if border.low > 0 and math.isfinite(border.high):
        return f"{word} {with_bounds(border)}".lstrip()
    if border.low < smallest and math.isinf(border.high):
        return f"not seen in batch sizes from {count(smallest)} to {count(largest)}"
    known = f"at least {number(border.low)}" if border.low else f"at most {number(border.high)}"
    if not smallest <= border.value <= largest:
        return known
    return f"{word} {number(border.value)} ({known})".lstrip()
