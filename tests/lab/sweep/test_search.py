# SPDX-License-Identifier: Apache-2.0
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import FAILED
from noisescale.lab.parameters import points, range_parameter
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS, PRUNED, REACHED, TrialResult
from noisescale.lab.sweep.search import MOST_WIDER, SLACK, Progress, Search, limit_of, progress_of

GOAL = Goal.read("loss<=0.1")
RATES = (range_parameter("learning_rate", 0.01, 1.0, "log"),)
SEARCH = Search(RATES, trials=9, repeats=3)

Point = Mapping[str, float]
Truth = Callable[[float, int], float]
"""Steps to the goal, from a learning rate and a seed."""


def bowl(best: float, scatter: float = 0.1) -> Truth:
    """Steps that grow on both sides of the best learning rate; above 30 times it all diverge."""

    def steps(rate: float, seed: int) -> float:
        away = math.log(rate / best)
        luck = random.Random(f"{rate:.4g}/{seed}").gauss(0, scatter)
        return math.inf if rate > 30 * best else round(100 * math.exp(0.3 * away**2 + luck))

    return steps


def trained(truth: Truth, point: Point, seed: int, limit: float = math.inf) -> TrialResult:
    """What a training reports; it is stopped at the limit."""
    needed = truth(point["learning_rate"], seed)
    if math.isinf(needed):
        return result(point, seed, [1.0], [math.nan], DIVERGED)
    if needed > limit:
        return result(point, seed, [limit], [0.5], PRUNED)
    return result(point, seed, [1.0, needed], [0.9, 0.1], REACHED)


def result(
    point: Point, seed: int, steps: list[float], values: list[float], ended: str
) -> TrialResult:
    return TrialResult(GOAL, 64, point, seed, steps, values, steps, ended)


def failed(point: Point, seed: int) -> TrialResult:
    return result(point, seed, [], [], FAILED)


def filled(train: Callable[[Point, int], TrialResult]) -> tuple[Progress, list[TrialResult]]:
    """Train all that is missing, round after round."""
    found: list[TrialResult] = []
    while (progress := progress_of(SEARCH, RATES, found)).missing:
        found += [train(point, seed) for point, seed in progress.missing]
    return progress, found


def searched(
    truth: Truth, *, workers: int = 1, order: int = 0, prunes: bool = True, search: Search = SEARCH
) -> tuple[Progress, list[TrialResult]]:
    """Train until nothing is missing, with so many trainings at a time, which end in any order."""
    rng, found = random.Random(order), list[TrialResult]()
    running: list[tuple[Point, int]] = []
    while True:
        progress = progress_of(search, RATES, found)
        if not progress.missing:
            return progress, found
        waiting = [task for task in progress.missing if task not in running]
        running += waiting[: workers - len(running)]
        point, seed = running.pop(rng.randrange(len(running)))
        limit = limit_of(found) if prunes and seed == 0 else math.inf
        found.append(trained(truth, point, seed, limit))


def rates_of(progress: Progress) -> list[float]:
    return [point["learning_rate"] for point in progress.points]


@pytest.mark.parametrize("best", [0.03, 0.1, 0.4])
def test_the_best_learning_rate_is_found_and_repeated(best: float) -> None:
    progress, found = searched(bowl(best, scatter=0))

    rate = progress.best[0].learning_rate
    assert best / 1.6 < rate < best * 1.6
    assert [each.seed for each in progress.best] == [0, 1, 2]
    assert len(found) <= SEARCH.expected_trainings
    assert len(found) == progress.expected


def test_one_worker_and_many_find_the_same_whatever_ends_first_and_whatever_is_stopped() -> None:
    for case in range(20):
        truth = bowl(10 ** random.Random(case).uniform(-3, 1), scatter=0.3)
        alone, _ = searched(truth)
        together, _ = searched(truth, workers=4, order=case + 1)
        whole, _ = searched(truth, workers=2, order=case, prunes=False)

        assert alone.points == together.points == whole.points
        assert alone.best == together.best == whole.best


def test_a_round_that_refines_stays_as_near_to_the_best_as_the_first_round_is_dense() -> None:
    """Nine points divide one range into ninths, and two ranges into thirds."""
    for momenta, parts in (((), 9), ((range_parameter("momentum", 0.5, 0.99, "momentum"),), 3)):
        ranges = (*RATES, *momenta)
        search = Search(ranges, trials=9, repeats=1)
        found: list[TrialResult] = []
        while missing := progress_of(search, ranges, found).missing:
            best = min(found, key=lambda each: each.steps[-1], default=None)
            if best is not None:
                away = [math.log(p["learning_rate"] / best.learning_rate) for p, _ in missing]
                assert 0.3 < max(map(abs, away)) / (math.log(100) / parts) <= 1.001
            found += [trained(bowl(0.1, scatter=0), point, seed) for point, seed in missing]

        assert len(found) == search.expected_trainings == 12


def test_trainings_that_cannot_win_are_stopped() -> None:
    _, found = searched(bowl(0.1))

    reached = [each.steps[-1] for each in found if each.ended == REACHED and each.seed == 0]
    assert any(each.ended == PRUNED for each in found)
    assert max(reached) > SLACK * min(reached)  # those before the best was known
    assert limit_of(found) == math.ceil(SLACK * min(reached) + 1)
    assert limit_of(found[:0]) == math.inf


@pytest.mark.parametrize(("best", "side"), [(6.0, "high"), (0.002, "low"), (1e-4, "low")])
def test_a_range_is_widened_until_the_best_is_between_others(best: float, side: str) -> None:
    """Also where all diverge."""
    progress, _ = searched(bowl(best, scatter=0))

    rate = progress.best[0].learning_rate
    assert progress.widened >= 1
    assert min(rates_of(progress)) < rate < max(rates_of(progress))
    assert best / 2 < rate < best * 2
    assert (rate > 1) == (side == "high")


def test_widening_ends() -> None:
    progress, found = searched(lambda rate, seed: round(1e7 / rate))

    assert progress.widened == MOST_WIDER
    assert max(rates_of(progress)) > 8 ** (MOST_WIDER - 1)
    assert progress.best[0].learning_rate == max(each.learning_rate for each in found)


def test_of_trainings_that_miss_the_goal_the_nearest_leads_and_none_is_repeated() -> None:
    def short(point: Point, seed: int) -> TrialResult:
        last = 0.2 + 0.1 * abs(math.log(point["learning_rate"] / 5))
        return result(point, 0, [1, 500], [0.9, last], OUT_OF_STEPS)

    progress, found = filled(short)

    assert progress.widened >= 1
    assert min(found, key=lambda each: each.values[-1]) == progress.best[0]
    assert {each.seed for each in found} == {0}


def test_a_lucky_point_gives_way_to_one_with_a_better_middle() -> None:
    lucky = points(RATES, 3, 0)[2]["learning_rate"]

    def truth(rate: float, seed: int) -> float:
        if rate == lucky:
            return 140 if seed else 80
        return bowl(0.1, scatter=0)(rate, 0)

    progress, found = searched(truth)

    assert lucky in {r.learning_rate for r in found if r.seed}
    assert progress.best[0].learning_rate != lucky
    assert len(progress.best) == 3


def test_a_point_whose_repetitions_are_all_slow_still_comes_before_those_that_lost() -> None:
    """The lucky training has set the limit, so no other point is known to be better."""
    lucky = points(RATES, 9, 0)[6]["learning_rate"]

    def truth(rate: float, seed: int) -> float:
        if rate == lucky:
            return 200 if seed else 80
        return 150 if lucky / 3 < rate < lucky * 3 else math.inf

    for prunes, repeats in ((True, 3), (False, 3), (True, 2)):
        search = replace(SEARCH, repeats=repeats)
        progress, _ = searched(truth, prunes=prunes, search=search)

        assert {each.learning_rate for each in progress.best} == {lucky}
        assert [each.steps[-1] for each in progress.best] == [80, 200, 200][:repeats]


@pytest.mark.parametrize("diverging", [(), (3, 5)])
def test_where_all_trainings_fail_or_diverge_no_range_is_widened_in_vain(
    diverging: tuple[int, ...],
) -> None:
    numbers = itertools.count()

    def end(point: Point, seed: int) -> TrialResult:
        diverges = next(numbers) in diverging
        return trained(lambda *_: math.inf, point, seed) if diverges else failed(point, 0)

    progress, _ = filled(end)

    assert progress.widened == (MOST_WIDER if diverging else 0)
    assert max(rates_of(progress)) == max(rates_of(progress)[:9])  # downwards alone


def test_failed_trainings_are_left_aside() -> None:
    good, numbers = bowl(0.1, scatter=0), itertools.count()

    progress, _ = filled(
        lambda point, seed: trained(good, point, seed) if next(numbers) else failed(point, seed)
    )

    assert 0.05 < progress.best[0].learning_rate < 0.2
