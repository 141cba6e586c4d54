# SPDX-License-Identifier: Apache-2.0
"""Small trainings to a goal: digits, MNIST, characters; by SGD, with momentum, by Adam and AdamW.

Batches are drawn with replacement. Models, data and order depend on the seed alone, so that a
training is repeated exactly; one thread does all of it.
"""

from __future__ import annotations

import copy
import gzip
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisescale import adasum

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "examples"))  # the transformer is that of the example
DATA = Path(os.environ.get("NOISESCALE_DATA", ROOT / "data"))

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """What is trained, to which goal, at which batch sizes."""

    name: str
    unit: str
    goal: float
    """Cross-entropy on held-out data, to get below."""
    batch_sizes: tuple[int, ...]
    first_lr: float
    """Where the search of the learning rate starts, at the smallest batch size."""
    data: Callable[[], tuple[Batch, Batch]]
    model: Callable[[], nn.Module]
    seeds: int
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    optimizer_options: tuple[tuple[str, Any], ...] = ()
    beta2: float | None = None
    """At the smallest batch size; its half-life in examples is kept (Marek et al. 2025)."""
    decays: bool = False
    """The learning rate falls to zero, on a line, over the fewest steps that end at the goal."""
    adasum_ranks: int = 1
    """Ranks that share a batch and are combined by Adasum, each with an optimizer of its own."""

    def optimizer_of(self, model: nn.Module, lr: float, batch_size: int) -> torch.optim.Optimizer:
        options = dict(self.optimizer_options)
        if self.beta2 is not None:
            options["betas"] = 0.9, self.beta2 ** (batch_size / min(self.batch_sizes))
        return self.optimizer(model.parameters(), lr=lr, **options)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        return float(self.loss(model, self.data()[1]))

    def seeded_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.model()

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """Endless batches, drawn with replacement."""
        x, y = self.data()[0]
        generator = torch.Generator().manual_seed(1000 + seed)
        while True:
            chosen = torch.randint(len(x), (batch_size,), generator=generator)
            yield x[chosen], y[chosen]


class Goal:
    """Steps to the goal, by evaluations after every 2 % more steps (every step up to the 50th).

    Between the last evaluation above the goal and the first below it the logarithm of the loss is
    taken to be linear.
    """

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self.workload, self.model = workload, model
        self.steps = math.inf
        self._last: tuple[int, float] | None = None
        self._next = 5

    def reached(self, step: int) -> bool:
        """Whether the goal was reached, after `step` steps."""
        if step < self._next:
            return False
        self._next = step + max(1, step // 50)
        loss = self.workload.held_out_loss(self.model)
        if loss < self.workload.goal:
            if self._last is None:
                raise RuntimeError(f"{self.workload.name} is at its goal from the start.")
            before, above = self._last
            share = math.log(above / self.workload.goal) / math.log(above / loss)
            self.steps = before + share * (step - before)
            return True
        if not math.isfinite(loss):
            raise FloatingPointError(f"{self.workload.name} diverged at step {step}.")
        self._last = step, loss
        return False


class Rank:
    """A model and its optimizer, which sees a share of each batch."""

    def __init__(self, workload: Workload, model: nn.Module, lr: float, batch_size: int) -> None:
        self.workload, self.model = workload, model
        self.optimizer = workload.optimizer_of(model, lr, batch_size)
        self.parameters = list(model.parameters())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.workload.loss(self.model, batch).backward()
        self.optimizer.step()


def step_of_all(ranks: Sequence[Rank], batch: Batch) -> None:
    """Step each rank on its share of the batch, and combine what the ranks changed by Adasum."""
    if len(ranks) == 1:
        ranks[0].step(batch)
        return
    start = [p.detach().clone() for p in ranks[0].parameters]
    shares = zip(*(part.chunk(len(ranks)) for part in batch), strict=True)
    for rank, share in zip(ranks, shares, strict=True):
        rank.step(share)
    with torch.no_grad():
        for before, *same in zip(start, *(rank.parameters for rank in ranks), strict=True):
            combined = before + adasum([p - before for p in same])
            for p in same:
                p.copy_(combined)


def steps_to_goal(
    workload: Workload, batch_size: int, lr: float, seed: int, most_steps: int
) -> float:
    """Train until the goal is reached; infinite if that takes more than `most_steps`."""
    if workload.decays:
        return _steps_that_decay(workload, batch_size, lr, seed, most_steps)
    model = workload.seeded_model(seed)
    ranks = [
        Rank(workload, model if r == 0 else copy.deepcopy(model), lr, batch_size)
        for r in range(workload.adasum_ranks)
    ]
    goal = Goal(workload, model)
    try:
        for step, batch in enumerate(workload.batches(batch_size, seed), start=1):
            step_of_all(ranks, batch)
            if goal.reached(step) or step == most_steps:
                break
    except FloatingPointError:
        return math.inf
    return goal.steps


def decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Let the learning rate fall on a line, to zero after so many steps."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)


def _steps_that_decay(
    workload: Workload, batch_size: int, lr: float, seed: int, most_steps: int
) -> float:
    """The fewest steps over which the learning rate may fall, to within 3 %; each is a training."""

    def loss_after(steps: int) -> float:
        model = workload.seeded_model(seed)
        optimizer = workload.optimizer_of(model, lr, batch_size)
        schedule = decay(optimizer, steps)
        for batch in islice(workload.batches(batch_size, seed), steps):
            optimizer.zero_grad()
            workload.loss(model, batch).backward()
            optimizer.step()
            schedule.step()
        loss = workload.held_out_loss(model)
        return loss if math.isfinite(loss) else math.inf

    few, above, many = 5, loss_after(5), 10
    if above < workload.goal:
        raise RuntimeError(f"{workload.name} is at its goal from the start.")
    while (below := loss_after(many)) >= workload.goal:
        few, above, many = many, below, 2 * many
        if few >= most_steps:
            return math.inf
    while many - few > max(1.0, 0.03 * many):
        middle = (few + many) // 2
        loss = loss_after(middle)
        if loss < workload.goal:
            many, below = middle, loss
        else:
            few, above = middle, loss
    if not math.isfinite(above):
        return float(many)
    share = math.log(above / workload.goal) / math.log(above / below)
    steps = few + share * (many - few)
    return steps if steps <= most_steps else math.inf


@cache
def digits() -> tuple[Batch, Batch]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    train_x, test_x, train_y, test_y = (torch.tensor(part) for part in parts)
    return (train_x.float(), train_y), (test_x.float(), test_y)


@cache
def mnist() -> tuple[Batch, Batch]:
    """20,000 training images, 2,000 others to test with."""
    folder = DATA / "mnist"

    def read(name: str) -> Tensor:
        raw = gzip.decompress((folder / f"{name}.gz").read_bytes())
        shape = np.frombuffer(raw, ">i4", raw[3], 4)
        return torch.tensor(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape))

    x = read("train-images-idx3-ubyte").flatten(1).float() / 255
    y = read("train-labels-idx1-ubyte").long()
    return (x[:20_000], y[:20_000]), (x[-2_000:], y[-2_000:])


CONTEXT = 32


@cache
def characters() -> tuple[Batch, Batch]:
    """Every sequence of 32 characters of Shakespeare; 256 of the last tenth to test with."""
    text = (DATA / "tinyshakespeare/input.txt").read_text()
    code = {character: index for index, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([code[character] for character in text])
    windows = codes.unfold(0, CONTEXT + 1, 1)  # a view: sequences share their memory
    train, test = windows[: 9 * len(windows) // 10], windows[9 * len(windows) // 10 :]
    test = test[:: len(test) // 256][:256]
    return (train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:])


def perceptron(inputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def transformer() -> nn.Module:
    """The example's, with two layers of width 64 over 65 characters."""
    from char_transformer import CharTransformer

    return CharTransformer(65, CONTEXT, width=64, layers=2, heads=4)


def convolutions() -> nn.Module:
    """Of an image's 784 pixels; 8 and 16 channels, each convolution halves the image."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.GELU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(784, 10),
    )


_DIGITS = Workload(
    "digits",
    "examples",
    goal=0.2,
    batch_sizes=(8, 16, 32, 64, 128, 256, 512, 1024),
    first_lr=0.4,
    data=digits,
    model=lambda: perceptron(64, 64),
    seeds=8,
)
_MNIST = Workload(
    "mnist",
    "examples",
    goal=0.25,
    batch_sizes=(16, 32, 64, 128, 256, 512, 1024, 2048),
    first_lr=0.1,
    data=mnist,
    model=lambda: perceptron(784, 64),
    seeds=8,
)
_CHARACTERS = Workload(
    "characters",
    "sequences",
    goal=2.3,
    batch_sizes=(8, 16, 32, 64, 128, 256, 512, 1024),
    first_lr=0.004,
    data=characters,
    model=transformer,
    seeds=4,
    optimizer=torch.optim.Adam,
)
_MOMENTUM: dict[str, Any] = {"optimizer_options": (("momentum", 0.9),)}
_ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "beta2": 0.999}

WORKLOADS = {
    workload.name: workload
    for workload in (
        _DIGITS,
        _MNIST,
        _CHARACTERS,
        replace(_DIGITS, name="digits, momentum", first_lr=0.05, **_MOMENTUM),
        replace(_MNIST, name="mnist, momentum", first_lr=0.02, **_MOMENTUM),
        replace(_DIGITS, name="digits, decay", decays=True),
        replace(_DIGITS, name="digits, AdamW", first_lr=0.004, **_ADAMW),
        replace(
            _MNIST,
            name="convolutions, AdamW",
            goal=0.2,
            first_lr=0.002,
            model=convolutions,
            seeds=4,
            **_ADAMW,
        ),
        replace(_CHARACTERS, name="characters, AdamW", goal=2.2, first_lr=0.004, seeds=3, **_ADAMW),
    )
}
_WIDE = 32, 64, 128, 256, 512, 1024, 2048
_FEW = 32, 128, 512, 2048
BY_ADASUM = {
    workload.name: workload
    for workload in (
        replace(_DIGITS, name="digits, Adasum", adasum_ranks=8),
        replace(_MNIST, name="mnist, averaged", batch_sizes=(*_WIDE, 4096), seeds=4),
        replace(_MNIST, name="mnist, Adasum", batch_sizes=(*_WIDE, 4096), seeds=4, adasum_ranks=8),
        replace(_CHARACTERS, name="characters, averaged", batch_sizes=_FEW, seeds=2),
        replace(_CHARACTERS, name="characters, Adasum", batch_sizes=_FEW, seeds=2, adasum_ranks=8),
    )
}
PLAIN = ("digits", "mnist", "characters")
"""The first three: a constant learning rate, and no momentum but Adam's."""
