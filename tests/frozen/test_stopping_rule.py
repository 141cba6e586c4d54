# SPDX-License-Identifier: Apache-2.0
"""When there are enough batches."""

import math

from noisescale.estimation.independent_batches import BatchProducts
from noisescale.frozen.frozen_fit import BatchStatistics
from noisescale.frozen.stopping_rule import StoppingRule


def batches_until_enough(*, outlier: float = 1.0, width: float = 2.25, seconds: float = 1e3) -> int:
    """Of a clear signal, with noise of 0.5 to 1.5 and one other batch."""
    rule = StoppingRule("auto", width, seconds, 0.95, (), None)
    seen = BatchStatistics(entries=[[]], sizes=[8.0])
    while not rule.enough(seen):
        k = len(seen.sizes)
        noise = outlier if k == 3 else 0.5 + (7 * k % 10) / 10
        seen.entries[0].append(BatchProducts(8, 8, 8.0 * k, 100.0 + math.sin(k), noise))
        seen.sizes.append(8.0)
        assert k < 2000
    return len(seen.sizes)


def test_it_stops_where_the_interval_is_narrow() -> None:
    assert batches_until_enough() == 10
    assert batches_until_enough(width=1.2) > 20
    assert batches_until_enough(width=1.0001, seconds=1e-9) == 10  # or where the time is over


def test_it_goes_on_while_one_batch_makes_the_scatter_but_not_for_ever() -> None:
    # It is narrow at 15 batches and at 23. These are the first looks at four times as many.
    assert batches_until_enough(outlier=3.0) == 80
    assert batches_until_enough(outlier=5.0) == 120


def test_it_says_how_long_it_may_take() -> None:
    told = list[str]()
    rule = StoppingRule("auto", 1.2, 1e3, 0.95, (), told.append)
    seen = BatchStatistics(entries=[[]], sizes=[8.0])
    for k in range(1, 16):
        seen.entries[0].append(BatchProducts(8, 8, 8.0 * k, 100.0, 0.5 + k % 3))
        seen.sizes.append(8.0)
        rule.enough(seen)

    assert [line.split(" batches")[0] for line in told] == ["10", "15"]
    assert "batches in all" in told[0]


def test_as_many_as_are_asked_for() -> None:
    rule = StoppingRule(25, 2.25, 1e-9, 0.95, (), None)

    assert not rule.enough(BatchStatistics(sizes=[1.0] * 24))
    assert rule.enough(BatchStatistics(sizes=[1.0] * 25))
