# SPDX-License-Identifier: Apache-2.0
"""What a search says: a document, for a search that is finished and for one under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noisescale.lab.jobs.job_progress import progress_tables
from noisescale.lab.tune.cost_front import CostFront, Setting
from noisescale.lab.tune.files import FRONT, TRIALS
from noisescale.lab.tune.tables import cost_unit, front_table, settings_of, tables_of
from noisescale.lab.tune.tune_record import TuneRecord
from noisescale.report.document import Document, Figure, Statement
from noisescale.report.numbers import Duration, four_digits, hours, plural

MOST_UNDER_WAY = 12
"""Lines of the front that are shown while the search goes on."""

_HOW_TO_READ = (
    "Cost is the time of training on one device, times the devices, without the start of the"
    " process and without evaluations. The front has the trainings that no cheaper one equals. A"
    " result may be lucky: repeat the setting that you choose with other seeds. A power of 0.5 says"
    " that a parameter doubles where the cost is four times as high; where its interval includes"
    " 0, the parameter may as well stay as it is."
)


def document_of(found: TuneRecord) -> Document:
    """Return what a search says. While it is under way, the front has its best lines alone."""
    front, place = found.front, found.progress.place

    def figures() -> Sequence[Figure]:
        from noisescale.lab.tune.figures import figures_of

        return figures_of(front)

    if not found.finished:
        shown = [front_table(front, MOST_UNDER_WAY)] if front.front else []
        return Document(
            title=f"Search for the best {front.metric}: under way",
            headline=progress_sentence(found),
            answers=list(statements_of(front)),
            tables=[*shown, *progress_tables(found.progress)],
            figures=figures,
            doubts=found.doubts,
            how_to_read=_HOW_TO_READ,
            status="under way",
            next=[found.progress.join],
        )
    headline = headline_of(front)
    written = [("Trainings", TRIALS), ("Front", FRONT)]
    return Document(
        title=f"{headline}: cost and result",
        headline=headline,
        answers=[*statements_of(front), Statement("Trainings", progress_sentence(found))],
        tables=[*tables_of(front), *progress_tables(found.progress)],
        figures=figures,
        doubts=found.doubts,
        how_to_read=_HOW_TO_READ,
        written=[f"{what}: {place.output / name}" for what, name in written if place.output],
        next=_next(found),
    )


def headline_of(front: CostFront) -> str:
    """Return the answer of a finished search in one sentence."""
    trainings = plural(len(front.trials), "training")
    if front.best is None:
        return f"No training has a result, of {trainings}"
    return f"Best {front.metric} of {trainings}: {four_digits(front.best.value)}"


def _next(found: TuneRecord) -> list[str]:
    """Return how to search on, if a training has a result."""
    if found.front.best is None:
        return []
    limits = [] if found.most_trials is None else [f"--trials {2 * found.most_trials}"]
    limits += [] if found.budget is None else [f"--budget {2 * found.budget:.3g}h"]
    return [f"Next: search on with the same command and {' '.join(limits)}"] if limits else []


def progress_sentence(found: TuneRecord) -> str:
    """Return how far a search is, what it has cost, and the best result."""
    front, progress = found.front, found.progress
    parts = [f"{plural(found.successes, 'training')} done"]
    if found.most_trials is not None:
        parts[0] = f"{found.successes} of {plural(found.most_trials, 'training')} done"
    parts += [f"{failed} without a result"] if (failed := len(front.failures)) else []
    parts += [] if found.finished else [f"{len(progress.running)} under way"]
    of = f" of {hours(found.budget)}" if found.budget is not None else ""
    said = f"{', '.join(parts)}, {hours(progress.device_hours)}{of} device-hours spent"
    if found.finished or front.best is None:
        return said
    return f"{said}. Best {front.metric}: {_result(front.best, cost_unit(front))}"


def statements_of(front: CostFront) -> Iterator[Statement]:
    """Yield the best result, the result of the module's own settings, and what equals it."""
    best = front.best
    if best is None:
        yield Statement("Best", "no training has a result yet")
        return
    unit = cost_unit(front)

    def statement(label: str, said: str, setting: Setting) -> Statement:
        parts = [Statement("with", settings_of(front, setting))]
        return Statement(label, said, basis="measured", parts=parts)

    yield statement("Best", f"{front.metric} {_result(best, unit)}", best)
    own = next((each for each in front.settings if each.first.number == 0), None)
    if own is None:
        return
    said = f"{front.metric} {_result(own, unit)}"
    yield Statement("Your own settings", said, basis="measured")
    sign = -1.0 if front.maximize else 1.0
    as_good = next(each for each in front.front if sign * each.value <= sign * own.value)
    if as_good.cost < own.cost / 1.05:
        less = f"{own.cost / as_good.cost:.1f} times less cost: {_result(as_good, unit)}"
        yield statement("As good for less", less, as_good)


def _result(each: Setting, unit: Duration) -> str:
    return f"{four_digits(each.value)} for {unit(each.cost / 3600)} device-{unit.name}"
