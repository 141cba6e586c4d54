# SPDX-License-Identifier: Apache-2.0
"""Sweep digits by `noisescale sweep`: by one worker, by three, by three of which one is killed.

    python benchmarks/prediction/sweeps.py [--only alone|together|killed] [--smoke]

All three have to end with the same steps in sweep.csv. Its critical batch size stands beside that
of single_runs.py, which tunes the same model without any of the package's code for sweeps. In the
third sweep a worker is killed in mid-trial with SIGKILL, and then a process that holds the
journal's lock. Last, an idle worker is timed: what it costs to wait. Exits 1 if the steps differ.
With `--only` the rows of the other sweeps are the saved ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
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

SWEEPS = {"alone": 1, "together": 3, "killed": 3}
"""Workers of each sweep."""

IDLE = 30.0
"""Seconds for which an idle worker is watched."""


def command(folder: Path, workers: int, arguments: argparse.Namespace) -> list[str]:
    sizes = "16,64" if arguments.smoke else "8..1024"
    words = ["sweep", "train.py:make", "--goal", "val_loss<0.2", "--batch-sizes", sizes]
    words += ["--trials", "3" if arguments.smoke else "4", "--repeats", "2", "--epochs", "60"]
    words += ["--accelerator", "cpu", "--output", str(folder), "--workers", str(workers)]
    return [sys.executable, "-m", "noisescale", *words, "--lease", "10", "--json"]


def swept(name: str, at: Path, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Sweep, and kill what is to be killed."""
    folder = at / name
    began = time.perf_counter()
    with (at / f"{name}.json").open("wb") as output:
        process = subprocess.Popen(
            command(folder, workers, arguments), cwd=at, stdout=output, env=environment(at)
        )
        killed = kill_some(process, folder) if name == "killed" else []
        code = process.wait()
    seconds = time.perf_counter() - began
    status = json.loads((at / f"{name}.json").read_text())
    curve = read_sweeps(folder / "sweep.csv")[""]
    fit = fit_tradeoff(*curve)
    row = {
        "sweep": name,
        "workers": workers,
        "seconds": round(seconds, 1),
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


def kill_some(process: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """Kill a worker in mid-trial, and then a process that holds the journal's lock."""
    while True:
        time.sleep(0.5)
        below = psutil.Process(process.pid).children(recursive=True)
        trials = [each for each in below if "noisescale.lab.jobs.trial" in each.cmdline()]
        if len(list((folder / "trials").glob("*/result.json"))) >= 3 and trials:
            break
    worker = trials[0].parent()
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    said = [f"worker in {Path(trials[0].cmdline()[-1]).name}"]
    journal = str((folder / "sweep.journal").absolute())
    with subprocess.Popen([sys.executable, "-c", HOLD, journal], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGKILL)
    return [*said, "holder of the lock"]


def idle(at: Path, swept: str) -> dict[str, Any]:
    """What a worker costs while there is nothing to train: its one task is taken by another."""
    from noisescale.lab.jobs.jobs import Task
    from noisescale.lab.jobs.known_jobs import job_from
    from noisescale.lab.jobs.ledger import Ledger

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
    parser.add_argument("--only", choices=SWEEPS, help="sweep this one anew, keep the saved others")
    arguments = parser.parse_args()
    chosen = [arguments.only] if arguments.only else list(SWEEPS)
    kept = {row["sweep"]: row for row in saved_rows("prediction/sweeps")} if arguments.only else {}
    with tempfile.TemporaryDirectory() as made:
        at = Path(made)
        (at / "train.py").write_text(TRAIN)
        found = kept | {name: swept(name, at, SWEEPS[name], arguments) for name in chosen}
        rows = [found[name] for name in SWEEPS]
        same = all(row["steps"] == rows[0]["steps"] for row in rows)
        rows.append(idle(at, chosen[0]))
        if not arguments.smoke:
            write_results("prediction/sweeps", rows, same_table=same, of_prediction=tuned())
    print("The tables are the same." if same else "The tables differ.")
    sys.exit(not same)


if __name__ == "__main__":
    main()
