# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil
import pytest
from lab.jobs.jobs_for_tests import Squares, script, squares_in
from optuna.exceptions import StorageInternalError

from noisescale.lab.jobs import trial_process, worker
from noisescale.lab.jobs.jobs import FAILED, Entry, State, Task
from noisescale.lab.jobs.ledger import ATTEMPTS, Ledger
from noisescale.lab.jobs.train_job import train_by_workers
from noisescale.lab.jobs.trial_process import ColdProcess, Running
from noisescale.lab.jobs.worker import TELLING, AllFailedError, OnlyHereError, Worker
from noisescale.lab.jobs.workers import WorkersToStart

ALL = {"n=0": 0, "n=1": 1, "n=2": 4, "sum=5": 25}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE", 0.05)


def working(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str = "", lease: float = 60.0
) -> tuple[Ledger, list[str]]:
    """The ledger and the events of a worker in this process, after its work."""
    command = script(tmp_path / "train.py", body)
    monkeypatch.setattr(trial_process, "command_of", lambda folder, _: [*command, str(folder)])
    ledger = Ledger.begin(str(tmp_path / "j"), "test", Squares(), lease)
    events: list[str] = []
    try:
        Worker(ledger, Squares(), tmp_path / "out", on_event=events.append).work()
    except AllFailedError as error:
        events.append(f"refused: {error}")
    return ledger, events


def test_a_worker_trains_round_after_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, events = working(tmp_path, monkeypatch)

    assert squares_in(ledger.results()) == ALL
    assert events == [line for key in ALL for line in (f"{key}: begun", f"{key}: reached")]
    assert (tmp_path / "out/trials/sum=5/result.json").exists()
    assert all(result["devices"] == 1 for result in ledger.results().values())
    assert all(0 <= result["device_seconds"] < 60 for result in ledger.results().values())


def test_two_jobs_in_one_folder_have_results_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have tasks of the same names, which are trained at the same time."""
    body = "time.sleep(0.5); spec['n'] += 10 * FACTOR"
    found = {}

    def train(factor: int) -> None:
        ledger = Ledger.begin(str(tmp_path / f"{factor}"), "test", Squares(2))
        one = Worker(ledger, Squares(2), tmp_path / "out")
        with mock.patch.object(one._starts, "start", lambda folder: ColdProcess(folder, factor)):
            one.work()
        found[factor] = squares_in(ledger.results())

    commands = {
        factor: script(tmp_path / f"{factor}.py", body.replace("FACTOR", str(factor)))
        for factor in (1, 2)
    }
    monkeypatch.setattr(
        trial_process, "command_of", lambda folder, factor: [*commands[factor], str(folder)]
    )
    threads = [threading.Thread(target=train, args=(factor,)) for factor in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found[1].items() >= {"n=0": 100, "n=1": 121}.items()
    assert found[2].items() >= {"n=0": 400, "n=1": 441}.items()


def test_a_training_that_has_told_its_result_and_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of the user's script may wait for ever."""
    monkeypatch.setattr(trial_process, "PATIENCE", 0.5)
    body = "import threading; threading.Thread(target=threading.Event().wait).start()"

    ledger, _ = working(tmp_path, monkeypatch, body)

    assert squares_in(ledger.results()) == ALL


def test_trainings_that_share_a_device_share_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(trial_process.time, "monotonic", lambda: next(clock))

    def start(folder: Path) -> Running:
        (folder / "result.json").write_text("{}")
        running: Running = mock.Mock()
        return running

    process = trial_process.TrialProcess(tmp_path, {}, 3, start, sharing=2)

    assert process.result() == {"devices": 3, "device_seconds": 6.0}


def test_a_limit_is_there_from_the_beginning_and_never_rises(tmp_path: Path) -> None:
    seen: list[str] = []

    def start(folder: Path) -> Running:
        seen.append((folder / "limit").read_text())
        running: Running = mock.Mock()
        return running

    process = trial_process.TrialProcess(tmp_path, {}, 1, start, limit=70.0)
    for limit in (90.0, 60.0, 65.0):
        process.set_limit(limit)
        seen.append((tmp_path / "limit").read_text())

    assert seen == ["70.0", "70.0", "60.0", "60.0"]


def test_one_training_that_fails_is_tried_twice_and_then_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "if spec['n'] == 1: raise ArithmeticError('no such luck')"

    ledger, events = working(tmp_path, monkeypatch, body)

    reason = ledger.results()["n=1"][FAILED]
    assert reason.startswith("ArithmeticError: no such luck (it ended with code 1; see ")
    assert events.count("n=1: begun") == ATTEMPTS
    assert (tmp_path / "out/trials/n=1-2/output.txt").read_text().count("Traceback") == 1
    assert ledger.results()["sum=4"]["square"] == 16


def test_a_worker_that_alone_fails_stops_and_its_failures_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "if 'broken' in sys.argv[1]: raise ModuleNotFoundError('torhc')"
    command = script(tmp_path / "train.py", body)
    monkeypatch.setattr(trial_process, "command_of", lambda folder, _: [*command, str(folder)])
    job = Squares(6)
    ledger = Ledger.begin(str(tmp_path / "j"), "test", job)
    ledger.want(job.next_tasks({}))
    first = ledger.claim(["n=0"], {"host": "other", "process": 1})
    assert first is not None
    ledger.finish(first, {"square": 0, "ended": "reached"})
    other = ledger.claim(["n=1"], {"host": "other", "process": 1})
    assert other is not None

    with pytest.raises(
        OnlyHereError, match=r"got only failures: ModuleNotFoundError: torhc .*\. O"
    ):
        Worker(ledger, job, tmp_path / "broken").work()
    ledger.put_back(other)
    Worker(ledger, job, tmp_path / "good").work()

    assert not any(FAILED in result for result in ledger.results().values())
    assert len(ledger.results()) == 7


def test_a_first_training_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learning rate may be too high, and the module may refuse a loss that is no number."""
    body = "if spec['n'] == 0: raise ValueError('the loss is no number')"

    ledger, _ = working(tmp_path, monkeypatch, body)

    assert ledger.results()["n=0"][FAILED].startswith("ValueError: the loss is no number")
    assert ledger.results()["sum=5"]["square"] == 25


def test_where_every_training_fails_the_worker_stops_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, events = working(tmp_path, monkeypatch, "import nowhere")

    assert len(ledger.results()) == TELLING
    assert "got only trainings that failed. The last one: ModuleNotFoundError: No" in events[-1]


def test_a_training_that_crashes_after_its_result_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ranks sometimes do when they exit."""
    body = "import atexit, os; atexit.register(os.abort)"

    assert squares_in(working(tmp_path, monkeypatch, body)[0].results()) == ALL


def test_a_training_that_a_signal_ends_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = working(tmp_path, monkeypatch, "import os; os.kill(os.getpid(), 9)")

    result, *_ = ledger.results().values()
    assert "(it ended with signal 9; see" in result[FAILED]


def test_limits_reach_a_training_and_its_lease_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
while not (folder / "limit").exists():
    time.sleep(0.05)
assert 1000 <= float((folder / "limit").read_text()) <= 1004
time.sleep(1.5)"""

    ledger, _ = working(tmp_path, monkeypatch, body, lease=1.0)

    assert squares_in(ledger.results()) == ALL
    assert all(entry.attempt == 1 for entry in ledger.entries().values())


def test_a_worker_that_is_interrupted_ends_its_training_and_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended = Worker._attend

    def interrupted(self: Worker, entry: object, process: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        working(tmp_path, monkeypatch, "sys.stdin.read(); sys.exit(1)")
    ledger = Ledger.open(str(tmp_path / "j"))
    ledger.want(Squares().next_tasks({}))

    assert ledger.results() == {}
    assert {entry.state for entry in ledger.entries().values()} == {State.WAITING}
    monkeypatch.setattr(Worker, "_attend", attended)
    assert squares_in(working(tmp_path, monkeypatch)[0].results()) == ALL


def test_a_worker_that_is_interrupted_after_its_task_was_lost_says_so_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Worker, entry: Entry, process: object) -> None:
        self._ledger.put_back(entry)  # as another worker does
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_attend", lost)

    with pytest.raises(KeyboardInterrupt):
        working(tmp_path, monkeypatch, "sys.stdin.read(); sys.exit(1)")


def test_a_worker_that_cannot_write_its_folder_puts_its_task_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").write_text("no folder")

    with pytest.raises(OSError, match="out"):
        working(tmp_path, monkeypatch)

    assert State.RUNNING not in {
        each.state for each in Ledger.open(str(tmp_path / "j")).entries().values()
    }


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
        (
            "ArithmeticError: no such luck",
            1,
            "ArithmeticError: no such luck (rank 1 ended with code 1",
        ),
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
    text = printed + _TORCHRUN.format(code=code)
    (tmp_path / "output.txt").write_text(text)

    assert trial_process.reason_in(tmp_path, 1).startswith(f"{reason}; see ")


@contextmanager
def workers(place: Path, output: Path, command: str, *, count: int, lease: float) -> Iterator[list]:  # type: ignore[type-arg]
    program = [sys.executable, str(Path(__file__).parent / "scripted_worker.py")]
    words = [*program, str(place), str(output), command, f"{lease:g}"]
    started = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_a_worker_that_is_killed_in_mid_trial_leaves_its_task_to_another(tmp_path: Path) -> None:
    """And what it was training ends with it."""
    body = """
from noisescale.lab.jobs.trial_process import end_with_stdin
end_with_stdin()
(folder / "pid").write_text(str(__import__("os").getpid()))
time.sleep(600 if spec["n"] == 1 and not folder.name.endswith("-2") else 0)"""
    _, command = script(tmp_path / "train.py", body)
    ledger = Ledger.begin(str(tmp_path / "j"), "test", Squares(), 2.0)
    out = tmp_path / "out"

    with workers(tmp_path / "j", out, command, count=1, lease=2) as (victim,):
        stuck = out / "trials/n=1/pid"
        while not (stuck.exists() and stuck.read_text()):
            assert victim.poll() is None
            time.sleep(0.05)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
    with workers(tmp_path / "j", out, command, count=2, lease=2) as both:
        assert [process.wait(60) for process in both] == [0, 0]

    assert squares_in(ledger.results()) == ALL
    assert ledger.entries()["n=1"].attempt == 2
    assert not psutil.pid_exists(int(stuck.read_text()))


def test_who_watches_waits_for_a_storage_that_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.begin(str(tmp_path / "j"), "test", Squares(0))
    ledger.take([(Task("sum=0", {"n": 0}), {"square": 0})])
    out_of_reach = [StorageInternalError("gone"), OSError("stale file handle")]
    entries, shown = ledger.entries, list[int]()

    def once_in_reach() -> dict[str, Entry]:
        if out_of_reach:
            raise out_of_reach.pop()
        return entries()

    monkeypatch.setattr(ledger, "entries", once_in_reach)
    train_by_workers(
        ledger,
        Squares(0),
        str(tmp_path / "j"),
        tmp_path,
        WorkersToStart(1, "local", {}, 60.0, "auto"),
        lambda found: shown.append(len(found)),
    )

    assert shown == [1]
