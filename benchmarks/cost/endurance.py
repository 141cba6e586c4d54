# SPDX-License-Identifier: Apache-2.0
"""Follow memory, checkpoint size and time a step over 100,000 steps of a small model.

Three fits of the same model run in a process each, 250 steps in turn, so that what else the
machine does falls on all of them: without callbacks; with NoiseScaleMonitor and a
BatchSizeScheduler whose bounds leave one batch size; and with both where every decision moves the
batch size and every 10th step logs, which fills whatever is kept of moves and of log steps. All
accumulate two micro-batches (the last one two or three) and log to a CSVLogger.

Each row is one fit after some steps: resident memory, bytes of the callbacks' pickled state,
objects that Python's garbage collector tracks, and the median time of the last 1,000 steps of two
micro-batches.

    python benchmarks/cost/endurance.py [--smoke]

One thread a process. Exits 1 if memory, objects or state have grown from step 10,000 on by more
than the bounded history, or if a step with callbacks has become slower than one without.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results
from noisescale import BatchSizeScheduler, NoiseScaleMonitor

FEATURES, WIDTH, ROWS, EXAMPLES = 8, 16, 4, 4096
MICRO_BATCHES = 2
"""Of a step, and of those that are timed."""
MARKS, TURN = (1_000, 10_000, 30_000, 100_000), 250
LAST = 1000
SETTLED = 10_000
"""Steps from which on nothing may grow."""
CLAIMED = {"resident_mb": 8.0, "state_kb": 1000.0, "objects": 2000}
"""The most that callbacks may add: the history keeps 4,096 rows of 22 numbers, which is 0.7 MB."""


class Network(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches:
    """An epoch of batches that are there already."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(EXAMPLES, size, generator=generator) for size in (FEATURES, 1))
        self.batches = [list(pair) for pair in zip(x.split(ROWS), y.split(ROWS), strict=True)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.batches)


class EveryDecision:
    """A policy that asks for two and for three micro-batches in turn."""

    needs_noise_scale = True

    def __call__(self, noise_scale: Any, plan: Any, progress: Any) -> float:
        return float(ROWS * (2 * MICRO_BATCHES + 1 - plan.accumulation))


class Turns(Callback):
    """Train some steps at a time, and report at the marks."""

    def __init__(self, connection: Any, marks: tuple[int, ...], turn: int) -> None:
        self.connection, self.marks, self.turn = connection, marks, turn
        self.times: deque[float] = deque(maxlen=LAST)
        self.began = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.wait()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        now = time.perf_counter()
        if trainer.accumulate_grad_batches == MICRO_BATCHES:
            self.times.append(now - self.began)
        step = trainer.global_step
        if step % self.turn == 0:
            self.connection.send(self.row(trainer) if step in self.marks else None)
            self.wait()
            now = time.perf_counter()
        self.began = now

    def wait(self) -> None:
        parent = multiprocessing.parent_process()
        while not self.connection.poll(1.0):
            if parent is None or not parent.is_alive():
                sys.exit(1)  # nobody will say go on
        self.connection.recv()

    def row(self, trainer: Any) -> dict[str, Any]:
        ours = [c for c in trainer.callbacks if hasattr(c, "state_dict") and c is not self]
        state = [state for c in ours if (state := c.state_dict())]
        moves = [len(c.moves) for c in ours if isinstance(c, BatchSizeScheduler)]
        gc.collect()
        return {
            "steps": trainer.global_step,
            "microseconds": round(1e6 * statistics.median(self.times), 1),
            "resident_mb": round(resident_bytes() / 1e6, 1),
            "state_kb": round(len(pickle.dumps(state)) / 1e3, 1) if state else 0.0,
            "objects": len(gc.get_objects()),
            "moves_kept": sum(moves),
        }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def callbacks_of(way: str) -> list[Callback]:
    size = float(MICRO_BATCHES * ROWS)
    if way == "plain":
        return []
    if way == "monitor and scheduler":
        return [NoiseScaleMonitor(), BatchSizeScheduler(min_batch_size=size, max_batch_size=size)]
    return [NoiseScaleMonitor(), BatchSizeScheduler(EveryDecision(), lr_scaling="sqrt")]


WAYS = {"plain": 50, "monitor and scheduler": 50, "a move every decision": 10}
"""Steps between two that log."""


def train(way: str, connection: Any, marks: tuple[int, ...], turn: int) -> None:
    torch.set_num_threads(1)
    disable_possible_user_warnings()
    warnings.simplefilter("ignore")
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),  # a line for each move
    ):
        Trainer(
            accelerator="cpu",
            max_steps=marks[-1],
            max_epochs=-1,
            accumulate_grad_batches=MICRO_BATCHES,
            log_every_n_steps=WAYS[way],
            callbacks=[*callbacks_of(way), Turns(connection, marks, turn)],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Network(), Batches())


def grown(rows: list[dict[str, Any]]) -> list[str]:
    """What has grown from SETTLED on by more than is claimed, and more than without callbacks."""
    found = []
    ends = {
        way: [row for row in rows if row["way"] == way and row["steps"] in (SETTLED, MARKS[-1])]
        for way in WAYS
    }
    before, after = ends["plain"]
    for way in WAYS:
        first, last = ends[way]
        for figure, most in CLAIMED.items():
            extra = last[figure] - first[figure] - max(after[figure] - before[figure], 0)
            if extra > most:
                found.append(f"{way}: {figure} grew by {extra:.1f}")
        slower = last["microseconds"] / after["microseconds"]
        if slower > 1.1 * first["microseconds"] / before["microseconds"]:
            found.append(f"{way}: {slower:.2f} times the plain step")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="60 steps, unsaved")
    smoke = parser.parse_args().smoke
    marks, turn = ((20, 60), 20) if smoke else (MARKS, TURN)
    # Memory of its own for each. A fork is there at once.
    context: Any = multiprocessing.get_context("fork" if smoke else "spawn")
    fits = {}
    for way in WAYS:
        ours, theirs = context.Pipe()
        process = context.Process(target=train, args=(way, theirs, marks, turn), daemon=True)
        process.start()
        theirs.close()
        fits[way] = ours, process
    rows = []
    for _ in range(marks[-1] // turn):
        for way, (connection, _) in fits.items():
            connection.send("go on")
            if (row := connection.recv()) is not None:
                rows.append({"way": way, **row})
                print(rows[-1], flush=True)
                if not smoke and len(rows) % len(WAYS) == 0:
                    write_results("cost/endurance", rows, quiet=True)
    for connection, process in fits.values():
        connection.send("end")
        process.join()
    if smoke:
        return 0
    for line in (found := grown(rows)):
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
