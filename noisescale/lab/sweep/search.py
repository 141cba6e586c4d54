# SPDX-License-Identifier: Apache-2.0
"""The search for the fewest steps at one batch size: in rounds, each from the last one's results.

A round is the same whoever trains it, and in whatever order. So a sweep by one worker and a sweep
by many end with the same table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from noisescale.lab.compare.outcomes import middle
from noisescale.lab.jobs.jobs import FAILED
from noisescale.lab.parameters import LEARNING_RATE, LOG, Parameter, points, range_parameter
from noisescale.lab.sweep.results import DIVERGED, TrialResult

SLACK = 1.5
"""A training has lost once it has taken this many times the steps of the best one.

Repetitions of the best setting may turn out slower than it did first, so the best steps alone
would be too sharp a limit.
"""

WIDER = 8.0
"""The factor by which the range of learning rates grows beyond an edge."""

MOST_WIDER = 4
"""The range grows this many times at most."""

SEED_STEP = 1009
"""The distance between the seeds of two rounds' points."""

Point = Mapping[str, float]
Key = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Search:
    """How settings are searched at each batch size."""

    parameters: tuple[Parameter, ...]
    trials: int
    """Points of the first round."""
    repeats: int
    """Trainings of the best point, with different seeds."""
    seed: int = 0

    @property
    def later(self) -> int:
        """Points of a round that widens or refines."""
        return max(2, self.trials // 3)

    @property
    def expected_trainings(self) -> int:
        """Trainings at a batch size, if no range has to be widened."""
        return self.trials + self.later + self.repeats - 1


@dataclass(frozen=True)
class Progress:
    """Where a search stands at one batch size."""

    points: tuple[Point, ...]
    """All points so far, in the order of their rounds."""
    missing: tuple[tuple[Point, int], ...]
    """Points, with seeds, that are to be trained next. Empty: the search is done."""
    best: tuple[TrialResult, ...]
    """The repetitions of the best point; empty if the first round is not done."""
    widened: int
    """How often the range was widened."""
    expected: int
    """Trainings in all, as far as is known."""


def progress_of(
    search: Search, parameters: Sequence[Parameter], results: Sequence[TrialResult]
) -> Progress:
    """Return where the search at one batch size stands, from its results.

    The first round has quasi-random points. If the best learning rate is the lowest or the highest
    of those tried, the next round has points beyond it. Once it is between others, a round of
    points around the best one refines it. Then the best point is repeated with other seeds, until
    the point with the best middle repetition has all its repetitions.

    Args:
        search: The settings.
        parameters: With their ranges at this batch size.
        results: All results at this batch size, in any order.
    """
    known = {(_key(each.hyperparameters), each.seed): each for each in results}
    placed = points(parameters, search.trials, search.seed)
    widened, refined, rounds = 0, False, 0
    while True:
        missing = [(point, 0) for point in placed if (_key(point), 0) not in known]
        if missing:
            ahead = 0 if refined else search.later
            expected = len(placed) + ahead + search.repeats - 1
            return Progress(tuple(placed), tuple(missing), (), widened, expected)
        first = [known[_key(point), 0] for point in placed]
        best = _rank([[each] for each in first])[0][0].hyperparameters
        edge = _edge(placed, best)
        endings = {each.ended for each in first}
        if endings == {FAILED}:
            break  # other learning rates would fail too
        if endings <= {DIVERGED, FAILED}:
            best, edge = min(placed, key=lambda point: point[LEARNING_RATE]), "low"
        rounds += 1
        seed = search.seed + SEED_STEP * rounds
        if edge and widened < MOST_WIDER:
            rate = best[LEARNING_RATE]
            ends = (rate, rate * WIDER) if edge == "high" else (rate / WIDER, rate)
            beyond = range_parameter(LEARNING_RATE, *ends, LOG)
            wider = [beyond if p.name == LEARNING_RATE else p for p in parameters]
            placed += points(wider, search.later, seed)
            widened += 1
            continue
        if refined or not known[_key(best), 0].reached:
            break
        share = 1 / search.trials ** (1 / len(parameters))
        placed += points([p.around(best[p.name], share) for p in parameters], search.later, seed)
        refined = True
    return _repeat_best(search, placed, known, widened)


def _repeat_best(
    search: Search,
    placed: Sequence[Point],
    known: Mapping[tuple[Key, int], TrialResult],
    widened: int,
) -> Progress:
    """Return the repetitions that are missing of the point with the best middle repetition."""
    repetitions = [
        [known[_key(point), seed] for seed in _seeds(point, known, search.repeats)]
        for point in placed
    ]
    best, *_ = _rank(repetitions)
    point = best[0].hyperparameters
    missing: list[tuple[Point, int]] = []
    if any(each.reached for each in best):
        seeds = range(search.repeats)
        missing = [(point, seed) for seed in seeds if (_key(point), seed) not in known]
    expected = len(known) + len(missing)
    return Progress(tuple(placed), tuple(missing), tuple(best), widened, expected)


def _seeds(point: Point, known: Mapping[tuple[Key, int], TrialResult], repeats: int) -> list[int]:
    """Return the seeds of a point's results: all of a round, or only the first.

    While a round of repetitions is under way, some are there and others are not. The point is
    then ranked by the first alone, as it was before the round, whatever was trained already.
    """
    have = [seed for seed in range(repeats) if (_key(point), seed) in known]
    return have if len(have) == repeats else [0]


def limit_of(results: Iterable[TrialResult]) -> float:
    """Return the steps after which a first training of a point has lost; infinite if unknown."""
    first = (each.outcome.at("steps") for each in results if each.seed == 0)
    least = min(first, default=math.inf)
    return math.ceil(SLACK * least + 1) if math.isfinite(least) else math.inf


def _rank(repetitions: Sequence[Sequence[TrialResult]]) -> list[Sequence[TrialResult]]:
    """Return the repetitions of points in another order: those of the best point come first.

    Points that have lost are equal, whether their trainings were stopped or not: which ones were
    stopped depends on the order of the trainings. Repetitions are never stopped, so a point whose
    middle repetition is beyond the limit still comes before those. It may be the best one, if the
    training that has set the limit was a lucky one.
    """
    limit = limit_of(each[0] for each in repetitions)

    def key(k: int) -> tuple[float, float]:
        half = middle([each.outcome for each in repetitions[k]], "steps")
        if math.isinf(limit):
            return (0, half.rank("steps")[1])
        steps = half.at("steps")
        if steps <= limit:
            return (0, steps)
        return (1, steps) if len(repetitions[k]) > 1 else (2, 0.0)

    order = sorted(range(len(repetitions)), key=lambda k: (*key(k), k))
    return [repetitions[k] for k in order]


def _edge(placed: Sequence[Point], best: Point) -> str:
    """Return "low" or "high" if no lower, or no higher, learning rate was tried than the best."""
    rates = [point[LEARNING_RATE] for point in placed]
    return {min(rates): "low", max(rates): "high"}.get(best[LEARNING_RATE], "")


def _key(point: Mapping[str, float]) -> Key:
    return tuple(sorted(point.items()))
