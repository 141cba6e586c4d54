# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from noisescale.lab.tune.carbs.pareto import Group
from noisescale.lab.tune.carbs.surrogates import (
    FITTED,
    fit_front,
    fit_process,
    log_success,
    normal_scores,
)


def plane(count: int, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    points = rng.normal(0, 0.6, (count, 3))
    return points, 5 + 3 * points[:, 0] - points[:, 1] + noise * rng.normal(size=count)


@pytest.mark.parametrize("count", [30, FITTED + 40])
def test_a_plane_is_learnt_and_continued(count: int) -> None:
    points, values = plane(count)

    mean, deviation = fit_process(points, values, np.random.default_rng(0)).predict(
        np.array([[0.1, 0.2, 0.0], [3.0, 0.0, 0.0]])
    )

    assert mean[0] == pytest.approx(5.1, abs=0.1)
    assert mean[1] == pytest.approx(14.0, abs=1.5)  # far from all points: the linear kernel
    assert deviation[0] < deviation[1]


def test_noise_is_told_from_the_function() -> None:
    points, values = plane(120, noise=0.5)

    found = fit_process(points, values, np.random.default_rng(0))

    assert found.deviation * found.noise**0.5 == pytest.approx(0.5, rel=0.25)
    _, deviation = found.predict(points)
    assert np.median(deviation) < 0.3  # of the function, without an observation's noise


def test_a_running_point_is_imagined_by_a_draw_of_the_process() -> None:
    points, values = plane(20, noise=0.2)
    process = fit_process(points, values, np.random.default_rng(0))
    far = np.array([[0.0, 0.0, 2.5]])
    mean, deviation = process.predict(far)

    drawn = [process.imagining(far, np.random.default_rng(k)).predict(far) for k in range(200)]

    means = np.array([found[0][0] for found in drawn])
    assert abs(means.mean() - mean[0]) < 4 * deviation[0] / 200**0.5
    assert means.std() == pytest.approx(deviation[0], rel=0.2)
    assert all(found[1][0] < 0.5 * deviation[0] for found in drawn)


def test_scores_are_normal_whatever_the_outliers() -> None:
    scores = normal_scores(np.array([-1e9, 0.0, 1.0, 1.0, 2.0]))

    assert scores == pytest.approx([-1.2816, -0.5244, 0.2533, 0.2533, 1.2816], abs=1e-4)


def test_the_front_passes_its_members_and_never_falls() -> None:
    rng = np.random.default_rng(0)
    groups = [Group(k, (10.0**k,), (output,)) for k, output in enumerate([0, 1.5, 1.6, 2.4])]

    front = fit_front(groups, rng)

    at = front.at(np.log([0.1, 1, 10, 100, 1000, 1e5]))
    assert at[1:5] == pytest.approx([0, 1.5, 1.6, 2.4], abs=0.3)
    assert at[0] == at[1]
    assert at[-1] == at[-2]
    assert (np.diff(front.outputs) >= 0).all()
    assert fit_front(groups[:1], rng).at(3.0) == 0.0


def test_below_its_cheapest_member_the_front_falls_to_the_worst_output() -> None:
    rng = np.random.default_rng(0)
    groups = [Group(k, (10.0**k,), (output,)) for k, output in enumerate([0, 1.5, 1.6, 2.4])]
    front = fit_front(groups, rng)

    falling = front.falling_to(-2.0, math.log(4))

    at = np.log([1e-3, 0.25, 0.5, 1, 10, 1000])
    first = front.outputs[0]
    assert falling.at(at)[:4] == pytest.approx([-2, -2, (first - 2) / 2, first])
    assert (falling.at(at)[3:] == front.at(at)[3:]).all()


def test_success_is_likely_where_others_succeeded() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.normal(-1, 0.2, (20, 2)), rng.normal(1, 0.2, (20, 2))
    points = np.array([[-1.0, -1.0], [1.0, 1.0], [30.0, -30.0]])

    found = np.exp(log_success(points, good, bad, rng))

    assert found[0] > 0.95
    assert found[1] < 0.05
    assert found[2] == pytest.approx(0.5, abs=0.05)
    assert (log_success(points, good, bad[:0], rng) == 0).all()
