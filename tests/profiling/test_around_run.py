# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from refused import refused

from noisescale import History
from noisescale.profiling.around_run import AroundRun


def run(size: float = 32, accumulation: int = 1, seconds: float = 0.01) -> History:
    step = np.arange(10.0, 101, 10)
    same = np.ones(10)
    return History.from_columns(
        {"step": step, "examples": size * accumulation * step}
        | {"batch_size": size * accumulation * same, "accumulation": accumulation * same}
        | {"devices": same, "seconds_per_step": seconds * same}
        | {"noise_scale": same, "low": same, "high": same}
    )


def test_sizes_are_around_the_runs_own() -> None:
    around = AroundRun.of(run(), examples=1000)

    assert (around.own, around.accumulation) == (32, 2)
    assert around.sizes(1000) == [16, 32, 64, 128, 256]
    assert around.sizes(100) == [16, 32, 64]
    assert AroundRun.of(run(size=1), 1000).sizes(1000) == [1, 2, 4, 8]
    assert AroundRun.of(run(accumulation=4), 1000).accumulation == 4


@pytest.mark.parametrize(
    ("seconds", "sizes", "steps"),
    [(0.01, 5, 20), (0.2, 5, 11), (0.3, 5, 5), (0.5, 4, 7), (9, 3, 5)],
)
def test_it_takes_about_a_minute(seconds: float, sizes: int, steps: int) -> None:
    around = AroundRun.of(run(seconds=seconds), examples=10**6)

    timed = around.sizes(10**6)

    assert (len(timed), around.steps(timed, 5)) == (sizes, steps)
    took = around.forecast(timed, steps, 5)
    assert took <= 60 or sizes == 3
    micro_batches = sum(size / 32 for size in timed) + 2
    assert took == pytest.approx((steps + 5) * micro_batches * seconds + 0.5 * (len(timed) + 1))


def test_a_run_without_seconds_is_timed_without_a_forecast() -> None:
    around = AroundRun.of(run(seconds=np.nan), examples=1000)

    assert around.sizes(1000) == [16, 32, 64, 128, 256]
    assert around.forecast([16, 32], 20, 5) is None
    assert around.steps([16, 32], 5) == 20


def test_a_run_that_counts_tokens_is_refused() -> None:
    with refused("run", remedy="tokens"):
        AroundRun.of(run(size=20_480), examples=1000)
