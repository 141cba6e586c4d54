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
from types import SimpleNamespace
from unittest import mock

import pytest
from lab.jobs.jobs_for_tests import SQUARES, begun, claimed
from packaging.version import Version
from refused import refused
from tiers import slow

from noisescale.lab.jobs import storage
from noisescale.lab.jobs.jobs import Task
from noisescale.lab.jobs.ledger import Ledger
from noisescale.lab.jobs.storage import open_storage, retry

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
    Ledger.begin(place, "test", SQUARES)
    held = [sys.executable, "-c", HOLD, str(tmp_path / place)]
    with subprocess.Popen(held, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        os.kill(holder.pid, signal.SIGKILL)

    began = time.monotonic()
    ledger = begun(place)

    assert 1 < time.monotonic() - began < 30
    assert len(ledger.entries()) == 3


TORN = b'{"op_code":4,"worker_id":"x","tri'


@pytest.mark.parametrize("opened", [False, True])
def test_a_last_line_that_was_never_finished_is_cut_off(tmp_path: Path, opened: bool) -> None:
    """By a killed process, or by a full disk under a ledger that goes on.

    Nobody could read the journal if the next line was appended to it.
    """
    path = tmp_path / "sweep.journal"
    ledger = begun(path)
    whole = path.read_bytes()
    path.write_bytes(whole + TORN)

    ledger = ledger if opened else Ledger.open(str(path))
    ledger.take([(Task("n=9", {"n": 9}), {"square": 81})])

    assert path.read_bytes().startswith(whole)
    assert len(ledger.entries()) == 4
    assert len(Ledger.open(str(path)).entries()) == 4


@pytest.mark.parametrize(
    ("place", "requirement", "got"),
    [
        ("notes.txt", "a journal of Optuna", ""),
        ("none.journal", "exist", ""),
        ("closed", "a file", "the folder"),
        slow("postgresql://me:secret@nowhere/db", "within reach", "postgresql://nowhere/db"),
        slow("sqlite:////nowhere/at/all.db", "within reach", "sqlite:"),
        ("grpc://host", "a host and a port", "grpc://host"),
    ],
)
def test_a_journal_that_is_none_and_places_that_are_not_there_are_refused(
    place: str, requirement: str, got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("no journal\n")
    Path("closed").mkdir()

    with refused("storage", requirement=requirement) as found:
        open_storage(place)
    assert got in found.value.got
    assert "secret" not in str(found.value)


@pytest.mark.slow
@pytest.mark.skipif(
    Version(version("protobuf")) < Version("5.28"), reason="Optuna's proxy needs protobuf 5.28"
)
def test_a_proxy_serves_a_ledger(tmp_path: Path) -> None:
    """In a process of its own: gRPC leaves threads behind, and other tests fork theirs."""
    from ranks import call_in_a_fork

    call_in_a_fork(_serve, tmp_path)


def _serve(tmp_path: Path) -> None:
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
        ledger = begun(f"grpc://localhost:{port}")
        ledger.finish(claimed(ledger, "n=1"), {"square": 1})

    assert Ledger.open(str(tmp_path / "sweep.journal")).results() == {"n=1": {"square": 1}}


def test_a_storage_that_is_out_of_reach_for_a_while_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(storage, "time", clock)
    call = mock.Mock(side_effect=[OSError("gone"), OSError("gone"), "back"])

    assert retry(call) == "back"
    with refused("storage", got="OSError: still gone"):
        retry(mock.Mock(side_effect=OSError("still gone")), seconds=60)
    assert 60 < sum(slept) < 70
    assert max(slept) == 5
    with pytest.raises(KeyError):
        retry(lambda: {}["x"])
