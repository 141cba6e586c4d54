# SPDX-License-Identifier: Apache-2.0
"""Trainings that are forks of one process, beside trainings that are processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab.jobs.jobs_for_tests import TRAIN

MODULE = f"""
{TRAIN}
import atexit, multiprocessing, signal, sys, tempfile, threading
from torch.utils.data import random_split

train, held, _ = random_split(data, [64, 32, 160])

def make():
    return Line(), (DataLoader(train, 8, shuffle=True), DataLoader(held, 32))
"""
"""Its data are divided when it is imported."""

SCRIPTS = {
    "plain": "",
    "leaves": """
os.environ["LEFT"] = "1"
torch.set_num_threads(2)
held_in_memory = torch.ones(2**25)
threading.Thread(target=threading.Event().wait, daemon=True).start()
""",
    "looks": """
print("LEFT" in os.environ, threading.active_count(), torch.get_num_threads())
print(multiprocessing.get_start_method(), multiprocessing.current_process().name)
print(multiprocessing.parent_process())
print(sys.argv[0].endswith("trial.py"), len(sys.argv), __import__("__main__").__spec__.name)
""",
    "exits": "os._exit(7)",
    "kills": "os.kill(os.getpid(), signal.SIGKILL)",
    "raises": "raise ArithmeticError('no such luck')",
    "quits": "sys.exit('enough')",
    "writes": """
unclosed = open("unclosed.txt", "w")
unclosed.write("all of it")
atexit.register(lambda: open("at_exit.txt", "w").write("done"))
removed = tempfile.TemporaryDirectory(dir=".", prefix="removed")
def work():
    threading.main_thread().join()
    open("thread.txt", "w").write("waited for")
threading.Thread(target=work).start()
""",
    "lambda": """
def make():
    collate = torch.utils.data.default_collate
    loader = DataLoader(train, 8, shuffle=True, num_workers=1, collate_fn=lambda b: collate(b))
    return Line(), (loader, DataLoader(held, 32))
""",
    "sleeps": """
open("asleep.txt", "w").close()
threading.Event().wait()
""",
}
ORDER = ("plain", *(name for name in SCRIPTS if name != "sleeps"), "looks", "plain")
"""The first one is cold, all others are warm."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first test waits for all trainings

DRIVER = Path(__file__).with_name("warm_trainings.py")

Trained = Mapping[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(MODULE + text)
    return folder


@pytest.fixture(scope="module")
def trained(place: Path) -> Trained:
    """What the trainings found, and which processes were alive after their worker was killed."""
    words = [sys.executable, str(DRIVER), "out", *(f"{name}.py" for name in (*ORDER, "sleeps"))]
    with (place / "printed.txt").open("w") as printed:
        worker = subprocess.Popen(words, cwd=place, stdout=printed, stderr=printed)
    asleep = place / "asleep.txt"
    while not asleep.exists():
        assert worker.poll() is None, (place / "printed.txt").read_text()
        time.sleep(0.1)
    left = psutil.Process(worker.pid).children(recursive=True)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    _, alive = psutil.wait_procs(left, 20)
    found: Trained = json.loads((place / "out/found.json").read_text())
    assert not found["events"]
    return {**found, "left": len(left), "alive": alive}


def one(trained: Trained, name: str, which: int = -1) -> Trained:
    ones: list[Trained] = [each for each in trained["trained"] if each["script"] == f"{name}.py"]
    return ones[which]


def test_the_first_training_is_cold_and_all_others_are_forks(trained: Trained) -> None:
    kinds = [each["kind"] for each in trained["trained"]]

    assert kinds == ["ColdProcess", *["WarmProcess"] * (len(ORDER) - 1)]
    assert all(each["ended"] for each in trained["trained"])
    # A fork ends with its worker, also if the worker is killed.
    assert trained["left"] >= 3  # the server, its fork, and what tracks their resources
    assert not trained["alive"]


def test_a_fork_takes_the_steps_of_a_cold_training_bit_for_bit(trained: Trained) -> None:
    """Also what the script draws when it is imported follows the seed of the training."""
    cold, *warm = [one(trained, "plain", k)["found"] for k in range(3)]

    assert len(cold["values"]) > 3
    for each in warm:
        assert [each[name] == cold[name] for name in ("steps", "values", "ended")] == [True] * 3
    # Also with workers of a loader that take a lambda.
    assert one(trained, "lambda")["found"]["values"] == cold["values"]


def test_to_its_script_a_fork_is_a_process_of_its_own(trained: Trained) -> None:
    lines = [one(trained, "looks", k)["printed"].splitlines() for k in (0, 1)]

    assert one(trained, "leaves")["found"]["ended"] == "out of steps"
    assert lines[0][0] == lines[1][0]  # nothing of what another training leaves behind
    left, start, parent, main = lines[1][:4]
    assert left.startswith("False 2 ")  # the second thread ends the fork if the worker ends
    usual = "fork" if sys.version_info < (3, 14) else "forkserver"
    assert start == f"{usual} MainProcess"
    assert parent == "None"  # else it would be a worker of a data loader to its script
    assert main == "True 2 noisescale.lab.jobs.trial"


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("exits", 7, "it printed nothing (it ended with code 7; see "),
        ("kills", -9, "it printed nothing (it ended with signal 9; see "),
        ("raises", 1, "ArithmeticError: no such luck (it ended with code 1; see "),
        ("quits", 1, "enough (it ended with code 1; see "),
    ],
)
def test_a_fork_that_fails_says_why(trained: Trained, name: str, code: int, reason: str) -> None:
    found = one(trained, name)

    assert (found["found"], found["code"]) == (None, code)
    assert found["reason"].startswith(reason)


def test_a_fork_ends_as_an_interpreter_does(place: Path, trained: Trained) -> None:
    assert one(trained, "writes")["code"] == 0

    written = [(place / f"{name}.txt").read_text() for name in ("unclosed", "at_exit", "thread")]
    assert written == ["all of it", "done", "waited for"]
    assert not list(place.glob("removed*"))


PACKAGES = {
    "draws": "import random; random.random()",
    "breaks": "raise KeyError('where')",
    "starts": "from threading import *; Thread(target=Event().wait, daemon=True).start()",
    "sets": "import os; os.environ['OF_PACKAGE'] = '1'",
    "uses": "import namesake",
    "namesake": "",
}

WHY_NOT = """
import importlib, json, os, sys
from pathlib import Path
from noisescale.lab.jobs.trial_imports import import_reported
importlib.import_module("noisescale.lightning.training")
for report in sys.argv[1:]:
    if not os.fork():
        print(report, import_reported(Path(report)), flush=True)
        os._exit(0)
    os.wait()
"""
"""A process that tells what it says of each report."""


def test_where_a_fork_might_differ_from_a_cold_training_the_reason_is_told(tmp_path: Path) -> None:
    """A package may read at its import what the script has set before."""
    for name, body in PACKAGES.items():
        (tmp_path / f"{name}.py").write_text(body)
    usual = {"own": {}, "origins": {}, "environment": {}, "defaults": ["torch.float32", "cpu"]}
    reports: dict[str, dict[str, Any]] = {name: {"packages": [name]} for name in PACKAGES}
    reports["script"] = {"packages": ["sets"], "environment": {"OF_PACKAGE": "1", "OF_SCRIPT": "1"}}
    reports["float64"] = {"packages": ["sets"], "defaults": ["torch.float64", "cpu"]}
    reports["mine"] = {"packages": ["uses"], "own": {"namesake": "sub/namesake.py"}}
    reports["other"] = {"packages": ["uses"], "origins": {"namesake": "elsewhere/namesake.py"}}
    for name, report in reports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(usual | report))

    program = [sys.executable, "-c", WHY_NOT, *(f"{name}.json" for name in reports)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=250)

    at = tmp_path / "namesake.py"
    words = dict.fromkeys(reports, "") | {
        "draws": "random numbers",
        "breaks": "KeyError: 'where'",
        "starts": "1 threads",
        "script": "OF_SCRIPT",
        "float64": "default dtype",
        "mine": "your own namesake",
        "other": f"{at} for a package and elsewhere/namesake.py",
    }
    for line, (name, word) in zip(done.stdout.splitlines(), words.items(), strict=True):
        report, _, reason = line.partition(" ")
        assert report == f"{name}.json"
        assert word in reason if word else not reason
