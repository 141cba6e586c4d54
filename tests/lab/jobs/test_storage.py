# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import pytest
from lab.jobs.jobs_for_tests import Squares
from packaging.version import Version

from noisescale.lab.jobs import storage
from noisescale.lab.jobs.jobs import Task
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.storage import StorageError, open_storage, retry

HOLD = """
import os, sys, time
from optuna.storages.journal import JournalFileOpenLock
JournalFileOpenLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.filterwarnings("ignore:The existing lock file")  # of Optuna before 4.5
def test_the_lock_of_a_process_that_was_killed_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the path is relative, and in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "GRACE", 3)
    place = "below/sweep.journal"
    Ledger.begin(place, "test", Squares())
    held = [sys.executable, "-c", HOLD, str(tmp_path / place)]
    with subprocess.Popen(held, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGKILL)

    began = time.monotonic()
    ledger = Ledger.begin(place, "test", Squares())
    ledger.want(Squares().next_tasks({}))

    assert 1 < time.monotonic() - began < 30
    assert len(ledger.entries()) == 3


def test_a_last_line_that_was_never_finished_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "sweep.journal"
    Ledger.begin(str(path), "test", Squares()).want(Squares().next_tasks({}))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":4,"worker_id":"x","tri')

    ledger = Ledger.open(str(path))
    ledger.take([(Task("n=9", {"n": 9}), {"square": 81})])

    assert path.read_bytes().startswith(whole)
    assert len(Ledger.open(str(path)).entries()) == 4


def test_a_line_that_a_full_disk_cut_off_does_not_take_the_next_one_with_it(
    tmp_path: Path,
) -> None:
    """Nobody could read the journal from then on."""
    path = tmp_path / "sweep.journal"
    ledger = Ledger.begin(str(path), "test", Squares())
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","tri')

    ledger.want(Squares().next_tasks({}))
    ledger.take([(Task("n=9", {"n": 9}), {"square": 81})])

    assert len(ledger.entries()) == 4
    assert len(Ledger.open(str(path)).entries()) == 4


def test_a_journal_that_is_none_and_places_that_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no journal\n")
    (tmp_path / "closed").mkdir()

    for place, said in (
        (str(tmp_path / "notes.txt"), "must be a journal of Optuna, got"),
        (str(tmp_path / "none.journal"), "must exist, got"),
        (str(tmp_path / "closed"), "must be a file, got the folder"),
        (
            "postgresql://me:secret@nowhere/db",
            "must be a database within reach, got postgresql://nowhere/db",
        ),
        ("sqlite:////nowhere/at/all.db", "must be a database within reach, got sqlite:"),
        ("grpc://host", "must have a host and a port, got grpc://host"),
    ):
        with pytest.raises(StorageError, match=r"^`storage` ") as refused:
            open_storage(place)
        assert said in str(refused.value)
        assert "secret" not in str(refused.value)


@pytest.mark.skipif(
    Version(version("protobuf")) < Version("5.28"), reason="Optuna's proxy needs protobuf 5.28"
)
def test_a_proxy_serves_a_ledger(tmp_path: Path) -> None:
    from optuna.storages import run_grpc_proxy_server

    port = 13_000 + os.getpid() % 2_000
    behind = open_storage(str(tmp_path / "sweep.journal"), new=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = Thread(
            target=run_grpc_proxy_server,
            args=(behind,),
            kwargs={"host": "localhost", "port": port},
            daemon=True,
        )
        server.start()
        ledger = Ledger.begin(f"grpc://localhost:{port}", "test", Squares())
        ledger.want(Squares().next_tasks({}))
        entry = ledger.claim(["n=1"], {"host": "here", "process": 1})
        assert entry is not None
        ledger.finish(entry, {"square": 1})

    assert Ledger.open(str(tmp_path / "sweep.journal")).results() == {"n=1": {"square": 1}}


def test_a_storage_that_is_out_of_reach_for_a_while_is_asked_again() -> None:
    failures = [OSError("gone"), OSError("gone")]

    def call() -> str:
        if failures:
            raise failures.pop()
        return "back"

    assert retry(call) == "back"
    with pytest.raises(StorageError, match="`storage` must be within reach, got OSError: still"):
        retry(lambda: (_ for _ in ()).throw(OSError("still gone")), seconds=0.1)
    with pytest.raises(KeyError):
        retry(lambda: {}["x"])
