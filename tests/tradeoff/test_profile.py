# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from scipy.stats import norm

from noisescale.tradeoff.profile import STEPS_SCATTER, profiled_critical_batch_size


def law(batch_size: float, *, least: float = 50.0, critical: float = 100.0) -> float:
    return least * (1 + critical / batch_size)


def test_two_runs_by_the_law_give_its_critical_batch_size() -> None:
    found = profiled_critical_batch_size([16, 256], [law(16), law(256)])

    assert found.value == pytest.approx(100)


def test_the_interval_is_that_of_the_logarithm_of_two_steps() -> None:
    found = profiled_critical_batch_size([16, 256], [law(16), law(256)], 0.1, confidence=0.9)

    # At an end the steps' ratio is by the quantile of a difference of two logarithms off.
    quantile = norm.ppf(0.95) * math.sqrt(2) * 0.1
    ratios = [law(16, critical=x) / law(256, critical=x) for x in (found.low, found.high)]
    assert [math.log(r * law(256) / law(16)) for r in ratios] == pytest.approx(
        [-quantile, quantile]
    )


@pytest.mark.parametrize(
    ("sizes", "steps", "low", "value", "high"),
    [
        ([8, 16], [1000.0, 500.0], (1, math.inf), (math.inf, math.inf), (math.inf, math.inf)),
        ([512, 1024], [100.0, 100.0], (0, 0), (0, 0), (100, 2000)),
        ([8, 16], [1000.0, 540.0], (0.1, 80), (80, 120), (math.inf, math.inf)),
    ],
    ids=["perfect scaling", "steps that do not fall", "both far below"],
)
def test_ends_are_open_where_the_steps_leave_them_open(
    sizes: list[float],
    steps: list[float],
    low: tuple[float, float],
    value: tuple[float, float],
    high: tuple[float, float],
) -> None:
    found = profiled_critical_batch_size(sizes, steps)

    for end, (least, most) in zip(
        (found.low, found.value, found.high), (low, value, high), strict=True
    ):
        assert least <= end <= most


@pytest.mark.parametrize(
    ("sizes", "repeats", "scatter"),
    [([16, 256], 1, 0.1), ([16, 64, 256], 1, 0.2), ([16, 256], 4, None)],
)
def test_the_interval_holds_the_truth_as_often_as_it_says(
    sizes: list[float], repeats: int, scatter: float | None
) -> None:
    generator = np.random.default_rng(0)
    batch = np.repeat(np.array(sizes, dtype=float), repeats)
    held = 0
    for _ in range(400):
        noise = generator.normal(0, scatter or 0.1, len(batch))
        found = profiled_critical_batch_size(
            batch, [law(b) * math.exp(e) for b, e in zip(batch, noise, strict=True)], scatter
        )
        held += found.low <= 100 <= found.high

    assert 0.92 <= held / 400 <= 0.98


def test_repeats_tell_the_scatter() -> None:
    sizes, steps = [16, 256, 16, 256], [law(16), law(256), 1.02 * law(16), 0.98 * law(256)]

    found = profiled_critical_batch_size(sizes, steps)

    assert found.high / found.low < 2
    alone = profiled_critical_batch_size(sizes[:2], steps[:2])
    assert alone == profiled_critical_batch_size(sizes[:2], steps[:2], STEPS_SCATTER)


@pytest.mark.parametrize(
    ("sizes", "steps", "scatter", "message"),
    [
        ([16, 16], [10.0, 11.0], None, "`batch_sizes` must have two values or more"),
        ([16, 32], [10.0], None, "`batch_sizes` must have two values or more"),
        ([16, 32], [10.0, math.inf], None, "`steps` must be positive and finite"),
        ([16, -32], [10.0, 5.0], None, "`batch_sizes` must be positive and finite"),
        ([16, 32], [10.0, 5.0], 0.0, "`scatter` must be positive"),
    ],
)
def test_what_cannot_be_is_refused(
    sizes: list[float], steps: list[float], scatter: float | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        profiled_critical_batch_size(sizes, steps, scatter)
