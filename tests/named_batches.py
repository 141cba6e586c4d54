# SPDX-License-Identifier: Apache-2.0
"""A module whose gradient names the examples it is of, and the windows there should be."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as L
import torch
from fits import trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


class Recording(torch.optim.SGD):
    """SGD that keeps the gradient and the learning rate of every step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[tuple[list[float], float]] = []

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        group = self.param_groups[0]
        gradient = group["params"][0].grad
        self.seen.append(([] if gradient is None else gradient.tolist(), group["lr"]))
        super().step()
        return loss


class Names(L.LightningModule):
    """One weight an example: the gradient of a mean over a batch is 1/n at those in it.

    `schedule` leads from the optimizer and the Trainer to what Lightning takes as `lr_scheduler`.
    """

    def __init__(self, examples: int, schedule: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        self._schedule = schedule
        self.weight = nn.Parameter(torch.zeros(examples, dtype=torch.float64))
        self.arrived: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.arrived.append(batch.tolist())
        return self.weight[batch].mean()

    def configure_optimizers(self) -> Any:
        self.optimizer = Recording(self.parameters(), lr=0.1)
        if self._schedule is None:
            return self.optimizer
        return {
            "optimizer": self.optimizer,
            "lr_scheduler": self._schedule(self.optimizer, self.trainer),
        }

    @property
    def gradients(self) -> list[list[float]]:
        """Of every step."""
        return [gradient for gradient, _ in self.optimizer.seen]

    @property
    def rates(self) -> list[float]:
        """The learning rate of every step."""
        return [rate for _, rate in self.optimizer.seen]


class Stream(IterableDataset[int]):
    """Examples without a length."""

    def __init__(self, examples: int) -> None:
        self._examples = examples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._examples))


def names(examples: int, batch_size: int = 1, *, sized: bool = True) -> DataLoader[Any]:
    data: Any = range(examples) if sized else Stream(examples)
    return DataLoader(data, batch_size=batch_size)


def windows(batches: int, epochs: int, lengths: Sequence[int]) -> list[range]:
    """Which batches each step takes: as many as are asked for, and as are left in its epoch."""
    made: list[range] = []
    begin = 0
    for end in range(batches, batches * epochs + 1, batches):
        while begin < end:
            wanted = lengths[len(made) % len(lengths)]
            made.append(range(begin, min(begin + wanted, end)))
            begin = made[-1].stop
    return made


def mean_of(
    window: range, of_rank: Sequence[Sequence[Sequence[int]]], examples: int
) -> list[float]:
    """The gradient of one step: the mean over ranks and the batches of its window."""
    gradient = [0.0] * examples
    for batches in of_rank:
        for index in window:
            for example in batches[index]:
                gradient[example] += 1 / len(batches[index]) / len(window) / len(of_rank)
    return gradient


class Asks:
    """A policy: so many batches a step, one after the other; it is asked once a step."""

    def __init__(self, lengths: Sequence[int], of_one: float = 1.0) -> None:
        self.lengths = lengths
        self.of_one = of_one

    def __call__(self, noise_scale: Any, plan: Any, progress: Any) -> float:
        return self.of_one * self.lengths[progress.steps % len(self.lengths)]


def rates_in_a_plain_loop(schedule: Callable[[Any, Any], Any], steps: int) -> list[float]:
    """What torch alone makes of a schedule: before each of the steps, and after the last one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    made = schedule(optimizer, steps)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        made.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def events(folder: Path) -> Any:
    """What TensorBoard reads there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(next(folder.rglob("events.*")))).Reload()


class InMemory(Logger):
    """What is logged, by step; files go to a folder of its own."""

    name, version = "memory", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[int, dict[str, float]] = {}
        self._folder = mkdtemp()

    @property
    def save_dir(self) -> str:
        return self._folder

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.setdefault(step or 0, {}).update(metrics)


def stays(noise_scale: Any, plan: Any, progress: Any) -> float:
    """A policy that leaves the batch as it is."""
    return float(plan.batch_size)


class Stops(L.Callback):
    """End the fit after some steps or epochs."""

    def __init__(self, steps: float = math.inf, epochs: float = math.inf) -> None:
        self._steps, self._epochs = steps, epochs

    def on_train_batch_end(self, fitting: Any, *_: Any) -> None:
        fitting.should_stop |= fitting.global_step >= self._steps

    def on_train_epoch_end(self, fitting: Any, module: Any) -> None:
        fitting.should_stop |= fitting.current_epoch + 1 >= self._epochs


def fitted(
    *callbacks: Any,
    module: Any,
    data: Any,
    validation: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """The Trainer after a fit in this process."""
    fitting = trainer(1, callbacks=list(callbacks), **options)
    fitting.fit(module, data, validation, ckpt_path=ckpt_path)
    return fitting
