# SPDX-License-Identifier: Apache-2.0
"""Whether halves notice that rows of a batch are alike: false alarms, and how soon each is seen.

Each training of `_alike_tasks.py` measures every fourth step by halves. After 30, 100 and 300
measured steps the row has the statistics of `noisescale.estimation.row_similarity`, and whether
they say that rows are alike. In the sound trainings that is a false alarm.

    python benchmarks/accuracy/alike.py --seed 5000 --save
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.accuracy._alike_tasks import SOUND, UNSOUND, Task
from benchmarks.lib.results import saved_rows, write_results
from noisescale import NoiseScaleMeter
from noisescale.collectors.halves import similarity_numbers

NAME = "accuracy/alike"
EVERY = 4
LOOKS = (30, 100, 300)
OPTIMIZERS: dict[str, Callable[[Iterable[Any], float], Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, rate),
}
SETTINGS = [
    ("sgd", 16, 0.1),
    ("sgd", 64, 0.5),
    ("momentum", 32, 0.04),
    ("adamw", 16, 0.001),
    ("adamw", 128, 0.004),
    ("sgd", 8, 0.02),
    ("adamw", 4, 0.001),
    ("sgd", 256, 1.0),
]
"""Optimizer, batch size and learning rate; the last rate is at the edge of stability or beyond."""


def train(task: Task, optimizer: str, rows: int, rate: float, seed: int, looks: int) -> Any:
    """Return what the statistics say after each number of measured steps."""
    torch.manual_seed(seed)
    generator, model = torch.Generator().manual_seed(seed + 1), task.make()
    stepping = OPTIMIZERS[optimizer](model.parameters(), rate)
    meter = NoiseScaleMeter(model, small_batch="half", every_n_steps=EVERY)
    found: list[dict[str, Any]] = []
    collector: Any = meter._capture.collector
    similarity = collector._similarity.found
    for step in range(EVERY * LOOKS[looks - 1]):
        stepping.zero_grad()
        batch = task.draw(rows, generator, step)
        meter.backward(task.loss(model, batch), rows)
        meter.step()
        stepping.step()
        measured, rest = divmod(step + 1, EVERY)
        if not rest and measured in LOOKS:
            value = meter.noise_scale.value
            if meter.not_measured is not None:
                return {"refused": meter.not_measured}
            now = similarity.look()
            shown = {"by_steps": now.by_steps, "by_rows": now.by_rows}
            found.append({"after": measured, "noise_scale": value, **now._asdict(), **shown})
    return {"looks": found}


def summary(rows: list[dict[str, Any]]) -> None:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        kind = "all sound ones" if row["sound"] else row["task"]
        counts[kind]["runs"] += 1
        if "refused" in row:
            counts[kind]["refused"] += 1
            continue
        for look in row["looks"]:
            counts[kind][f"after {look['after']}"] += look["by_steps"] or look["by_rows"]
            counts[kind][f"{look['after']} by steps"] += look["by_steps"]
    for kind, of in counts.items():
        print(f"{kind}:", ", ".join(f"{name} {n}" for name, n in of.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=5000)
    parser.add_argument("--looks", type=int, default=3, help="1: 30 measured steps are enough")
    parser.add_argument("--tasks", nargs="*", help="their names, or parts of these")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = saved_rows(NAME) if options.save else []
    done = {(row["task"], row["optimizer"], row["rows"], row["seed"]) for row in rows}
    jobs = [
        *((True, *job) for job in itertools.product(SOUND, SETTINGS)),
        *((False, *job) for job in itertools.product(UNSOUND, SETTINGS[:5])),
    ]
    for number, (sound, task, (optimizer, size, rate)) in enumerate(jobs):
        seed, begun = options.seed + number, time.perf_counter()
        if options.tasks and not any(part in task.name for part in options.tasks):
            continue
        if (task.name, optimizer, size, seed) in done:
            continue
        # The verdict would end the measurement.
        with patch.object(similarity_numbers.RowSimilarity, "is_due", False):
            found = train(task, optimizer, size, rate, seed, options.looks)
        of = {"task": task.name, "optimizer": optimizer, "rows": size, "rate": rate, "seed": seed}
        seconds = round(time.perf_counter() - begun, 1)
        rows.append({"sound": sound, **of, "seconds": seconds, **found})
        print(
            task.name,
            optimizer,
            size,
            [o["by_steps"] or o["by_rows"] for o in found.get("looks", [])],
        )
        if options.save:
            write_results(NAME, rows, quiet=True, every=EVERY)
    summary(rows)


if __name__ == "__main__":
    main()
