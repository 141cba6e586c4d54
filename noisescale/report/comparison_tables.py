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
    two_digits,
)
from noisescale.report.tables import Cell, Line, Table, cell_of
from noisescale.time_to_result.comparison import Comparison, Standing
from noisescale.time_to_result.outcomes import Outcome
from noisescale.time_to_result.profiles import PerformanceProfile
from noisescale.time_to_result.regimes import Regimes
from noisescale.time_to_result.swept import Swept, SweptBatch

NOT_REACHED = "not reached"
UNDECIDED = "between"

_MOST_NAMED = 3
"""Submissions that an answer names, and submissions after the first that have an answer."""


def headline_of(c: Comparison) -> list[tuple[str, str]]:
    """Return the answers: who was first, by how much, and what the batch sizes show."""
    return [
        *(line for workload in c.workloads for line in _first(c, workload)),
        *_scores(c),
        *(line for each in c.sweeps for line in sweep_answers(each)),
    ]


def standings_tables(c: Comparison) -> list[Table]:
    """Return the tables that are always shown: the standings on each workload, and the scores."""
    found = [_standings(c, each) for each in c.workloads if len(_outcomes(c, each)) > 1]
    if found:
        found[-1].notes.extend(_notes(c))
    if c.scores is not None and c.profile is not None:
        found.append(_score_table(c, c.profile, c.scores))
    return found


def comparison_tables(c: Comparison, *, every_trial: bool = True) -> list[Table]:
    """Return all tables: standings, scores, batch sizes; with `every_trial` all runs."""
    found = [*standings_tables(c), *(_sweep_table(c, each) for each in c.sweeps)]
    if every_trial:
        found += [_trials(c, workload) for workload in c.workloads]
    return found


def whose(submission: str, workload: str) -> str:
    """Name a submission on a workload, as far as either has a name."""
    return " on ".join(filter(None, (submission, workload)))


def named(standing: Standing) -> str:
    """Name a submission, or its only run if it has no name."""
    return standing.submission or standing.best.trial.name


def listed(names: Sequence[str]) -> str:
    """Return names in a sentence.

    Examples:
        >>> listed(["sgd", "adam", "lion"])
        'sgd, adam and lion'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def few(names: Sequence[str]) -> str:
    """Return names in a sentence, of many the first ones alone.

    Examples:
        >>> few(["sgd", "adam", "lion", "lars"]), few([f"run {k}" for k in range(300)])
        ('sgd, adam, lion and lars', 'run 0, run 1, run 2 and 297 others')
    """
    if len(names) <= _MOST_NAMED + 1:
        return listed(names)
    return listed([*names[:_MOST_NAMED], f"{len(names) - _MOST_NAMED:,} others"])


def time_unit(c: Comparison) -> Duration:
    """Return the unit that suits the seconds of all trials that reached a goal."""
    hours = [
        outcome.at("seconds") / 3600
        for standing in c.standings
        for outcome in standing.outcomes
        if outcome.reached is not None and outcome.at("seconds") > 0
    ]
    return duration_for(Bounded(each, each, each) for each in hours) if hours else SECONDS


def _of(c: Comparison, workload: str) -> list[Standing]:
    return [standing for standing in c.standings if standing.workload == workload]


def _outcomes(c: Comparison, workload: str) -> list[Outcome]:
    return [outcome for standing in _of(c, workload) for outcome in standing.outcomes]


def _first(c: Comparison, workload: str) -> Iterator[tuple[str, str]]:
    standings, goal = _of(c, workload), c.goals[workload]
    name = f"{workload}: {goal}" if workload else str(goal)
    reached = [standing for standing in standings if standing.best.reached is not None]
    if not reached:
        yield name, _missed(_outcomes(c, workload))
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


def _standings(c: Comparison, workload: str) -> Table:
    standings, unit = _of(c, workload), time_unit(c)
    clocks, settings = _clocks(standings), _settings([standing.best for standing in standings])
    several = len(standings) > 1
    diverged = any(standing.diverged for standing in standings)
    headings = ["submission", "reached by", *(["diverged"] if diverged else [])]
    headings += [*_clock_names(clocks, unit), *(["speed-up"] if several else []), *settings]
    lines = []
    for standing in standings:
        reached_by = f"{count(standing.reached)} of {count(len(standing.outcomes))}"
        cells = [
            Cell(named(standing)),
            Cell(reached_by),
            *([Cell(count(standing.diverged))] if diverged else []),
            *(_clock_cell(standing.best, standing.counting, clock, unit) for clock in clocks),
            *([cell_of(standing.speed_up)] if several else []),
            *(Cell(write(standing.best)) for write in settings.values()),
        ]
        lines.append(Line(cells, []))
    title = f"When {c.goals[workload]} was reached"
    return Table(f"{title}: {workload}" if workload else title, headings, lines, [])


def _notes(c: Comparison) -> list[str]:
    notes = []
    if any(len(standing.outcomes) > 1 for standing in c.standings):
        notes.append(
            "The numbers of a submission are those of its fastest setting of hyperparameters, and"
            " of the middle one of its repetitions."
        )
    if any(not math.isnan(each.best.trial.batch_size) for each in c.standings):
        notes.append(
            "Batch sizes are taken as global, over all devices. Those of runs without a monitor are"
            " hyperparameters."
        )
    if len(c.submissions) > 1:
        clock = "time" if c.clock == "seconds" else c.clock
        notes.append(
            f"Speed-up: over {c.reference or 'the first'}, by {clock}. Its bounds come from other"
            " seeds and from the gaps between measurements"
            f"{', not from the load of machines' if c.clock == 'seconds' else ''}."
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
    if "examples" in known and "epochs" in known:
        known.remove("epochs")  # They say the same.
    return ["steps", *known]


def _clock_names(clocks: Sequence[str], unit: Duration) -> list[str]:
    return [unit.name if clock == "seconds" else clock for clock in clocks]


def _clock_cell(best: Outcome, counting: Sequence[Outcome], clock: str, unit: Duration) -> Cell:
    """When the best outcome reached the goal, between the first and the last of those counting."""
    at = best.at(clock)
    if best.reached is None and clock == "steps":
        return Cell(NOT_REACHED, "" if math.isnan(best.best) else f"best {best.best:.3g}")
    if not math.isfinite(at):
        return Cell("")
    write: Callable[[float], str] = (lambda x: unit(x / 3600)) if clock == "seconds" else count
    return Cell(write(at), _span([outcome.at(clock) for outcome in counting], write))


def _span(found: Sequence[float], write: Callable[[float], str]) -> str:
    """Write the least and the largest finite value; "" if both are the same, or there is none."""
    known = [value for value in found if math.isfinite(value)]
    if not known:
        return ""
    low, high = write(min(known)), write(max(known))
    return "" if low == high else f"{low}–{high}"


def _settings(outcomes: Sequence[Outcome]) -> dict[str, Callable[[Outcome], str]]:
    """Return columns of what was set, as far as it is known of any outcome."""

    def batch_size(outcome: Outcome) -> str:
        size = outcome.trial.batch_size
        return "" if math.isnan(size) else count(size)

    def learning_rate(outcome: Outcome) -> str:
        rate = outcome.trial.learning_rate
        return "" if math.isnan(rate) else f"{rate:.3g}"

    columns = {"batch size": batch_size, "learning rate": learning_rate}
    return {name: write for name, write in columns.items() if any(map(write, outcomes))}


def _score_table(c: Comparison, profile: PerformanceProfile, scores: Mapping[str, float]) -> Table:
    at = {ratio: profile.at(ratio) for ratio in (1.0, 1.5, 2.0, 4.0)}
    lines = [
        Line(
            [
                Cell(name),
                Cell(f"{score:.4f}"),
                *(Cell(f"{100 * shares[name]:.0f} %") for shares in at.values()),
                Cell("" if math.isnan(c.speed_ups[name]) else number(c.speed_ups[name])),
            ],
            [],
        )
        for name, score in sorted(scores.items(), key=lambda item: -item[1])
    ]
    headings = ["submission", "score"]
    headings += ["the fastest" if ratio == 1 else f"within {ratio:g} x" for ratio in at]
    headings.append("speed-up")
    note = (
        "Score: the mean over workloads of max(0, (4 - r)/3), with r the time over the fastest"
        " submission's (AlgoPerf). Then the share of workloads on which a submission is the"
        " fastest, or within 1.5, 2 or 4 times the fastest's time. Speed-up: over"
        f" {c.reference or 'the first'}, the geometric mean over workloads; a missed goal counts as"
        " the budget and one more, and without a budget there is none."
    )
    title = f"All {plural(len(profile.workloads), 'workload')}"
    if variants := len(c.workloads) - len(profile.workloads):
        title += f", checked by {plural(variants, 'variant')}"
    return Table(title, headings, lines, [note])


def _sweep_table(c: Comparison, each: Swept) -> Table:
    diverged = any(batch.diverged for batch in each.batches)
    lines = [
        Line(
            [
                Cell(count(batch.batch_size)),
                _steps(batch),
                Cell("" if each.regimes is None else regime_at(each.regimes, batch.batch_size)),
                Cell(_rate(batch)),
                Cell(_tried(batch)),
                Cell(f"{count(batch.reached)} of {count(batch.tried)}"),
                *([Cell(count(batch.diverged))] if diverged else []),
            ],
            [],
        )
        for batch in each.batches
    ]
    headings = ["batch size", "steps", "regime", "best learning rate", "tried", "reached by"]
    headings += ["diverged"] if diverged else []
    title = f"Steps to {c.goals[each.workload]} against batch size"
    name = whose(each.submission, each.workload)
    notes = []
    if each.regimes is not None:
        notes.append(
            "Regimes: perfect scaling, diminishing returns, maximal data parallelism. With a"
            " question mark the bounds of the regimes do not decide it."
        )
    return Table(f"{title}: {name}" if name else title, headings, lines, notes)


def regime_at(regimes: Regimes, batch_size: float) -> str:
    """Name the regime of a batch size, with a question mark where the bounds do not decide it."""
    if (found := regimes.of(batch_size)) != UNDECIDED:
        return found.split()[0]
    if batch_size <= regimes.perfect_up_to.value:
        return "perfect?"
    return "maximal?" if batch_size >= regimes.maximal_from.value else "diminishing?"


def _steps(batch: SweptBatch) -> Cell:
    if batch.best.reached is None:
        return Cell(NOT_REACHED)
    return Cell(count(batch.best.at("steps")), _span(batch.steps, count))


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
    unit, clocks = time_unit(c), _clocks(_of(c, workload))
    every = sorted(_outcomes(c, workload), key=lambda outcome: outcome.at(c.clock))
    settings = _settings(every)
    lines = [
        Line(
            [
                Cell(outcome.trial.name),
                Cell(outcome.trial.submission),
                *(Cell(write(outcome)) for write in settings.values()),
                *(_clock_cell(outcome, [outcome], clock, unit) for clock in clocks),
                Cell("" if math.isnan(outcome.best) else f"{outcome.best:.3g}"),
            ],
            ["diverged"] if outcome.trial.diverged else [],
        )
        for outcome in every
    ]
    title = f"All {plural(len(every), 'run')}"
    headings = ["run", "submission", *settings, *_clock_names(clocks, unit), "best value"]
    return Table(f"{title} on {workload}" if workload else title, headings, lines, [])
