# SPDX-License-Identifier: Apache-2.0
"""Whether it is noticed that rows of a batch are alike: false alarms, and how soon each is seen.

Each training of `_alike_tasks.py` measures two successive steps of eight by halves, or by two or
more micro-batches. After 30, 100 and 300 measured steps the row has the statistics of
`noisescale.estimation.row_similarity`, and whether they say that small batches are alike. In the
sound trainings that is a false alarm. By micro-batches it is one wherever each has its own draw.

    python benchmarks/accuracy/alike.py --seed 5000 --save
    python benchmarks/accuracy/alike.py --seed 7000 --sound --save
    python benchmarks/accuracy/alike.py --seed 9000 --micro-batches 2 --looks 2 --save
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
from noisescale.collectors import steps_apart
from noisescale.meter.cadence import Cadence

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


def in_pairs(_: Cadence, step: int, *__: Any, **___: Any) -> bool:
    """Measure two successive steps of eight, as the default measures two of thirty, say."""
    return (step - 1) % (2 * EVERY) < 2


def train(
    task: Task, optimizer: str, rows: int, rate: float, seed: int, looks: int, micro: int
) -> Any:
    """Return what the statistics say after each number of measured steps."""
    torch.manual_seed(seed)
    generator, model = torch.Generator().manual_seed(seed + 1), task.make()
    stepping = OPTIMIZERS[optimizer](model.parameters(), rate)
    meter = NoiseScaleMeter(model)
    found: list[dict[str, Any]] = []
    collector: Any = meter._capture.collector
    similarity = collector._apart.found
    for step in range(EVERY * LOOKS[looks - 1]):
        stepping.zero_grad()
        for which in range(micro):
            batch = task.draw(rows, generator, step * micro + which)
            meter.backward(task.loss(model, batch) / micro, rows)
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
        if (micro := row.get("micro_batches", 1)) > 1:
            kind += f", {micro} micro-batches"
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
    parser.add_argument("--sound", action="store_true", help="leave the others out")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each step")
    parser.add_argument("--tasks", nargs="*", help="their names, or parts of these")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = saved_rows(NAME) if options.save else []
    micro = options.micro_batches
    done = {
        (row["task"], row["optimizer"], row["rows"], row["seed"], row.get("micro_batches", 1))
        for row in rows
    }
    jobs = [
        *((True, *job) for job in itertools.product(SOUND, SETTINGS)),
        *((False, *job) for job in itertools.product(UNSOUND, SETTINGS[:5])),
    ]
    for number, (sound, task, (optimizer, size, rate)) in enumerate(jobs):
        seed, begun = options.seed + number, time.perf_counter()
        if options.sound and not sound:
            continue
        if options.tasks and not any(part in task.name for part in options.tasks):
            continue
        if (task.name, optimizer, size, seed, micro) in done:
            continue
        # The verdict would end the measurement.
        with (
            patch.object(steps_apart.RowSimilarity, "is_due", False),
            patch.object(Cadence, "due", in_pairs),
        ):
            found = train(task, optimizer, size, rate, seed, options.looks, micro)
        of = {"task": task.name, "optimizer": optimizer, "rows": size, "rate": rate, "seed": seed}
        seconds = round(time.perf_counter() - begun, 1)
        rows.append({"sound": sound, **of, "micro_batches": micro, "seconds": seconds, **found})
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
