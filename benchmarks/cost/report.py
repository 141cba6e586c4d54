# SPDX-License-Identifier: Apache-2.0
"""Time reading a run back and predicting from it, for runs far longer than usual.

An event file with 100,000 points has to load in less than 5 s, a history of 1,000,000 rows to
predict in less than 1 s. (The monitor keeps 4,096 rows of any run; a million is what may come
from elsewhere.) Medians of a few repetitions; files are read from the page cache.

    python benchmarks/cost/report.py [--smoke]

Exits 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results
from noisescale import History, predict
from noisescale.history.increments import INCREMENTS, SQUARES
from noisescale.history.reading import read_run

TAGS = [
    "step",
    "examples",
    "batch_size",
    "lower_bound",
    "simple",
    "simple_low",
    "simple_high",
    "grad_sq_norm",
    "noise_trace",
    "efficiency",
    "seconds_per_step",
    "skipped_steps",
    *INCREMENTS,
    "devices",
    "accumulation",
]


def columns(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    step = np.arange(1.0, rows + 1)
    noise_scale = 100 + 900 * step / rows
    # A step's own moments scatter about |G|² = 1/b and tr(Σ) = 1; weights are batch sizes.
    own_grad_sq_norm = 1 / noise_scale + rng.normal(0, 1 / 640, rows)
    own_noise_trace = rng.normal(1, 0.1, rows)
    return {
        "step": step,
        "examples": 64 * step,
        "batch_size": np.full(rows, 64.0),
        "noise_scale": noise_scale,
        "low": 0.8 * noise_scale,
        "high": 1.3 * noise_scale,
        "seconds_per_step": rng.uniform(0.09, 0.11, rows),
        "increment_measured_steps": np.ones(rows),
        "increment_weight": np.full(rows, 64.0),
        "increment_noise_trace": 64 * own_noise_trace,
        "increment_grad_sq_norm": 64 * own_grad_sq_norm,
        **dict.fromkeys(SQUARES, np.zeros(rows)),
        "devices": np.full(rows, 4.0),
        "accumulation": np.full(rows, 1.0),
    }


def write_events(folder: Path, rows: int) -> None:
    """Log what the monitor logs, every tag of it."""
    history = columns(rows)
    history |= {
        "simple": history["noise_scale"],
        "simple_low": history["low"],
        "simple_high": history["high"],
        "lower_bound": history["low"],
    }
    with SummaryWriter(str(folder)) as writer:
        for k in range(rows):
            for tag in TAGS:
                value = history[tag][k] if tag in history else 1.0
                writer.add_scalar(f"noise_scale/{tag}", value, k)


def median_seconds(work: Callable[[], object], repetitions: int) -> float:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a hundredth, unsaved")
    smoke = parser.parse_args().smoke
    points, rows = (1_000, 10_000) if smoke else (100_000, 1_000_000)
    repetitions = 1 if smoke else 5
    results = []
    for what, file_rows, aim in (
        (f"event file, {points:,} points of {len(TAGS)} tags", points // len(TAGS), 5.0),
        (f"event file, {points:,} points of each tag", 0 if smoke else points, None),
    ):
        if not file_rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_events(Path(folder), file_rows)
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            # The large one is for the record: once is enough.
            seconds = median_seconds(lambda: read_run(folder), repetitions if aim else 1)
        results.append({"what": what, "seconds": round(seconds, 3), "aim": aim, "bytes": size})
        print(f"{what} ({size / 1e6:.0f} MB): {seconds:.2f} s", flush=True)
    history = History.from_columns(columns(rows))
    seconds = median_seconds(lambda: predict(history, price_per_device_hour=2.0), repetitions)
    results.append(
        {"what": f"prediction from {rows:,} rows", "seconds": round(seconds, 3), "aim": 1.0}
    )
    print(f"prediction from {rows:,} rows: {seconds:.2f} s", flush=True)
    if not smoke:
        write_results("cost/report", results, repetitions=repetitions)
    missed = [row for row in results if row["aim"] and row["seconds"] > row["aim"]]
    return 1 if missed and not smoke else 0


if __name__ == "__main__":
    sys.exit(main())
