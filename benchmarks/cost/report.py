# SPDX-License-Identifier: Apache-2.0
"""Time reading a run back and predicting from it, for runs far longer than usual.

A record of 100,000 rows has to load in less than 5 s, a history of 1,000,000 rows to predict in
less than 1 s. (The monitor keeps 4,096 rows of any run; a million is what may come
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

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.lib.results import write_results
from noisescale import History, predict
from noisescale.history.increments import SQUARES
from noisescale.history.reading import read_run
from noisescale.history.record import RECORD, Recorder


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
        "increment_sq_weight": np.full(rows, 64.0**2),
        "increment_noise_trace": 64 * own_noise_trace,
        "increment_grad_sq_norm": 64 * own_grad_sq_norm,
        **dict.fromkeys(SQUARES, np.zeros(rows)),
        "devices": np.full(rows, 4.0),
        "accumulation": np.full(rows, 1.0),
    }


def write_record(folder: Path, rows: int) -> Path:
    """Write the record of a run with so many rows."""
    history = History.from_columns(columns(rows))
    Recorder(folder).end(history)
    return folder / RECORD


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
    recorded, rows = (1_000, 10_000) if smoke else (100_000, 1_000_000)
    repetitions = 1 if smoke else 5
    with tempfile.TemporaryDirectory() as folder:
        size = write_record(Path(folder), recorded).stat().st_size
        seconds = median_seconds(lambda: read_run(folder), repetitions)
    what = f"record of {recorded:,} rows"
    results = [{"what": what, "seconds": round(seconds, 3), "aim": 5.0, "bytes": size}]
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
