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
            clock.advance(size / base, ends_epoch=k == len(epoch) - 1)
            for k, size in enumerate(epoch)
        )
        for epoch in windows
    ]

    assert due == [math.ceil(sum(epoch) / base) for epoch in windows]


@given(
    sizes=st.lists(st.floats(0.1, 9), min_size=1, max_size=40), steps_per_epoch=st.integers(1, 20)
)
def test_an_epoch_whose_length_is_known_never_has_more(
    sizes: list[float], steps_per_epoch: int
) -> None:
    clock = Clock()
    clock.steps_per_epoch = steps_per_epoch

    for _ in range(2):
        clock.begin_epoch()
        due = [clock.advance(size, ends_epoch=k == len(sizes) - 1) for k, size in enumerate(sizes)]
        assert sum(due) == steps_per_epoch
        assert min(due) >= 0  # none is taken back


def test_thirds_do_not_get_lost() -> None:
    clock = Clock()

    assert sum(clock.advance(1 / 3) for _ in range(3000)) == 1000


def test_it_goes_on_from_its_state() -> None:
    clock, resumed = Clock(), Clock()
    clock.advance(2.7)

    resumed.load_state_dict(clock.state_dict())

    assert [clock.advance(0.4) for _ in range(5)] == [resumed.advance(0.4) for _ in range(5)]
