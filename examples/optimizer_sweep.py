# SPDX-License-Identifier: Apache-2.0
"""Train a small classifier by two optimizers, at several batch sizes, learning rates and seeds.

    python examples/optimizer_sweep.py [--quick]

Each training is evaluated as it goes on, and all evaluations are written to sweep.csv, a line each.
`noisescale compare` then says which optimizer reached a validation loss first, at which batch size
and learning rate, and up to which batch size more examples at once still saved steps. It takes
about a minute on two cores.
"""

import argparse
import csv
import math
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

GOAL = 0.15
MOST_EPOCHS = 60
BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float, float]] = {
    # With the learning rate around which it is searched at batch size 8, and the power of the batch
    # size that this grows with.
    "sgd": (torch.optim.SGD, 0.4, 0.2),
    "adam": (torch.optim.Adam, 0.01, 0.3),
}
OUTPUT = Path("sweep.csv")


def evaluations(
    data: tuple[Tensor, ...],
    make: Callable[..., torch.optim.Optimizer],
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> Iterator[tuple[int, float, float]]:
    """Yield step, validation loss and seconds of training, until the goal or the last epoch."""
    train_x, test_x, train_y, test_y = data
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(model.parameters(), lr=learning_rate)
    most = math.ceil(MOST_EPOCHS * len(train_x) / batch_size)
    loss, due, seconds, began = math.inf, 1.0, 0.0, time.perf_counter()
    for step in range(1, most + 1):
        chosen = torch.randint(len(train_x), (batch_size,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train_x[chosen]), train_y[chosen]).backward()
        optimizer.step()
        if step < due and step < most:
            continue
        due = max(1.05 * due, step + 1)
        seconds += time.perf_counter() - began  # evaluations are not timed
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(test_x), test_y))
        yield step, loss, seconds
        if loss <= GOAL or not math.isfinite(loss):
            return
        began = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes and one seed")
    quick = parser.parse_args().quick
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    train_x, test_x, train_y, test_y = (torch.tensor(part) for part in parts)
    data = train_x.float(), test_x.float(), train_y, test_y
    names = "submission", "batch_size", "learning_rate", "seed", "step", "seconds", "val_loss"
    with OUTPUT.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for name, (make, rate, power) in OPTIMIZERS.items():
            for batch_size in BATCH_SIZES[2::2] if quick else BATCH_SIZES:
                centre = rate * (batch_size / BATCH_SIZES[0]) ** power
                for learning_rate in (centre * 2.0**k for k in range(-2, 3)):
                    for seed in range(1 if quick else 3):
                        which = name, batch_size, round(learning_rate, 6), seed
                        for step, loss, seconds in evaluations(
                            data, make, batch_size, learning_rate, seed
                        ):
                            writer.writerow([*which, step, round(seconds, 4), loss])
    goal = shlex.quote(f"val_loss<={GOAL}")
    print(f"Next: noisescale compare {OUTPUT} --goal {goal} --by steps --html report.html")


if __name__ == "__main__":
    main()
