# SPDX-License-Identifier: Apache-2.0
"""Sweep digits by `noisescale sweep`: by one worker, by three, by three of which one is killed.

    python benchmarks/prediction/sweeps.py [--only alone "alone, cold" ...] [--smoke]

The first two are done again by workers whose trainings import their packages anew. All have to end
with the same steps in sweep.csv, and all evaluations that two of them share have to be equal to the
last bit. The time of the processors is that of the command and of all that it starts. The critical
batch size stands beside that of single_runs.py, which tunes the same model without any of the
package's code for sweeps. In the third sweep a worker is killed in mid-trial with SIGKILL, and then
a process that holds the journal's lock. Last, an idle worker is timed: what it costs to wait. Exits
1 if anything differs. With `--only` the rows of the other sweeps are the saved ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import saved_rows, write_results
from noisescale import fit_tradeoff
from noisescale.tradeoff.sweep_files import read_sweeps

ROOT = Path(__file__).resolve().parents[2]

TRAIN = f"""
import sys
sys.path.append({str(ROOT)!r})
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset
from benchmarks.lib.workloads import WORKLOADS

DIGITS = WORKLOADS["digits"]

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = DIGITS.model()

    def training_step(self, batch, batch_idx):
        return DIGITS.loss(self.net, batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", DIGITS.loss(self.net, batch))

    def configure_optimizers(self):
        return DIGITS.optimizer_of(self, DIGITS.first_lr, 8)

def make():
    train, held = DIGITS.data()
    loader = DataLoader(TensorDataset(*train), batch_size=8, shuffle=True)
    return Module(), (loader, DataLoader(TensorDataset(*held), batch_size=512))
"""

HOLD = """
import sys, time
from optuna.storages.journal import JournalFileOpenLock
JournalFileOpenLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(600)
"""

SWEEPS = {"alone": 1, "together": 3, "killed": 3, "alone, cold": 1, "together, cold": 3}
"""Workers of each sweep."""

IDLE = 30.0
"""Seconds for which an idle worker is watched."""


def command(folder: Path, workers: int, arguments: argparse.Namespace) -> list[str]:
    sizes = "16,64" if arguments.smoke else "8..1024"
    words = ["sweep", "train.py:make", "--goal", "val_loss<0.2", "--batch-sizes", sizes]
    words += ["--trials", "3" if arguments.smoke else "4", "--repeats", "2", "--epochs", "60"]
    words += ["--accelerator", "cpu", "--output", str(folder), "--workers", str(workers)]
    words += ["--cold"] if folder.name.endswith("cold") else []
    return [sys.executable, "-m", "noisescale", *words, "--lease", "10", "--json"]


def swept(name: str, at: Path, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Sweep, and kill what is to be killed."""
    folder = at / name
    began, before = time.perf_counter(), processor_seconds()
    with (at / f"{name}.json").open("wb") as output:
        process = subprocess.Popen(
            command(folder, workers, arguments), cwd=at, stdout=output, env=environment(at)
        )
        killed = kill_some(process, folder) if name == "killed" else []
        code = process.wait()
    seconds = time.perf_counter() - began
    with suppress(ChildProcessError):  # what outlived its parent, see `adopt`
        while True:
            os.wait()
    status = json.loads((at / f"{name}.json").read_text())
    curve = read_sweeps(folder / "sweep.csv")[""]
    fit = fit_tradeoff(*curve)
    row = {
        "sweep": name,
        "workers": workers,
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor_seconds() - before, 1),
        "code": code,
        "trainings": status["done"],
        "failures": len(status["failures"]),
        "device_hours": status["device_hours"],
        "killed": killed,
        "critical_batch_size": round(fit.critical_batch_size, 2),
        "steps": [list(point) for point in zip(*curve, strict=True)],
    }
    print(json.dumps(row), flush=True)
    return row


def adopt() -> None:
    """Become the parent of what outlives its own, such as fork servers: their time counts here."""
    set_child_subreaper = 36
    if ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0):
        raise OSError("prctl failed")


def processor_seconds() -> float:
    """Return the time of the processors that all ended children have had."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def differing(at: Path, names: list[str]) -> int:
    """Return how many evaluations that two sweeps share are not equal to the last bit."""
    found = 0
    known: dict[str, list[tuple[int, float]]] = {}
    for path in (path for name in names for path in (at / name / "trials").glob("*/result.json")):
        result = json.loads(path.read_text())
        values = list(zip(result["steps"], result["values"], strict=True))
        longest = known.setdefault(path.parent.name.removesuffix("-2"), values)
        found += sum(mine != other for mine, other in zip(values, longest, strict=False))
        if len(values) > len(longest):
            known[path.parent.name.removesuffix("-2")] = values
    return found


def kill_some(process: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """Kill a worker in mid-trial, and then a process that holds the journal's lock."""
    while True:
        time.sleep(0.5)
        busy = [each for each in psutil.Process(process.pid).children() if trains(each)]
        if len(list((folder / "trials").glob("*/result.json"))) >= 6 and busy:
            break
    os.kill(busy[0].pid, signal.SIGKILL)
    said = ["worker in mid-trial"]
    journal = str((folder / "sweep.journal").absolute())
    with subprocess.Popen([sys.executable, "-c", HOLD, journal], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGKILL)
    return [*said, "holder of the lock"]


def trains(worker: psutil.Process) -> bool:
    """Return whether a worker's fork server has a child."""
    with suppress(psutil.NoSuchProcess):
        return any(server.children() for server in worker.children())
    return False


def idle(at: Path, swept: str) -> dict[str, Any]:
    """What a worker costs while there is nothing to train: its one task is taken by another."""
    from noisescale.lab.jobs.jobs import Task
    from noisescale.lab.jobs.ledger import Ledger
    from noisescale.lab.jobs.status import job_from

    place = at / swept / "sweep.journal"
    done = Ledger.open(str(place))
    job = job_from(done.job)
    other = Ledger.begin(str(at / "idle.journal"), "sweep", job)
    *earlier, _ = [each for each in done.entries().values() if each.result]
    other.take((Task(each.key, each.spec), each.result) for each in earlier)
    waiting = job.next_tasks(other.entries())
    other.want(waiting)
    for task in waiting:
        assert other.claim([task.key], {"host": "elsewhere", "process": 1})
    words = ["work", "--storage", str(at / "idle.journal"), "--output", str(at / "idle")]
    worker = subprocess.Popen(
        [sys.executable, "-m", "noisescale", *words, "--lease", "600"], env=environment(at), cwd=at
    )
    time.sleep(10)  # it starts
    watched = psutil.Process(worker.pid)
    before = sum(watched.cpu_times()[:2])
    size = (at / "idle.journal").stat().st_size
    time.sleep(IDLE)
    row = {
        "sweep": "idle worker",
        "trainings": len(earlier) + 1,
        "processor_share": round((sum(watched.cpu_times()[:2]) - before) / IDLE, 4),
        "megabytes": round(watched.memory_info().rss / 2**20),
        "bytes_written": (at / "idle.journal").stat().st_size - size,
    }
    worker.terminate()
    worker.wait()
    print(json.dumps(row), flush=True)
    return row


def tuned() -> dict[str, Any]:
    """The same curve by single_runs.py: the median over seeds of the best learning rate."""
    best: dict[int, float] = {}
    for row in saved_rows("prediction/single_runs"):
        if (row["kind"], row["workload"]) == ("sweep", "digits"):
            steps = [math.inf if each is None else each for each in row["steps"]]
            size = row["batch_size"]
            best[size] = min(best.get(size, math.inf), statistics.median(steps))
    fit = fit_tradeoff(list(best), list(best.values()))
    return {
        "critical_batch_size": round(fit.critical_batch_size, 2),
        "steps": sorted(best.items()),
    }


def environment(at: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two batch sizes; nothing is saved")
    parser.add_argument(
        "--only", nargs="+", choices=SWEEPS, help="sweep these anew, keep the saved others"
    )
    arguments = parser.parse_args()
    chosen = arguments.only or list(SWEEPS)
    adopt()
    keeps = arguments.only and not arguments.smoke
    kept = {row["sweep"]: row for row in saved_rows("prediction/sweeps")} if keeps else {}
    with tempfile.TemporaryDirectory() as made:
        at = Path(made)
        (at / "train.py").write_text(TRAIN)
        found = kept | {name: swept(name, at, SWEEPS[name], arguments) for name in chosen}
        rows = [found[name] for name in SWEEPS if name in found]
        same = all(row["steps"] == rows[0]["steps"] for row in rows)
        rows.append(idle(at, chosen[0]))
        bits = differing(at, chosen)
        if not arguments.smoke:
            facts = {"same_table": same, "differing_evaluations": bits}
            write_results("prediction/sweeps", rows, **facts, of_prediction=tuned())
    print(f"The tables {'are the same' if same else 'differ'}; {bits} evaluations differ.")
    sys.exit(not same or bits > 0)


if __name__ == "__main__":
    main()
