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


@given(
    sizes=st.lists(st.floats(0.1, 9), min_size=1, max_size=40),
    end=st.integers(1, 30),
    steps_per_epoch=st.one_of(st.none(), st.integers(1, 20)),
)
def test_no_more_steps_are_due_than_the_run_has(
    sizes: list[float], end: int, steps_per_epoch: int | None
) -> None:
    clock = Clock()
    clock.steps_per_epoch = steps_per_epoch or math.inf
    clock.end_with(steps_of_epochs=end)

    due = sum(clock.advance(size) for size in sizes)

    passed = min(sum(sizes), clock.steps_per_epoch)
    assert due == min(math.floor(passed + 1e-6), end)
    assert clock.is_past_end == (math.floor(passed + 1e-6) > end)


@given(
    sizes=st.lists(st.floats(0.1, 9), min_size=1, max_size=40),
    of_epochs=st.integers(1, 50),
    of_steps=st.integers(1, 50),
)
def test_a_run_is_as_far_as_the_first_thing_that_ends_it(
    sizes: list[float], of_epochs: int, of_steps: int
) -> None:
    clock = Clock()
    clock.steps_per_epoch = of_epochs  # a run of one epoch
    clock.end_with(steps_of_epochs=of_epochs, optimizer_steps=of_steps)

    for number, size in enumerate(sizes, 1):
        clock.advance(size, optimizer_steps=number)
        share = max(min(sum(sizes[:number]) / of_epochs, 1), number / of_steps)
        if number == of_steps or share == 1:
            assert clock.taken == min(of_epochs, of_steps)
            break
        assert clock.taken == math.floor(share * min(of_epochs, of_steps) + 1e-6)
    assert not clock.is_past_end


def test_thirds_do_not_get_lost() -> None:
    clock = Clock()

    assert sum(clock.advance(1 / 3) for _ in range(3000)) == 1000


def test_a_clock_goes_on_from_where_a_run_is() -> None:
    clock = Clock()

    clock.go_on(9, time=10.5, steps_per_epoch=4, already=2.5)

    assert (clock.taken, clock.time, clock.steps_per_epoch, clock.epoch_began) == (9, 10.5, 4, 8)
    assert clock.advance(5.0) == 3  # to the end of the epoch
    clock.go_on(9)  # without a time it is at the steps taken
    assert (clock.taken, clock.time, clock.steps_per_epoch, clock.epoch_began) == (9, 9.0, 4, 9)


def test_the_share_of_the_run_is_that_of_the_nearest_end() -> None:
    clock = Clock()
    assert (clock.share(5), clock.ends_by(5)) == (None, None)

    clock.end_with(steps_of_epochs=40, optimizer_steps=100)
    clock.time = 10.0
    assert (clock.share(10), clock.ends_by(10)) == (0.25, "examples")
    assert (clock.share(50), clock.ends_by(50)) == (0.5, "steps")
    assert clock.share(150) == 1

    clock.end_with(optimizer_steps=100)
    assert (clock.share(0), clock.ends_by(0)) == (0.0, "steps")


def test_a_last_step_that_takes_more_than_is_left_is_no_step_past_the_end() -> None:
    clock = Clock()
    clock.end_with(steps_of_epochs=800, steps_of_run=10)

    assert [clock.advance(3.0, optimizer_steps=k) for k in range(1, 5)] == [240, 240, 240, 80]
    assert (clock.share(4), clock.is_past_end) == (1.0, False)


def test_rounding_does_not_tell_what_ends_a_run_that_examples_and_steps_end_together() -> None:
    clock = Clock()
    clock.end_with(steps_of_run=100.0, optimizer_steps=1000)
    found = set()
    for step in range(1, 1000):
        clock.advance(0.1)
        found.add(clock.ends_by(step))

    assert found == {"examples"}
