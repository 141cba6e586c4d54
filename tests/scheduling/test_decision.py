# SPDX-License-Identifier: Apache-2.0
"""Decisions change no state that they are given; states are whole in builtins."""

import copy
import math
from typing import Any

import pytest

from noisescale import GradientMoments, NoiseScale, Plan
from noisescale.scheduling.decision import (
    ControllerState,
    adopt_plan,
    decision,
    most_rows,
    resume,
    with_noise_scale,
)
from noisescale.scheduling.learning_rate import Factors
from noisescale.scheduling.policy import Wanted
from noisescale.scheduling.settings import SchedulerOptions, Settings

KNOWN = NoiseScale(500.0, 400.0, 600.0, grad_sq_norm=1.0, noise_trace=500.0, steps=50.0)
START = ControllerState(Plan(8, 4), base_batch_size=32.0, wanted=32.0)
LATER = START._replace(steps=9, examples=288.0)


def settings(**options: Any) -> Settings:
    return Settings.from_options(SchedulerOptions("ratio", lr_scaling="linear", **options))


def test_a_decision_leaves_the_state_that_it_is_taken_on_and_repeats() -> None:
    before = copy.deepcopy(LATER)

    informed_once, informed_twice = (
        with_noise_scale(settings(), LATER, KNOWN, 0.1) for _ in range(2)
    )
    first, again = (decision(settings(), informed_once, Wanted(64, "why")) for _ in range(2))

    assert before == LATER
    assert informed_once == informed_twice != before
    assert first[0] == again[0]
    assert first[1] == again[1] is not None


def test_a_decision_has_the_plan_the_factor_and_when_it_moved() -> None:
    state, move = decision(
        settings(max_batch_size=100), LATER, Wanted(640, "why"), GradientMoments(1.0, 100.0)
    )

    assert move is not None
    assert move.reason == "why, `max_batch_size` is 100"
    assert (state.wanted, state.plan, state.examples_at_move) == (640, Plan(8, 12), 288.0)
    assert state.factors == Factors(3.0)
    assert state._replace(plan=LATER.plan).progress(0.1).examples_since_move == 0
    state, move = adopt_plan(settings(), LATER, LATER.plan, "why")  # again
    assert (state.examples_at_move, move) == (-math.inf, None)


@pytest.mark.parametrize(
    ("now", "device_batch_size", "expected"),
    [
        (Plan(8, 1), None, Plan(8, 12)),
        (Plan(8, 1, devices=2), None, Plan(8, 6, devices=2)),
        (Plan(8, 1, devices=2), 16.0, Plan(16, 3, devices=2)),
        (Plan(8, 1), 16.0, Plan(16, 6)),
        (Plan(8, 1, devices=2, nodes=2), None, Plan(8, 6, devices=2, nodes=2)),
    ],
)
def test_a_saved_plan_goes_on_where_devices_and_micro_batches_are_the_same(
    now: Plan, device_batch_size: float | None, expected: Plan
) -> None:
    saved = LATER._replace(plan=Plan(8, 12))

    assert resume(settings(), now, saved, device_batch_size).plan == expected


@pytest.mark.parametrize(
    ("most", "lowered_to", "expected"),
    [(64, 48, 48), (32, 48, 32), (64, None, 64), (None, 8, None)],
)
def test_what_memory_suffices_for_goes_on_below_what_the_user_says(
    most: int | None, lowered_to: int | None, expected: int | None
) -> None:
    chosen = settings(max_device_batch_size=most)

    state = resume(chosen, START.plan, LATER._replace(lowered_to=lowered_to))

    assert most_rows(chosen, state) == expected
    assert state.lowered_to == (None if expected == most else expected)
