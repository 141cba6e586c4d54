# SPDX-License-Identifier: Apache-2.0
"""The policy that finds a batch size, on runs of a known noise scale and slope."""

import math
from typing import Any

import pytest

from noisescale import NoiseScale, Plan
from noisescale.scheduling.find import Find
from noisescale.scheduling.policy import Progress

EXAMPLES = 200_000.0


def measured(value: float, *, by: float = 1.2) -> NoiseScale:
    return NoiseScale(value, value / by, value * by, 1.0, value, steps=50)


def asked_along(
    policy: Find, noise_scale: NoiseScale, *, start: int = 32, slope: float = 0.1, **other: Any
) -> dict[float, float]:
    """The batch sizes that were asked for, by the share of the run, rounded to percent."""
    size, found = start, {}
    for step in range(1000):
        progress = Progress(
            step,
            step * EXAMPLES / 1000,
            share=step / 1000,
            loss_slope=slope if step >= 75 else math.nan,
            **{"examples_of_run": EXAMPLES, "first_batch_size": start, **other},
        )
        if policy.due(progress.share):
            wanted = policy(noise_scale, Plan(size, 1), progress)
            policy.take(wanted)
            if wanted != size:
                found[step / 1000] = float(wanted)
                size = round(wanted)
    return found


@pytest.mark.parametrize(("start", "first"), [(4, 32), (25, 100), (100, None), (5_000, 100)])
def test_it_begins_with_half_a_thousandth_of_the_run_at_most_eight_times_the_start(
    start: int, first: float | None
) -> None:
    found = asked_along(Find(), NoiseScale.unknown(), start=start)

    assert found == ({} if first is None else {0.0: first})


def test_a_run_that_steps_end_as_well_has_no_batch_that_would_lose_examples() -> None:
    found = asked_along(Find(), measured(50), most_steps=500)

    assert set(found.values()) == {416.0}  # 13 x 32: 12 x 32 would take 521 steps


def test_a_run_that_another_policy_had_for_half_of_it_is_done() -> None:
    policy = Find()
    late = Progress(500, EXAMPLES / 2, share=0.5, examples_of_run=EXAMPLES, loss_slope=0.1)

    assert policy.due(late.share)
    wanted = policy(measured(2_000), Plan(64, 1), late)
    policy.take(wanted)

    assert wanted == 64
    assert policy.done
    assert not policy.due(0.6)


def test_it_decides_by_the_formula_from_13_percent_on_and_stays_after_37() -> None:
    """By hand: r = 2.1·2000·√(.1/s), B = √(200·.03·r/.1)."""
    policy = Find()
    assert policy.needs_loss
    assert not policy.done
    found = asked_along(policy, measured(2_000))

    first = math.sqrt(200 * 0.03 * 2.1 * 2_000 * math.sqrt(0.1 / 0.136) / 0.1)
    assert list(found) == [0.0, 0.136]
    assert not policy.needs_loss
    assert policy.done
    assert found[0.136] == pytest.approx(first, rel=0.01)


def test_estimates_are_averaged() -> None:
    policy = Find()
    at = Progress(0, 0.0, share=0.14, examples_of_run=EXAMPLES, loss_slope=0.1)
    sizes = []
    for share, b in ((0.14, 2_000.0), (0.17, 8_000.0)):
        wanted = policy(measured(b), Plan(200, 1), at._replace(share=share))
        policy.take(wanted)
        sizes.append(float(wanted))

    second = math.sqrt(200 * 0.03 * 2.1 * 8_000 * math.sqrt(0.1 / 0.17) / 0.1)
    assert sizes[1] == pytest.approx(math.sqrt(sizes[0] * second))


def test_nothing_leaves_a_factor_of_eight_around_a_thousandth() -> None:
    tiny, huge = (asked_along(Find(), measured(b), slope=s) for b, s in ((1, 2.0), (1e7, 1e-3)))

    assert list(tiny.values())[-1] == pytest.approx(25)
    assert list(huge.values())[-1] == pytest.approx(1600)


@pytest.mark.parametrize("slope", [math.nan, -0.1, 0.0])
def test_without_a_falling_loss_the_first_batch_size_is_kept(slope: float) -> None:
    assert asked_along(Find(), measured(2_000), slope=slope) == {0.0: 100.0}


def test_it_is_asked_from_1_percent_on_for_a_learning_rate_by_the_noise_scale() -> None:
    policy = Find()
    policy.take(
        policy(
            NoiseScale.unknown(),
            Plan(100, 1),
            Progress(0, 0.0, share=0.0, examples_of_run=EXAMPLES),
        )
    )

    assert not policy.due(0.009)
    assert policy.due(0.02)


@pytest.mark.parametrize(
    ("noise_scale", "slope", "missing"),
    [
        (measured(2_000), -0.1, "the training loss does not fall"),
        (measured(2_000), math.nan, "the slope of a cross-entropy is not known"),
        (NoiseScale.unknown(), 0.1, "the noise scale is not known"),
    ],
)
def test_what_is_missing_for_a_decision_is_named(
    noise_scale: NoiseScale, slope: float, missing: str
) -> None:
    at = Progress(0, 0.0, share=0.14, examples_of_run=EXAMPLES, loss_slope=slope)

    assert Find()(noise_scale, Plan(100, 1), at).reason.endswith(missing)


def test_a_run_that_another_policy_had_until_here_keeps_its_batch_without_a_slope() -> None:
    late = Progress(200, EXAMPLES / 5, share=0.2, examples_of_run=EXAMPLES)

    assert Find()(measured(2_000), Plan(640, 1), late) == 640


def test_a_run_too_short_for_a_thousandth_keeps_its_batch_at_the_monitors_budget() -> None:
    policy = Find()
    wanted = policy(measured(50), Plan(8, 1), Progress(0, 0.0, share=0.2, examples_of_run=160))
    policy.take(wanted)

    assert (wanted, wanted.reason) == (8, "a run of 160 examples is too short to find another")
    assert policy.done
    longer = Find()  # the resumed run may have another end
    longer.load_state_dict(policy.state_dict())
    assert longer.due(0.02)
    assert longer.needs_loss


def test_a_start_near_the_first_batch_size_is_kept() -> None:
    assert asked_along(Find(), NoiseScale.unknown(), start=90) == {}


def test_without_a_known_end_it_pays_for_steps_with_examples() -> None:
    policy, run = Find(), Progress(100, 6400.0, critical_batch_size=100.0)

    assert policy.due(None) is None
    assert policy(measured(64.0), Plan(32, 1), run) == pytest.approx(80)
    assert "tradeoff" in str(policy.note(Plan(32, 1), run))


def test_it_says_where_the_learning_rate_is_no_guide() -> None:
    policy, run = Find(), Progress(0, 0.0, share=0.0, examples_of_run=EXAMPLES)

    assert policy.note(Plan(800, 1), run) is None
    assert "800 is far above 200" in str(policy.note(Plan(801, 1), run)).replace("801", "800")
    assert policy.note(Plan(801, 1), run._replace(examples_of_run=None)) is None


def test_loggers_get_the_estimate_with_its_band() -> None:
    policy = Find()
    assert policy.metrics == {}
    asked_along(policy, measured(2_000))

    best = policy.metrics["best"]
    assert (policy.metrics["best_low"], policy.metrics["best_high"]) == (best / 2, best * 2)


def test_where_the_examples_are_not_known_the_batch_stays() -> None:
    policy = Find()

    assert asked_along(policy, measured(2_000), examples_of_run=None) == {}
    assert not policy.due(0.3)  # each question waits for the device


def test_before_the_decision_another_length_counts_and_after_it_the_first_one() -> None:
    policy, at = Find(), Progress(0, 0.0, share=0.14, examples_of_run=EXAMPLES, loss_slope=0.1)
    longer = at._replace(share=0.17, examples_of_run=4 * EXAMPLES)
    first = policy(measured(2_000), Plan(200, 1), at)
    fresh = Find()(measured(2_000), Plan(200, 1), longer)

    resumed = Find()
    policy.take(first)
    resumed.load_state_dict(policy.state_dict())
    second = resumed(measured(2_000), Plan(200, 1), longer)

    assert second == pytest.approx(first, rel=0.1)
    assert fresh == pytest.approx(math.sqrt(2) * first, rel=0.1)  # a batch of 400 instead of 200
    assert not resumed.due(at.share)
