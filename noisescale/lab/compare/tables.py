# SPDX-License-Identifier: Apache-2.0
"""The tables of a comparison: standings, scores, batch sizes and all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from noisescale.lab.compare.measurements import CLOCKS
from noisescale.lab.compare.names import Clock, clock_of, name_of, name_of_sweep
from noisescale.lab.compare.outcomes import Outcome, Standing
from noisescale.lab.compare.profiles import PerformanceProfile
from noisescale.lab.compare.swept import Swept, SweptBatch
from noisescale.report.document import Cell, Line, Table, cell_of
from noisescale.report.numbers import count, number, plural
from noisescale.tradeoff.regimes import Regimes

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

Column = Callable[[Outcome], str]
"""Writes a cell of an outcome."""

NOT_REACHED = "not reached"
UNDECIDED = "between"


def tables_of(c: Comparison) -> list[Table]:
    """Return all tables: standings and scores, then as details batch sizes and all runs."""
    found = [_standings(c, each) for each in c.workloads if len(c.outcomes_of(each)) > 1]
    if found:
        found[-1] = replace(found[-1], notes=_notes(c))
    if c.scores is not None and c.profile is not None:
        found.append(_score_table(c, c.profile, c.scores))
    found += [replace(sweep_table(c, each), detail=True) for each in c.sweeps]
    repeated = any(len(standing.outcomes) > 1 for standing in c.standings)
    if repeated or len(c.standings) == 1:
        found += [_trials(c, workload) for workload in c.workloads]
    return found


def _standings(c: Comparison, workload: str) -> Table:
    standings = c.standings_of(workload)
    clocks = _clocks(c, standings)
    settings = _settings([each.best for each in standings], words_of=c.outcomes_of(workload))
    several = len(standings) > 1
    diverged = any(standing.diverged for standing in standings)
    headings = ["submission", "reached by", *(["diverged"] if diverged else [])]
    headings += [
        *(clock.unit_name for clock in clocks),
        *(["speed-up"] if several else []),
        *settings,
    ]
    lines = []
    for standing in standings:
        reached_by = f"{count(standing.reached)} of {count(len(standing.outcomes))}"
        cells = [
            Cell(name_of(standing)),
            Cell(reached_by),
            *([Cell(count(standing.diverged))] if diverged else []),
            *(_clock_cell(standing.best, standing.counting, clock) for clock in clocks),
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


def _clocks(c: Comparison, standings: Sequence[Standing]) -> list[Clock]:
    """Return the clocks that are known of a trial that reached the goal; steps always are.

    Examples stand for epochs, too.
    """
    best = [standing.best for standing in standings if standing.best.reached is not None]
    known = [n for n in CLOCKS[1:] if any(not math.isnan(outcome.at(n)) for outcome in best)]
    if "examples" in known and "epochs" in known:
        known.remove("epochs")
    return [clock_of(c, name) for name in ("steps", *known)]


def _clock_cell(best: Outcome, counting: Sequence[Outcome], clock: Clock) -> Cell:
    """Write when the best outcome reached the goal, with the first and the last that count."""
    at = best.at(clock.name)
    if best.reached is None and clock.name == "steps":
        return Cell(NOT_REACHED, "" if math.isnan(best.best) else f"best {best.best:.3g}")
    if not math.isfinite(at):
        return Cell("")
    return Cell(clock.write(at), _span([o.at(clock.name) for o in counting], clock.write))


def _span(found: Sequence[float], write: Callable[[float], str]) -> str:
    """Write the least and the largest finite value; "" if both are the same, or there is none."""
    known = [value for value in found if math.isfinite(value)]
    if not known:
        return ""
    low, high = write(min(known)), write(max(known))
    return "" if low == high else f"{low}–{high}"


def _settings(outcomes: Sequence[Outcome], *, words_of: Sequence[Outcome]) -> dict[str, Column]:
    """Return columns of what was set: sizes and rates that are known, and words that differ.

    An optimizer that gave each submission its name has no column. A setting may be a word in some
    runs, and a number in others.
    """
    columns: dict[str, Column] = {
        "batch size": lambda o: "" if math.isnan(o.trial.batch_size) else count(o.trial.batch_size),
        "learning rate": lambda o: _rate_text(o.trial.learning_rate),
    }
    known = {name: write for name, write in columns.items() if any(map(write, outcomes))}
    return known | _words(words_of)


def _words(outcomes: Sequence[Outcome]) -> dict[str, Column]:
    """Return columns of the settings in words in which these outcomes differ."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.words)
    trials = [outcome.trial for outcome in outcomes]
    if all(trial.optimizer.lower() == trial.submission.lower() for trial in trials):
        names.pop("optimizer", None)
    columns = {name: partial(_word, name) for name in names}
    return {name: write for name, write in columns.items() if len({*map(write, outcomes)}) > 1}


def _word(name: str, outcome: Outcome) -> str:
    value = outcome.words.get(name, outcome.trial.hyperparameters.get(name, ""))
    return value if isinstance(value, str) else f"{value:g}"


def _rate_text(rate: float) -> str:
    return "" if math.isnan(rate) else f"{rate:.3g}"


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


def sweep_table(c: Comparison, each: Swept) -> Table:
    """Return the table of a sweep: steps, regime and learning rates of each batch size."""
    diverged = any(batch.diverged for batch in each.batches)
    outcomes = [o for o in c.outcomes_of(each.workload) if o.trial.submission == each.submission]
    words = _words(outcomes)
    lines = [
        Line(
            [
                Cell(count(batch.batch_size)),
                _steps(batch),
                Cell("" if each.regimes is None else regime_at(each.regimes, batch.batch_size)),
                Cell(_rate(batch)),
                Cell(_search_range(batch)),
                *(Cell(write(batch.best) if batch.steps else "") for write in words.values()),
                Cell(f"{count(batch.reached)} of {count(batch.tried)}"),
                *([Cell(count(batch.diverged))] if diverged else []),
            ],
            [],
        )
        for batch in each.batches
    ]
    headings = ["batch size", "steps", "regime", "best learning rate", "tried"]
    headings += [*(f"best {name}" for name in words), "reached by"]
    headings += ["diverged"] if diverged else []
    title = f"Steps to {c.goals[each.workload]} against batch size"
    name = name_of_sweep(each)
    notes = []
    if each.regimes is not None:
        notes.append(
            "Regimes: perfect scaling, diminishing returns, maximal data parallelism. With a"
            " question mark the bounds of the regimes do not decide it."
        )
    return Table(f"{title}: {name}" if name else title, headings, lines, notes)


def regime_at(regimes: Regimes, batch_size: float) -> str:
    """Name the regime of a batch size, with a question mark where the bounds do not decide it."""
    if (found := regimes.regime_of(batch_size)) != UNDECIDED:
        return found.split()[0]
    if batch_size <= regimes.perfect_up_to.value:
        return "perfect?"
    return "maximal?" if batch_size >= regimes.maximal_from.value else "diminishing?"


def _steps(batch: SweptBatch) -> Cell:
    if batch.best.reached is None:
        return Cell(NOT_REACHED)
    return Cell(count(batch.best.at("steps")), _span(batch.steps, count))


def _rate(batch: SweptBatch) -> str:
    rate = _rate_text(batch.best.trial.learning_rate)
    if not rate or batch.best.reached is None:
        return ""
    edge = {"low": " (the lowest)", "high": " (the highest)"}.get(batch.edge, "")
    return f"{rate}{' (the only one)' if len(batch.learning_rates) == 1 else edge}"


def _search_range(batch: SweptBatch) -> str:
    rates = batch.learning_rates
    return f"{rates[0]:.3g} to {rates[-1]:.3g}" if len(rates) > 1 else ""


def _trials(c: Comparison, workload: str) -> Table:
    clocks = _clocks(c, c.standings_of(workload))
    every = sorted(c.outcomes_of(workload), key=lambda outcome: outcome.at(c.clock))
    settings = _settings(every, words_of=every)
    lines = [
        Line(
            [
                Cell(outcome.trial.name),
                Cell(outcome.trial.submission),
                *(Cell(write(outcome)) for write in settings.values()),
                *(_clock_cell(outcome, [outcome], clock) for clock in clocks),
                Cell("" if math.isnan(outcome.best) else f"{outcome.best:.3g}"),
            ],
            ["diverged"] if outcome.trial.diverged else [],
        )
        for outcome in every
    ]
    title = f"All {plural(len(every), 'run')}"
    headings = [
        "run",
        "submission",
        *settings,
        *(clock.unit_name for clock in clocks),
        "best value",
    ]
    title = f"{title} on {workload}" if workload else title
    return Table(title, headings, lines, detail=True)
