# SPDX-License-Identifier: Apache-2.0
"""How alike rows are, of numbers that were drawn with a known share of noise between batches."""

import math

import numpy as np
import pytest

from noisescale.estimation import row_similarity
from noisescale.estimation.row_similarity import FEWEST, LOOKS, RowSimilarity, Similarity

ROWS, COORDINATES = 16, 64


def drawn(
    seed: int, steps: int, *, shared: float = 0.0, alternates: float = 0.0, moves: float = 0.0
) -> RowSimilarity:
    """Numbers of measured steps.

    Args:
        seed: Of all draws.
        steps: Measured steps.
        shared: The share of the noise that all rows of a batch have in common.
        alternates: What is added to gradients with the sign of the step.
        moves: How far gradients move in each step.
    """
    rng = np.random.default_rng(seed)
    found = RowSimilarity()
    own, common = math.sqrt(1 - shared), math.sqrt(shared)
    for step in range(steps):
        rows = common * rng.normal() + own * rng.normal(size=ROWS)
        found.add_rows(ROWS, rows.mean(), rows.var(ddof=1))
        halves = own * rng.normal(size=COORDINATES) / math.sqrt(ROWS)
        gradients = [
            common * rng.normal(size=COORDINATES)
            + own * rng.normal(size=COORDINATES) / math.sqrt(ROWS)
            + alternates * (-1) ** (step + k)
            + moves * k
            for k in range(3)
        ]
        first, second, third = gradients
        successive = (((second - first) ** 2).sum() + ((third - second) ** 2).sum()) / 4
        found.add_steps((halves**2).sum(), successive, ((third - first) ** 2).sum() / 2)
    return found


@pytest.mark.parametrize("steps", LOOKS[:3])
def test_independent_rows_are_not_alike(steps: int) -> None:
    found = [drawn(seed, steps).look() for seed in range(20)]

    assert not any(one.shown for one in found)
    assert np.mean([one.ratio for one in found]) == pytest.approx(1, abs=0.03)
    assert np.mean([one.correlation for one in found]) == pytest.approx(0, abs=0.02)


def test_a_shared_draw_is_shown_with_its_share() -> None:
    found = drawn(0, 300, shared=0.2).look()

    between = 0.2 + 0.8 / ROWS
    assert found.by_steps
    assert found.ratio == pytest.approx(between / (0.8 / ROWS), rel=0.1)
    assert 1.25 < found.ratio_low < found.ratio
    assert found.by_rows
    assert found.correlation == pytest.approx(0.2, rel=0.2)
    assert 0.01 < found.correlation_low < found.correlation


@pytest.mark.parametrize("how", [{"alternates": 0.3}, {"moves": 0.3}])
def test_gradients_that_alternate_or_drift_are_no_sign_of_rows(how: dict[str, float]) -> None:
    found = drawn(0, 300, **how).look()

    assert found.ratio_low > 1.25
    assert found.moves
    assert not found.shown


def test_the_cut_is_not_judged_while_weights_oscillate() -> None:
    similar = Similarity(3.0, 2.0, 0.2, correlation=0.2, correlation_low=0.1)

    assert not similar.shown
    assert not similar._replace(ratio_low=-9.0).shown
    assert similar._replace(ratio=1.5, ratio_low=1.0).by_rows


def test_short_batches_have_another_factor_and_are_not_compared_with_others() -> None:
    found, rng = RowSimilarity(), np.random.default_rng(0)
    for step in range(400):
        size = ROWS if step % 5 else ROWS // 2
        rows = rng.normal(size=size) - math.log(size)
        found.add_rows(size, rows.mean(), rows.var(ddof=1), size=size)

    assert found.look().correlation == pytest.approx(0.0, abs=0.02)
    assert not found.look().by_rows


@pytest.mark.parametrize(
    ("of_step", "of_pair", "shown"),
    [(1.0, 0.0, True), (0.3, 0.0, True), (0.0, 0.3, False), (0.0, 0.5, True)],
    ids=["a draw of the batch", "a small one", "weights that move", "neighbours in a buffer"],
)
def test_steps_apart_must_show_more_than_successive_ones(
    of_step: float, of_pair: float, *, shown: bool
) -> None:
    """In pairs of successive steps, what pairs share is weights, or a stretch of the data."""
    found, rng = RowSimilarity(), np.random.default_rng(0)
    shared = 0.0
    for step in range(300):
        if step % 2 == 0:
            found.add_gap()
            shared = of_pair * rng.normal()
        rows = rng.normal(size=ROWS) + of_step * rng.normal() + shared
        found.add_rows(ROWS, rows.mean(), rows.var(ddof=1))
    look = found.look()

    near = of_step**2 / (1 + of_step**2)
    assert look.correlation == pytest.approx(near, abs=0.06)
    far = of_step**2 + of_pair**2
    assert look.apart == pytest.approx(far / (1 + far), abs=0.06)
    assert look.by_rows == shown
    assert look.suspected  # before pairs were measured


def test_a_lower_bound_is_wrong_as_seldom_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Successive differences share means, so that fewer than there are count."""
    monkeypatch.setattr(row_similarity, "BY_CHANCE", 0.05)
    rng, shared, wrong = np.random.default_rng(0), 0.5, 0
    for _ in range(1500):
        found = RowSimilarity()
        rows = shared * rng.normal(size=(60, 1)) + rng.normal(size=(60, ROWS))
        for mean, variance in zip(rows.mean(1), rows.var(1, ddof=1), strict=True):
            found.add_rows(ROWS, mean, variance)
        wrong += found.look().correlation_low > shared**2 / (1 + shared**2)

    assert 0.04 < wrong / 1500 < 0.065


def test_few_numbers_and_numbers_that_are_not_finite_show_nothing() -> None:
    found = drawn(0, FEWEST - 1, shared=0.9)
    found.add_rows(ROWS, math.nan, 1.0)
    found.add_rows(1, 0.0, math.nan)
    found.add_steps(1.0, math.inf, 1.0)
    found.add_steps(math.nan, 1.0, 1.0)

    assert not found.is_due
    assert math.isnan(found.look().ratio)
    assert not found.look().shown


def test_each_look_is_due_once() -> None:
    found, due = RowSimilarity(), []
    for step in range(1, 350):
        found.add_steps(math.nan, math.nan, math.nan)
        if found.is_due:
            due.append(step)

    assert due == [30, 100, 300]
