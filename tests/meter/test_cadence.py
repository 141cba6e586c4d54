# SPDX-License-Identifier: Apache-2.0
import math
from itertools import pairwise

import pytest
from refused import refused

from noisescale.meter.cadence import NOT_AGREED, Cadence, Pace, Spent

CHEAPER, MICRO_BATCH, EXAMPLE, HALF = 0.05, 0.125, 0.3, 0.75
COSTS = (CHEAPER, MICRO_BATCH, EXAMPLE, HALF)
LENGTHS = (200, 500, 2_000, 10_000)
PACES = {
    "nothing is known": Pace(),
    "known at step 100": Pace(known_at=100),
    "known at step 900": Pace(known_at=900),
    "2 s a step": Pace(seconds=2.0),
    "1/8 s a step": Pace(seconds=0.125),
    "1/8 s a step, known at step 900": Pace(seconds=0.125, known_at=900),
}


def measured(cadence: Cadence, steps: int, kappa: float, pace: Pace = NOT_AGREED) -> list[int]:
    spent, those = Spent(), []
    for step in range(1, steps + 1):
        if cadence.due(step, spent, kappa, pace):
            spent = spent.plus(kappa)
            those.append(step)
    return those


def by_the_rule(steps: int, kappa: float, opening: float, kept: bool) -> list[int]:
    found: list[int] = []
    for t in range(1, steps + 1):
        k = (2 / 3 + max(t / steps - 2 / 3, 0)) if kept else 1
        budget = 0.01 * t + k * (
            0.04 * min(t, opening) + 5 * min(math.log(1 + t / 8) / math.log(13.5), 1)
        )
        if t <= 2 or kappa * (len(found) + 1) <= budget + 1e-9:
            found.append(t)
    return found


@pytest.mark.parametrize("kept", [False, True], ids=["no end", "end known"])
@pytest.mark.parametrize("kappa", COSTS)
@pytest.mark.parametrize("name", PACES)
def test_steps_are_measured_by_the_published_rule(name: str, kappa: float, kept: bool) -> None:
    pace = PACES[name]._replace(last_step=6_000.0 if kept else 0.0)
    of_time = 600 / pace.seconds if pace.seconds else math.inf
    opening = max(500, min(of_time, pace.known_at or math.inf))

    found = measured(Cadence("auto"), 6_000, kappa, pace)

    assert found == by_the_rule(6_000, kappa, opening, kept)


@pytest.mark.parametrize("kappa", COSTS)
@pytest.mark.parametrize("share", [0.003, 0.01, 0.05, 0.2])
def test_a_share_that_is_given_is_that_of_all_the_run(share: float, kappa: float) -> None:
    for pace in PACES.values():
        found = measured(Cadence("auto", share), 6_000, kappa, pace._replace(last_step=6_000))

        due = [t for t in range(3, 6_001) if int(share * t / kappa + 1e-9) > 2]
        assert len(found) == max(min(int(share * 6_000 / kappa + 1e-9), 6_000), 2)
        assert found[:3] == [1, 2, *due[:1]]


WITHOUT_A_RULE_OF_TIME = {MICRO_BATCH: {500: 120, 2_000: 160}, HALF: {500: 39, 2_000: 58}}
"""The measured steps of the rule before, which spent in advance by log time."""


@pytest.mark.parametrize("ends", [False, True], ids=["no end", "end known"])
@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("kappa", [MICRO_BATCH, HALF])
def test_no_run_of_500_or_2000_steps_has_fewer_measured_steps_than_before(
    kappa: float, name: str, ends: bool
) -> None:
    for steps, before in WITHOUT_A_RULE_OF_TIME[kappa].items():
        pace = PACES[name]._replace(last_step=float(steps * ends))

        assert len(measured(Cadence("auto"), steps, kappa, pace)) >= before


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("steps", LENGTHS)
def test_a_third_of_the_measured_steps_is_kept_for_the_last_third(steps: int, name: str) -> None:
    for kappa in COSTS:
        found = measured(Cadence("auto"), steps, kappa, PACES[name]._replace(last_step=steps))

        late = sum(step > 2 * steps / 3 for step in found)
        assert late >= len(found) // 3


def test_from_step_100_on_measured_steps_are_even() -> None:
    found = [step for step in measured(Cadence("auto"), 5_000, HALF) if step > 100]

    assert {b - a for a, b in pairwise(found)} == {15}


def test_a_step_of_another_cost_is_paid_from_the_same_budget() -> None:
    """The last window of an epoch has one micro-batch, of which halves are compared."""
    cadence, spent = Cadence("auto", 0.01), Spent()
    for step in range(1, 10_001):
        kappa = HALF if step % 20 == 0 else MICRO_BATCH
        if cadence.due(step, spent, kappa):
            spent = spent.plus(kappa)

    assert 99 <= spent.plain_steps <= 100


@pytest.mark.parametrize("kappa", COSTS)
def test_in_pairs_the_next_step_is_measured_in_advance_from_the_same_budget(kappa: float) -> None:
    spent, found = Spent(), []
    for step in range(1, 3_001):
        if Cadence("auto").due(step, spent, kappa, in_pairs=True):
            spent = spent.plus(kappa)
            found.append(step)

    assert {b - a for a, b in zip(found[::2], found[1::2], strict=True)} == {1}
    assert len(found) == pytest.approx(len(measured(Cadence("auto"), 3_000, kappa)), abs=1)


def test_every_n_steps_begins_with_the_first() -> None:
    assert measured(Cadence(4, max_overhead=1e-9), 12, HALF) == [1, 5, 9]


@pytest.mark.parametrize("share", [0, -0.1, math.inf, math.nan, "1 %"])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with refused("max_overhead"):
        Cadence("auto", share)


def test_with_a_scheduler_halves_cost_an_eighth_of_200_steps_and_5_percent_later() -> None:
    for pace in PACES.values():
        steps = measured(Cadence.for_decisions("auto"), 4_000, HALF, pace)

        assert 0.10 < HALF * sum(step <= 200 for step in steps) / 200 < 0.13
        assert HALF * len(steps) / 4_000 == pytest.approx(0.05 + 12 / 4_000, rel=0.01)


def test_the_time_of_the_opening_is_that_of_its_steps_and_stays() -> None:
    """The later ones do not change it."""
    pace, step = Pace(), 0
    for seconds in (math.nan, 1.0, 2.0, 2.0, 2.0, 9.0, 0.1):
        pace = pace.at(step + 100, step, seconds, known=False)
        step += 100

    assert pace.seconds == pytest.approx((100 + 3 * 200) / 500)
    assert pace.opening == pytest.approx(600 / pace.seconds) or pace.opening == 500


@pytest.mark.parametrize(
    ("before", "costs", "after"),
    [
        (0, [0.3] * 7, 0),  # too few are timed
        (0, [0.3] * 8, -2),
        (0, [1.1] * 8, 0),  # as halves on an H200
        (0, [1.65] * 8, 0),  # not off by enough
        (1, [1.3] * 8, 1),
        (0, [3.0] * 8, 2),
        (0, [0.3] * 8 + [99.0] * 4, -2),  # some steps took long
        (-2, [-0.1] * 8, -3),  # the noise of the clock
        (0, [99.0] * 8, 3),
    ],
)
def test_what_is_timed_changes_the_cost_by_powers_of_two(
    before: int, costs: list[float], after: int
) -> None:
    pace = Pace(doublings=before).at(100, 50, 1.0, known=False, costs=costs)

    assert pace.doublings == after
    assert pace.cost(MICRO_BATCH) == MICRO_BATCH * 2**after


def test_the_noise_scale_stays_known() -> None:
    pace = Pace().at(50, 0, 1.0, known=False).at(100, 50, 1.0, known=True)

    assert pace.at(150, 100, 1.0, known=False).known_at == 100
