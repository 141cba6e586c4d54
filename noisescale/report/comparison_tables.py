# SPDX-License-Identifier: Apache-2.0
"""A comparison of trials: its answers in a few lines, and its tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from noisescale.bounded import Bounded
from noisescale.report.numbers import (
    SECONDS,
    Duration,
    banded,
    bounds,
    count,
    duration_for,
    number,
    plural,
    rough,
    two_digits,
)
from noisescale.report.tables import Cell, Line, Table, cell_of
from noisescale.time_to_result.comparison import Comparison, Standing
from noisescale.time_to_result.outcomes import Outcome
from noisescale.time_to_result.profiles import PerformanceProfile
from noisescale.time_to_result.swept import Swept, SweptBatch

NOT_REACHED = "not reached"


def headline_of(c: Comparison) -> list[tuple[str, str]]:
    """Return the answers: who was first, by how much, and what the batch sizes show."""
    return [
        *(line for workload in c.workloads for line in _first(c, workload)),
        *_scores(c),
        *(line for each in c.sweeps for line in _batch_sizes(c, each)),
    ]


def comparison_tables(c: Comparison, *, every_trial: bool = False) -> list[Table]:
    """Return the tables: standings, scores, batch sizes; with `every_trial` all runs."""
    found = [_standings(c, workload) for workload in c.workloads]
    if c.scores is not None and c.profile is not None:
        found.append(_score_table(c, c.profile, c.scores))
    found += [_sweep_table(c, each) for each in c.sweeps]
    if every_trial:
        found += [_trials(c, workload) for workload in c.workloads]
    return found


def whose(submission: str, workload: str) -> str:
    """Name a submission on a workload, as far as either has a name."""
    return " on ".join(filter(None, (submission, workload)))


def named(standing: Standing) -> str:
    """Name a submission, or its only run if it has no name."""
    return standing.submission or standing.best.trial.name


def time_unit(c: Comparison) -> Duration:
    """Return the unit that suits the seconds of all trials that reached a goal."""
    seconds = [
        outcome.at("seconds")
        for standing in c.standings
        for outcome in standing.outcomes
        if outcome.reached is not None
    ]
    known = [value / 3600 for value in seconds if value > 0]
    return duration_for(Bounded(hours, hours, hours) for hours in known) if known else SECONDS


def _of(c: Comparison, workload: str) -> list[Standing]:
    return [standing for standing in c.standings if standing.workload == workload]


def _first(c: Comparison, workload: str) -> Iterator[tuple[str, str]]:
    standings, goal = _of(c, workload), c.goals[workload]
    name = f"{workload}: {goal}" if workload else str(goal)
    reached = [standing for standing in standings if standing.best.reached is not None]
    if not reached:
        yield name, f"reached by no run. {_nearest(standings)}"
        return
    first = reached[0]
    tied = [each for each in reached if each.best.at(c.clock) == first.best.at(c.clock)]
    by = " and ".join(named(each) for each in tied)
    when = _when(c, first.best)
    yield name, f"reached {when}" if len(standings) == 1 else f"first reached by {by}, {when}"
    for standing in reached[len(tied) :][:3]:
        yield f"  {named(standing)}", f"{_when(c, standing.best)}{_over(c, standing, first)}"
    missed = [named(standing) for standing in standings if standing.best.reached is None]
    if missed:
        yield "  not by", ", ".join(missed)


def _nearest(standings: Sequence[Standing]) -> str:
    known = [
        outcome
        for standing in standings
        for outcome in standing.outcomes
        if not math.isnan(outcome.best)
    ]
    if not known:
        return "No run measured the metric."
    sign = 1 if known[0].goal.side == "<" else -1
    nearest = min(known, key=lambda outcome: sign * outcome.best)
    steps = plural(nearest.best_step, "step")
    return f"The nearest was {number(nearest.best)}, by {nearest.trial.name} after {steps}"


def _when(c: Comparison, outcome: Outcome) -> str:
    said = [f"after {plural(outcome.at('steps'), 'step')}"]
    for clock in ("examples", "epochs"):
        if not math.isnan(at := outcome.at(clock)):
            said.append(f"{number(at)} {clock}")
    if not math.isnan(at := outcome.at("seconds")):
        unit = time_unit(c)
        said.append(f"{unit(at / 3600)} {unit.name}")
    return ", ".join(said)


def _over(c: Comparison, slower: Standing, first: Standing) -> str:
    """How much slower, over the first; only if one of both is the reference."""
    if c.reference not in (slower.submission, first.submission):
        return ""
    if c.reference == slower.submission:
        return f": {named(first)} is {_times(first.speed_up)} as fast"
    return f": {_times(slower.speed_up)} as fast"


def _times(ratio: Bounded) -> str:
    said = f"{banded(ratio, two_digits)} times"
    if ratio.low <= 1 <= ratio.high:
        said += " (which may be chance)"
    return said


def _scores(c: Comparison) -> Iterator[tuple[str, str]]:
    if c.scores is None:
        return
    ranked = sorted(c.scores.items(), key=lambda item: -item[1])
    yield "AlgoPerf score", ", ".join(f"{name} {score:.4f}" for name, score in ranked[:5])


def _batch_sizes(c: Comparison, each: Swept) -> Iterator[tuple[str, str]]:
    name = whose(each.submission, each.workload) or "Batch sizes"
    if each.regimes is None:
        yield name, "the goal was reached at fewer than two batch sizes that count: no regimes"
        return
    found = each.regimes
    yield name, f"critical batch size {banded(found.critical_batch_size)}"
    yield "  perfect scaling", _border(each, found.perfect_up_to, "up to")
    yield "  largest useful", f"{_border(each, found.maximal_from, 'about')}: more saves few steps"


def _border(each: Swept, border: Bounded, word: str) -> str:
    """A border of regimes, as far as the sweep shows it."""
    smallest, largest = (batch.batch_size for batch in (each.batches[0], each.batches[-1]))
    if math.isinf(border.high):
        return f"not seen up to {count(largest)}: at least {number(border.low)}"
    if border.low == 0:
        return f"not seen down to {count(smallest)}: at most {number(border.high)}"
    return f"{word} {banded(border)}"


def _standings(c: Comparison, workload: str) -> Table:
    standings, unit = _of(c, workload), time_unit(c)
    clocks = _clocks(standings)
    headings = ["submission", "runs", "reached", "diverged"]
    headings += [unit.name if clock == "seconds" else clock for clock in clocks]
    several = len(standings) > 1
    if several:
        headings.append(f"times as fast as {c.reference or 'the first'}")
    headings.append("batch size, learning rate")
    lines = []
    for standing in standings:
        cells = [
            Cell(named(standing)),
            *(
                Cell(count(n))
                for n in (len(standing.outcomes), standing.reached, standing.diverged)
            ),
            *(_clock_cell(standing, clock, unit) for clock in clocks),
        ]
        if several:
            cells.append(cell_of(standing.speed_up) if standing.speed_up.known else Cell(""))
        cells.append(Cell(_setting(standing.best)))
        lines.append(Line(cells, []))
    title = f"When {c.goals[workload]} was reached"
    return Table(
        f"{title}: {workload}" if workload else title, headings, lines, _notes(c, standings)
    )


def _notes(c: Comparison, standings: Sequence[Standing]) -> list[str]:
    notes = []
    if any(len(standing.outcomes) > 1 for standing in standings):
        notes.append(
            "Of each submission the setting that was first; of its repetitions the middle one."
        )
    if len(standings) > 1:
        clock = "time" if c.clock == "seconds" else c.clock
        notes.append(
            f"Times as fast: by {clock}, with what {100 * c.confidence:g} % of repetitions with"
            " other seeds would stay within."
        )
    return notes


def _clocks(standings: Sequence[Standing]) -> list[str]:
    """The clocks that are known of a trial that reached the goal; steps always are."""
    best = [standing.best for standing in standings if standing.best.reached is not None]
    known = [
        clock
        for clock in ("examples", "epochs", "seconds")
        if any(not math.isnan(outcome.at(clock)) for outcome in best)
    ]
    return ["steps", *known]


def _clock_cell(standing: Standing, clock: str, unit: Duration) -> Cell:
    at = standing.best.at(clock)
    if math.isinf(at):
        if clock != "steps":
            return Cell("")
        nearest = standing.best.best
        return Cell(NOT_REACHED, "" if math.isnan(nearest) else f"best {number(nearest)}")
    if math.isnan(at):
        return Cell("")
    write: Callable[[float], str] = (lambda x: unit(x / 3600)) if clock == "seconds" else number
    reached = [outcome.at(clock) for outcome in standing.counting if outcome.reached is not None]
    ends = Bounded(at, min(reached), max(reached))
    return Cell(write(at), bounds(ends, write) if len(reached) > 1 else "")


def _setting(outcome: Outcome) -> str:
    trial = outcome.trial
    known = [value for value in (trial.batch_size, trial.learning_rate) if not math.isnan(value)]
    return ", ".join(f"{value:,.4g}" for value in known)


def _score_table(c: Comparison, profile: PerformanceProfile, scores: Mapping[str, float]) -> Table:
    at = {ratio: profile.at(ratio) for ratio in (1.0, 1.5, 2.0, 4.0)}
    lines = [
        Line(
            [
                Cell(name),
                Cell(f"{score:.4f}"),
                *(Cell(f"{100 * shares[name]:.0f} %") for shares in at.values()),
            ],
            [],
        )
        for name, score in sorted(scores.items(), key=lambda item: -item[1])
    ]
    headings = ["submission", "score"]
    headings += ["the fastest" if ratio == 1 else f"within {ratio:g} x" for ratio in at]
    note = (
        "Score: the mean over workloads of max(0, (4 - r)/3), with r the time over the fastest"
        " submission's (AlgoPerf). Then the share of workloads on which a submission is the"
        " fastest, or within so many times its time."
    )
    return Table(f"All {plural(len(c.workloads), 'workload')}", headings, lines, [note])


def _sweep_table(c: Comparison, each: Swept) -> Table:
    lines = [
        Line(
            [
                Cell(count(batch.batch_size)),
                _steps(batch),
                Cell(_regime(each, batch)),
                Cell(_rate(batch)),
                Cell(_tried(batch)),
                *(Cell(count(n)) for n in (batch.tried, batch.reached, batch.diverged)),
            ],
            [],
        )
        for batch in each.batches
    ]
    headings = ["batch size", "steps", "regime", "best learning rate", "tried"]
    headings += ["runs", "reached", "diverged"]
    title = f"Steps to {c.goals[each.workload]} against batch size"
    name = whose(each.submission, each.workload)
    return Table(f"{title}: {name}" if name else title, headings, lines, [])


def _steps(batch: SweptBatch) -> Cell:
    if batch.best.reached is None:
        return Cell(NOT_REACHED)
    steps = batch.best.at("steps")
    ends = Bounded(steps, min(batch.steps), max(batch.steps))
    return Cell(number(steps), bounds(ends, rough))


def _regime(each: Swept, batch: SweptBatch) -> str:
    return "" if each.regimes is None else each.regimes.of(batch.batch_size)


def _rate(batch: SweptBatch) -> str:
    rate = batch.best.trial.learning_rate
    if math.isnan(rate) or batch.best.reached is None:
        return ""
    edge = {"low": " (the lowest)", "high": " (the highest)"}.get(batch.edge, "")
    return f"{rate:.3g}{edge}"


def _tried(batch: SweptBatch) -> str:
    rates = batch.learning_rates
    return f"{rates[0]:.3g} to {rates[-1]:.3g}" if len(rates) > 1 else ""


def _trials(c: Comparison, workload: str) -> Table:
    standings, unit = _of(c, workload), time_unit(c)
    clocks = _clocks(standings)
    every = [outcome for standing in standings for outcome in standing.outcomes]
    every.sort(key=lambda outcome: outcome.at(c.clock))
    lines = []
    for outcome in every:
        trial = outcome.trial
        alone = Standing(trial.submission, workload, (outcome,), (outcome,), outcome, _NOTHING)
        cells = [
            Cell(trial.name),
            Cell(trial.submission),
            Cell(_setting(outcome)),
            *(_clock_cell(alone, clock, unit) for clock in clocks),
            Cell("" if math.isnan(outcome.best) else number(outcome.best)),
        ]
        lines.append(Line(cells, ["diverged"] if trial.diverged else []))
    headings = ["run", "submission", "batch size, learning rate"]
    headings += [unit.name if clock == "seconds" else clock for clock in clocks]
    title = f"All {plural(len(every), 'run')}"
    title = f"{title} on {workload}" if workload else title
    return Table(title, [*headings, "best value"], lines, [])


_NOTHING = Bounded(math.nan, math.nan, math.nan)
