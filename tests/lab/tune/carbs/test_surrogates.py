# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from noisescale.lab.tune.carbs.surrogates import FITTED, bounded_outputs, fit_process, fit_success


def fitted_plane(count: int, noise: float = 0.0) -> tuple[np.ndarray, Any]:
    """The points, and the process."""
    rng = np.random.default_rng(0)
    points = rng.normal(0, 0.6, (count, 3))
    values = 5 + 3 * points[:, 0] - points[:, 1] + noise * rng.normal(size=count)
    return points, fit_process(points, values, np.random.default_rng(0))


@pytest.mark.parametrize("count", [30, FITTED + 40])
def test_a_plane_is_learnt_and_continued(count: int) -> None:
    _, process = fitted_plane(count)

    mean, deviation = process.predict(np.array([[0.1, 0.2, 0.0], [3.0, 0.0, 0.0]]))

    assert mean[0] == pytest.approx(5.1, abs=0.1)
    assert mean[1] == pytest.approx(14.0, abs=1.5)  # far from all points: the linear kernel
    assert deviation[0] < deviation[1]


def test_noise_is_told_from_the_function() -> None:
    points, found = fitted_plane(120, noise=0.5)

    assert found.deviation * found.noise**0.5 == pytest.approx(0.5, rel=0.25)
    _, deviation = found.predict(points)
    assert np.median(deviation) < 0.3  # of the function, without an observation's noise


def test_a_running_point_is_imagined_by_a_draw_of_the_process() -> None:
    _, process = fitted_plane(20, noise=0.2)
    far = np.array([[0.0, 0.0, 2.5]])
    mean, deviation = process.predict(far)

    drawn = [process.imagining(far, np.random.default_rng(k)).predict(far) for k in range(200)]

    means = np.array([found[0][0] for found in drawn])
    assert abs(means.mean() - mean[0]) < 4 * deviation[0] / 200**0.5
    assert means.std() == pytest.approx(deviation[0], rel=0.2)
    assert all(found[1][0] < 0.5 * deviation[0] for found in drawn)


def test_outputs_far_below_the_others_lie_at_a_bound_and_equal_ones_have_none() -> None:
    outputs = np.array([-1e9, -20.0, 0.0, 1.0, 1.0, 2.0, 3.0])

    found = bounded_outputs(outputs)

    # The distinct outputs have the median (0 + 1)/2, and the best one lies 2.5 above it.
    expected = np.array([-7.0, -7.0, 0.0, 1.0, 1.0, 2.0, 3.0])
    assert found * np.std(expected) == pytest.approx(expected)
    assert (bounded_outputs(np.ones(5)) == 1).all()


def test_a_smooth_function_is_learnt_from_few_points() -> None:
    """Matérn 3/2 is off by more than twice as much."""
    rng = np.random.default_rng(0)
    points, others = rng.uniform(-1, 1, (25, 2)), rng.uniform(-1, 1, (200, 2))

    def bowl(at: np.ndarray) -> np.ndarray:
        return np.asarray((at**2).sum(axis=1) + at[:, 0])

    mean, _ = fit_process(points, bowl(points), rng).predict(others)

    assert np.std(mean - bowl(others)) < 0.02


def test_success_is_likely_where_others_succeeded() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.normal(-1, 0.2, (20, 2)), rng.normal(1, 0.2, (20, 2))
    points = np.array([[-1.0, -1.0], [1.0, 1.0], [30.0, -30.0]])

    found = np.exp(fit_success(good, bad, rng)(points))

    assert found[0] > 0.95
    assert found[1] < 0.05
    assert found[2] == pytest.approx(0.5, abs=0.05)
    assert (fit_success(good, bad[:0], rng)(points) == 0).all()
