# SPDX-License-Identifier: Apache-2.0
import json
import math

import numpy as np
import pytest

from noisescale import GradientMoments
from noisescale.history.increments import INCREMENTS, LOSS, SQUARES, SUMS, Increments


def steps(count: int, seed: int = 0) -> list[tuple[GradientMoments, float]]:
    """Steps of unequal batches, whose moments are far from zero for their scatter."""
    rng = np.random.default_rng(seed)
    return [
        (GradientMoments(rng.normal(3, 0.01), rng.normal(900, 5)), float(rng.integers(4, 64)))
        for _ in range(count)
    ]


def stands_for(step: int) -> int:
    return 1 + step % 5


def test_a_row_is_the_sums_and_squares_of_its_steps_over_the_level() -> None:
    increments, drawn = Increments(), steps(30)
    taken = {0: increments.take()}
    for count, (moments, batch_size) in enumerate(drawn, start=1):
        increments.add(moments, batch_size, stands_for(count), loss=1 / count)
        if count in (10, 30):
            taken[count] = increments.take()

    assert math.isnan(taken[0].pop(LOSS))
    assert taken[0] == dict.fromkeys((*SUMS, *SQUARES), 0.0)
    level, relative = 0.0, []
    for count, ((q, s), batch_size) in enumerate(drawn, start=1):
        sq_norm = q + s / batch_size
        weight = batch_size * stands_for(count)
        divisor = max(level, sq_norm / 8)
        relative.append((s / divisor, q / divisor, weight, 1 / count))
        level = (7 * level + 2 * sq_norm) / 9 if level else sq_norm
    for row, of_row in ((taken[10], relative[1:10]), (taken[30], relative[10:])):
        s, q, w, losses = np.array(of_row).T
        ds, dq = s - (w * s).sum() / w.sum(), q - (w * q).sum() / w.sum()
        expected = [len(w), w.sum(), (w**2).sum(), (w * s).sum(), (w * q).sum()]
        expected += [(w**2 * x).sum() for x in (ds * ds, ds * dq, dq * dq)]
        expected += [(w * losses).sum() / w.sum()]
        assert list(row) == list(INCREMENTS)
        assert list(row.values()) == pytest.approx(expected, rel=1e-10)


def test_a_row_goes_on_after_a_checkpoint() -> None:
    whole, first, second = Increments(), Increments(), Increments()
    for moments, weight in steps(20):
        whole.add(moments, weight, loss=weight)
    for moments, weight in steps(20)[:13]:
        first.add(moments, weight, loss=weight)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for moments, weight in steps(20)[13:]:
        second.add(moments, weight, loss=weight)

    assert second.take() == whole.take()
