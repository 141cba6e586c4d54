# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from lab.jobs.jobs_for_tests import SQUARES, Squares, begun, claimed, script, scripted, squares_in

from noisescale.lab.jobs import trial_process, worker
from noisescale.lab.jobs.jobs import FAILED, Entry, State, Task
from noisescale.lab.jobs.ledger import ATTEMPTS, Ledger
from noisescale.lab.jobs.train_job import train_by_workers
from noisescale.lab.jobs.trial_process import ColdProcess
from noisescale.lab.jobs.worker import TELLING, Worker
from noisescale.lab.jobs.workers import WorkersToStart
from noisescale.refusal import Refusal

ALL = {"n=0": 0, "n=1": 1, "n=2": 4, "sum=5": 25}


Work = Callable[..., tuple[Ledger, list[str]]]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """What returns the ledger and the events of a worker in this process, after its work."""

    def working(body: str = "", lease: float = 60.0) -> tuple[Ledger, list[str]]:
        scripted(tmp_path, monkeypatch, body)
        ledger = begun(tmp_path / "j", lease=lease)
        events: list[str] = []
        try:
            Worker(ledger, SQUARES, tmp_path / "out", on_event=events.append).work()
        except Refusal as error:
            events.append(f"refused: {error}")
        return ledger, events

    return working


def test_a_worker_trains_round_after_round(tmp_path: Path, work: Work) -> None:
    ledger, events = work()

    assert squares_in(ledger.results()) == ALL
    assert events == [line for key in ALL for line in (f"{key}: begun", f"{key}: reached")]
    assert (tmp_path / "out/trials/sum=5/result.json").exists()
    assert all(result["devices"] == 1 for result in ledger.results().values())
    assert all(0 <= result["device_seconds"] < 60 for result in ledger.results().values())


def test_two_jobs_in_one_folder_have_results_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have tasks of the same names, which are trained at the same time."""
    body = """
(Path(sys.argv[0]).parent / f"{FACTOR}-{spec['n']}").touch()
while spec["n"] < 2 and not (Path(sys.argv[0]).parent / f"{3 - FACTOR}-{spec['n']}").exists():
    time.sleep(0.01)
spec['n'] += 10 * FACTOR"""
    found = {}

    def train(factor: int) -> None:
        ledger = begun(tmp_path / f"{factor}", Squares(2))
        one = Worker(ledger, Squares(2), tmp_path / "out")
        with mock.patch.object(one._starts, "start", lambda folder: ColdProcess(folder, factor)):
            one.work()
        found[factor] = squares_in(ledger.results())

    monkeypatch.setattr(worker, "IDLE", 0.05)
    commands = {
        factor: script(tmp_path / f"{factor}.py", body.replace("FACTOR", str(factor)))
        for factor in (1, 2)
    }
    monkeypatch.setattr(
        trial_process, "command_of", lambda folder, factor: [*commands[factor], str(folder)]
    )
    with ThreadPoolExecutor() as pool:
        list(pool.map(train, commands))

    assert found[1].items() >= {"n=0": 100, "n=1": 121}.items()
    assert found[2].items() >= {"n=0": 400, "n=1": 441}.items()


@pytest.mark.parametrize(
    "body",
    [
        # As a thread of the user's script that waits for ever.
        "import threading; threading.Thread(target=threading.Event().wait).start()",
        "import atexit, os; atexit.register(os.abort)",  # as ranks sometimes do when they exit
    ],
    ids=["never", "by a crash"],
)
def test_a_training_that_has_told_its_result_has_it_however_it_ends(
    body: str, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_process, "PATIENCE", 0.1)

    assert squares_in(work(body)[0].results()) == ALL


def started(folder: Path, **options: Any) -> trial_process.TrialProcess:
    """A training that has its result at once."""

    def start(place: Path) -> Any:
        (place / "result.json").write_text("{}")
        return mock.Mock()

    return trial_process.TrialProcess(folder, {}, 3, start, **options)


def test_trainings_that_share_a_device_share_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(trial_process.time, "monotonic", lambda: next(clock))

    assert started(tmp_path, sharing=2).result() == {"devices": 3, "device_seconds": 6.0}


def test_a_limit_is_there_from_the_beginning_and_never_rises(tmp_path: Path) -> None:
    process, seen = started(tmp_path, limit=70.0), [(tmp_path / "limit").read_text()]
    for limit in (90.0, 60.0, 65.0):
        process.set_limit(limit)
        seen.append((tmp_path / "limit").read_text())

    assert seen == ["70.0", "70.0", "60.0", "60.0"]


@pytest.mark.parametrize("fails", [1, 0])
def test_one_training_that_fails_is_tried_twice_and_then_left_out(
    fails: int, tmp_path: Path, work: Work
) -> None:
    """Also the first one: its learning rate may be too high, and the module refuse its loss."""
    body = f"if spec['n'] == {fails}: raise ArithmeticError('no such luck')"

    ledger, events = work(body)

    reason = ledger.results()[f"n={fails}"][FAILED]
    assert reason.startswith("ArithmeticError: no such luck (it ended with code 1; see ")
    assert events.count(f"n={fails}: begun") == ATTEMPTS
    output = tmp_path / f"out/trials/n={fails}-2/output.txt"
    assert output.read_text().count("Traceback") == 1
    total = 5 - fails**2
    assert ledger.results()[f"sum={total}"]["square"] == total**2


def test_a_worker_that_alone_fails_stops_and_its_failures_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(
        tmp_path, monkeypatch, "if 'broken' in sys.argv[1]: raise ModuleNotFoundError('torhc')"
    )
    job = Squares(6)
    ledger = begun(tmp_path / "j", job)
    first, other = claimed(ledger, "n=0"), claimed(ledger, "n=1")
    ledger.finish(first, {"square": 0, "ended": "reached"})

    with pytest.raises(Refusal, match="ModuleNotFoundError: torhc"):
        Worker(ledger, job, tmp_path / "broken").work()
    ledger.put_back(other)
    Worker(ledger, job, tmp_path / "good").work()

    assert not any(FAILED in result for result in ledger.results().values())
    assert len(ledger.results()) == 7


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import nowhere", "ModuleNotFoundError: No module"),
        ("import os; os.kill(os.getpid(), 9)", "(it ended with signal 9; see"),
    ],
)
def test_where_every_training_fails_the_worker_stops_soon(
    body: str, reason: str, work: Work
) -> None:
    ledger, events = work(body)

    assert len(ledger.results()) == TELLING
    assert all(reason in result[FAILED] for result in ledger.results().values())
    assert events[-1].startswith("refused: ")
    assert reason in events[-1]


def test_limits_reach_a_training_and_its_lease_is_renewed(work: Work) -> None:
    body = """
while not (folder / "limit").exists():
    time.sleep(0.01)
assert 1000 <= float((folder / "limit").read_text()) <= 1004
time.sleep(1.5 if spec["n"] == 0 else 0)  # longer than the lease"""

    ledger, _ = work(body, lease=1.0)

    assert squares_in(ledger.results()) == ALL
    assert all(entry.attempt == 1 for entry in ledger.entries().values())


@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_that_is_interrupted_ends_its_training_and_puts_it_back(
    lost: bool, tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its task was lost, it says so alone."""

    def interrupted(self: Worker, entry: Entry, process: object) -> None:
        if lost:
            self._ledger.put_back(entry)  # as another worker does
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work("sys.stdin.read(); sys.exit(1)")
    ledger = begun(tmp_path / "j")

    assert ledger.results() == {}
    assert {entry.state for entry in ledger.entries().values()} == {State.WAITING}
    assert squares_in(work()[0].results()) == ALL


def test_a_worker_that_cannot_write_its_folder_puts_its_task_back(
    tmp_path: Path, work: Work
) -> None:
    (tmp_path / "out").write_text("no folder")

    with pytest.raises(OSError, match="out"):
        work()

    states = {each.state for each in begun(tmp_path / "j").entries().values()}
    assert State.RUNNING not in states


_TORCHRUN = """
W1124 03:51:17.640000 28970 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process
E1124 03:51:17.641000 28970 torch/distributed/elastic/multiprocessing/api.py:1002] failed \
(exitcode: {code}) local_rank: 1 (pid: 28975) of binary: python
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================"""


@pytest.mark.parametrize(
    ("printed", "code", "reason"),
    [
        ("ArithmeticError: x", 1, "ArithmeticError: x (rank 1 ended with code 1"),
        ("", -9, "it printed nothing (rank 1 ended with signal 9"),
        (
            "[rank1]: Traceback\n[rank1]: ValueError: x\n[rank0]: RuntimeError: Connection closed",
            1,
            "ValueError: x (rank 1 ended with code 1",
        ),
    ],
)
def test_of_several_ranks_the_one_that_failed_first_is_named(
    tmp_path: Path, printed: str, code: int, reason: str
) -> None:
    (tmp_path / "output.txt").write_text(printed + _TORCHRUN.format(code=code))

    assert trial_process.reason_in(tmp_path, 1).startswith(reason)


def test_a_worker_that_is_killed_in_mid_trial_leaves_its_task_to_another(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it was training ends with it."""
    body = """
from noisescale.lab.jobs.trial_process import end_with_stdin
end_with_stdin()
(folder / "pid.part").write_text(str(__import__("os").getpid()))
(folder / "pid.part").rename(folder / "pid")
time.sleep(600 if spec["n"] == 1 and not folder.name.endswith("-2") else 0)"""
    scripted(tmp_path, monkeypatch, body)
    ledger = begun(tmp_path / "j", lease=1.0)
    stuck = tmp_path / "out/trials/n=1/pid"
    victim = multiprocessing.get_context("fork").Process(
        target=lambda: Worker(
            Ledger.open(str(tmp_path / "j"), lease=1.0), SQUARES, tmp_path / "out"
        ).work()
    )

    victim.start()
    while not stuck.exists():
        assert victim.is_alive()
        time.sleep(0.02)
    victim.kill()
    victim.join()
    with suppress(psutil.NoSuchProcess):  # it has ended already
        psutil.Process(int(stuck.read_text())).wait(60)
    work(body, lease=1.0)

    assert squares_in(ledger.results()) == ALL
    assert ledger.entries()["n=1"].attempt == 2


def test_who_watches_waits_for_a_storage_that_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optuna.exceptions import StorageInternalError

    ledger = Ledger.begin(str(tmp_path / "j"), "test", Squares(0))
    ledger.take([(Task("sum=0", {"n": 0}), {"square": 0})])
    out_of_reach = [OSError("stale file handle"), StorageInternalError("gone")]
    entries = mock.Mock(side_effect=chain(out_of_reach, repeat(ledger.entries())))
    shown: list[int] = []

    monkeypatch.setattr(ledger, "entries", entries)
    train_by_workers(
        ledger,
        Squares(0),
        str(tmp_path / "j"),
        tmp_path,
        WorkersToStart(),
        lambda found: shown.append(len(found)),
    )

    assert shown == [1]
