# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from refused import refused

from noisescale.meter.cadence import COST_OF_DECISIONS, Cadence, Spent

CHEAPER, MICRO_BATCH, EXAMPLE, HALF = 0.05, 0.125, 0.3, 0.75


def measured(cadence: Cadence, steps: int, kappa: float) -> list[int]:
    spent, those = Spent(), []
    for step in range(1, steps + 1):
        if due := cadence.due(step, spent, kappa):
            spent = spent.plus(due, kappa)
            those.append(step)
    return those


@pytest.mark.parametrize("kappa", [CHEAPER, MICRO_BATCH, EXAMPLE, HALF])
@pytest.mark.parametrize("cost", [0.003, 0.01, 0.05, 0.2])
def test_steps_are_measured_by_the_published_rule(kappa: float, cost: float) -> None:
    """Here in counts of measured steps m: m + 1 <= max(cost·t/κ, M₀·ln(1 + t/e)/ln(1 + 2000/e))."""
    at_2000, m, opened, expected = cost * 2000 / kappa, 0, 0, []
    e = 32 if kappa == HALF else 8
    for t in range(1, 12_001):
        log_time = math.log(1 + t / e)
        paid_back = min(opened, cost * max(t - 2000, 0) / kappa / 2)
        if (
            t <= 2
            or m + 1
            <= max(cost * t / kappa, at_2000 * log_time / math.log(1 + 2000 / e)) - paid_back + 1e-9
        ):
            m += 1
        elif (
            kappa >= EXAMPLE and opened + 1 <= 32 * min(log_time / math.log(1 + 2000 / e), 1) + 1e-9
        ):
            opened += 1
        else:
            continue
        expected.append(t)

    given = None if cost == 0.01 else cost  # the default
    assert measured(Cadence("auto", given), 12_000, kappa) == expected


def test_a_step_of_another_cost_is_paid_from_the_same_budget() -> None:
    """The last window of an epoch has one micro-batch, of which halves are compared."""
    cadence, spent = Cadence("auto", 0.01), Spent()
    for step in range(1, 10_001):
        kappa = HALF if step % 20 == 0 else MICRO_BATCH
        if due := cadence.due(step, spent, kappa):
            spent = spent.plus(due, kappa)

    assert 99 <= spent.budget + spent.opening <= 100
    assert spent.opening == HALF * spent.opening_steps <= HALF * 32


def test_every_n_steps_begins_with_the_first() -> None:
    assert measured(Cadence(4, cost=1e-9), 12, HALF) == [1, 5, 9]


@pytest.mark.parametrize("cost", [0, -0.1, math.inf, math.nan, "1 %"])
def test_a_cost_that_is_none_is_refused(cost: object) -> None:
    with refused("cost"):
        Cadence("auto", cost)


def test_with_a_scheduler_halves_cost_an_eighth_of_200_steps_and_5_percent_later() -> None:
    steps = measured(Cadence.for_decisions("auto"), 4000, HALF)

    assert 0.11 < HALF * sum(step <= 200 for step in steps) / 200 < 0.13
    assert HALF * len(steps) / 4000 == pytest.approx(COST_OF_DECISIONS, rel=0.01)
