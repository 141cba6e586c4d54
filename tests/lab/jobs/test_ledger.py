# SPDX-License-Identifier: Apache-2.0
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.jobs.jobs_for_tests import Squares, begun, claimed
from refused import refused
from tiers import slow

from noisescale.lab.jobs.jobs import FAILED, State, Task
from noisescale.lab.jobs.ledger import ATTEMPTS, LOSSES, LOST, Ledger, LostError

ME = {"host": "here", "process": 1}
TASKS = Squares().next_tasks({})
KEYS = [task.key for task in TASKS]


@pytest.fixture(params=["journal", slow("sqlite")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "journal":
        return str(tmp_path / "sweep.journal")
    return f"sqlite:///{tmp_path}/sweep.db"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that ledgers read."""
    now = [0.0]
    times = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("noisescale.lab.jobs.ledger.time", times)
    return now


def test_each_task_is_claimed_once_whoever_asks(place: str) -> None:
    mine, other = begun(place), Ledger.open(place)

    found = [ledger.claim(KEYS, ME) for ledger in (mine, other, mine, other)]

    assert [entry and entry.key for entry in found] == [*KEYS, None]
    assert [entry.state for entry in other.entries().values()] == [State.RUNNING] * 3
    assert other.entries()["n=2"].spec == {"n": 2}
    assert other.entries()["n=2"].worker["host"] == "here"
    assert abs(other.entries()["n=2"].started - time.time()) < 60


def test_results_are_kept_for_all_and_a_task_that_is_known_is_not_added_again(place: str) -> None:
    """Workers want the same tasks at each look. The storage would grow with each of them."""
    ledger = begun(place)
    entry = claimed(ledger, "n=2")

    ledger.want(TASKS)
    ledger.finish(entry, {"square": 4})
    ledger.want(TASKS)
    assert len(ledger._storage.get_all_trials(ledger._study)) == len(TASKS)
    for _ in range(2):
        ledger.take([(Task("n=3", {"n": 3}), {"square": 9})])

    assert Ledger.open(place).results() == {"n=2": {"square": 4}, "n=3": {"square": 9}}
    assert ledger.entries()["n=2"].state is State.DONE
    assert ledger.claim(["n=2", "unknown"], ME) is None
    with pytest.raises(LostError):
        ledger.finish(entry, {"square": 5})
    assert ledger.entries()["n=3"].spec == {"n": 3}
    assert len(ledger.entries()) == 4


def test_two_who_want_the_same_task_at_once_train_it_once(place: str) -> None:
    first, second = begun(place), Ledger.open(place)
    second.entries = lambda: {}  # type: ignore[method-assign]  # it looked before the other wrote
    second.want(TASKS)
    del second.entries  # type: ignore[method-assign]

    found = [ledger.claim(KEYS, ME) for ledger in (second, first, first, first)]

    assert [entry and entry.key for entry in found] == [*KEYS, None]


def test_of_two_who_claim_a_task_at_once_the_last_one_trains_it(place: str) -> None:
    """In SQLite two may change the same trial from waiting to running."""
    first, second = begun(place), Ledger.open(place)
    before, change = second.entries(), second._storage.set_trial_state_values
    mine = claimed(first, "n=1")

    second.entries = lambda: before  # type: ignore[method-assign]  # it looked at the same time
    second._storage.set_trial_state_values = lambda *_: True  # type: ignore[method-assign]
    others = claimed(second, "n=1", process=2)
    second._storage.set_trial_state_values = change  # type: ignore[method-assign]

    assert others.worker["process"] == 2
    with pytest.raises(LostError):
        first.renew(mine)
    second.renew(others)
    second.finish(others, {"square": 1})
    assert first.results() == {"n=1": {"square": 1}}


def test_a_silent_worker_is_lost_by_the_clock_of_who_looks(place: str, clock: list[float]) -> None:
    """Not by the clock of the worker, which may be wrong, and after the lease of the worker."""
    worker, other = begun(place, lease=60), Ledger.open(place, lease=0.05)
    entry = claimed(worker, "n=1", started=-1e9)

    looks = []
    for passed, renews in ((0, True), (40, True), (40, True), (40, False), (20, False), (1, False)):
        clock[0] += passed
        if renews:
            worker.renew(entry)
        looks.append(other.put_back_lost())

    assert looks == [[], [], [], [], [], ["n=1"]]
    other.want(TASKS)
    assert other.entries()["n=1"].state is State.WAITING
    assert other.entries()["n=1"].attempt == 2
    for late in (worker.renew, lambda e: worker.finish(e, {}), lambda e: worker.fail(e, "x")):
        with pytest.raises(LostError):
            late(entry)


def test_a_task_that_fails_again_and_again_is_given_up_and_tried_anew_by_the_next_command(
    place: str,
) -> None:
    """An attempt that was put back has not failed."""
    ledger = begun(place)
    for _ in range(5):
        ledger.put_back(claimed(ledger, "n=1"))
        ledger.want(TASKS)
    for number in range(ATTEMPTS):
        assert ledger.entries()["n=1"].state is State.WAITING
        ledger.fail(claimed(ledger, "n=1"), f"reason {number}")
        ledger.want(TASKS)

    assert ledger.results() == {"n=1": {FAILED: f"reason {ATTEMPTS - 1}"}}
    assert ledger.claim(["n=1"], ME) is None
    again = begun(place)
    assert again.results() == {}
    assert again.entries()["n=1"].state is State.WAITING
    assert again.entries()["n=1"].attempt == 1


def test_a_task_that_loses_its_workers_is_given_up_later(place: str, clock: list[float]) -> None:
    ledger = begun(place)
    for _ in range(LOSSES):
        assert ledger.results() == {}
        ledger.want(TASKS)
        claimed(ledger, "n=1")
        ledger.put_back_lost()
        clock[0] += 61
        assert ledger.put_back_lost() == ["n=1"]

    assert ledger.results() == {"n=1": {FAILED: LOST}}


def test_settings_that_differ_are_named_with_both_values(place: str) -> None:
    def begin(**settings: Any) -> None:
        job: Any = SimpleNamespace(kind="grown", adjustable=(), as_dict=lambda: settings)
        Ledger.begin(place, "grown", job)

    begin(of={"count": 3})

    with refused("storage") as of:
        begin(of=None)
    with refused("storage") as count:
        begin(of={"count": 4})
    assert 'differs in `of` ({"count": 3} before, null now)' in of.value.got
    assert "differs in `count` (3 before, 4 now)" in count.value.got


def test_a_storage_with_another_job_is_refused(place: str) -> None:
    begun(place)

    with refused("storage", requirement="the job 'other'", got="'test'"):
        Ledger.open(place, "other")
    Ledger.begin(place, "other", Squares(4))
    with refused("storage", requirement="`--name` given"):
        Ledger.open(place)
    assert Ledger.open(place, "other").job == {"kind": "squares", "count": 4}
