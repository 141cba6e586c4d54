# SPDX-License-Identifier: Apache-2.0
"""A schedule that counts examples is due as many steps an epoch, whatever the batch sizes are."""

import math

from hypothesis import given
from hypothesis import strategies as st

from noisescale.scheduling.clock import Clock


@given(
    windows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=5),
    base=st.integers(1, 7),
)
def test_every_epoch_has_the_steps_it_has_at_the_first_batch_size(
    windows: list[list[int]], base: int
) -> None:
    """`windows` has, for each epoch, the micro-batches of its steps."""
    clock = Clock()

    due = [
        sum(
            clock.advance(size / base, round_up=k == len(epoch) - 1) for k, size in enumerate(epoch)
        )
        for epoch in windows
    ]

    assert due == [math.ceil(sum(epoch) / base) for epoch in windows]


def test_thirds_do_not_get_lost() -> None:
    clock = Clock()

    assert sum(clock.advance(1 / 3) for _ in range(3000)) == 1000


def test_it_goes_on_from_its_state() -> None:
    clock, resumed = Clock(), Clock()
    clock.advance(2.7)

    resumed.load_state_dict(clock.state_dict())

    assert [clock.advance(0.4) for _ in range(5)] == [resumed.advance(0.4) for _ in range(5)]
