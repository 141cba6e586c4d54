# SPDX-License-Identifier: Apache-2.0
"""Time the optimizer steps of a LightningModule at a ladder of device batch sizes."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.utilities.memory import garbage_collection_cuda, is_oom_error
from pytorch_lightning.utilities.seed import isolate_rng

from noisescale.lightning.resized_loaders import batches_of, examples_in
from noisescale.lightning.trainer_access import Callback, publish, rank_zero_info
from noisescale.step_time import StepTiming

if TYPE_CHECKING:
    import pytorch_lightning as pl

ENOUGH_GROWTH = 1.05
"""The ladder ends where two doublings bring no more than 5 % more examples a second."""

BLOCKS = 5
"""Stretches that are timed by themselves. Their median is taken, so that a hiccup is left out."""

_METRIC = "profiled_seconds"


def profile_step_times(
    module: pl.LightningModule,
    data: Any,
    device_batch_sizes: Sequence[int] | None = None,
    *,
    accumulation: Sequence[int] | None = None,
    steps: int = 20,
    warm_up: int = 5,
    on_timing: Callable[[StepTiming], None] | None = None,
    on_stop: Callable[[str], None] = rank_zero_info,
    **trainer_options: Any,
) -> list[StepTiming]:
    """Time optimizer steps at several device batch sizes, by short fits of copies of the module.

    Each fit takes real steps, without logging, checkpoints, validation and callbacks. The first
    are left out; the others are timed in blocks, and the device is waited for at the ends of the
    blocks alone. The module, the data and the random number generators are left as they were.

    Where a device runs out of memory the ladder ends, and what was timed before is returned. With
    several devices the others would wait for the one that failed for ever, so the error goes on:
    find the largest device batch size on one device first.

    Args:
        module: Any LightningModule, of `lightning.pytorch` or `pytorch_lightning`.
        data: A Dataset, a DataLoader or a LightningDataModule that makes one. Its batch size is
            replaced, and so are its samplers: examples are drawn at random, with replacement.
        device_batch_sizes: Examples in a micro-batch on one device. By default powers of two,
            until memory is out, examples a second grow no more, or all data are in one batch.
        accumulation: Micro-batches a step, each of which is timed at every batch size. By default
            1 and 2, which tells what a step costs but once; 1 with manual optimization.
        steps: Optimizer steps to time.
        warm_up: Optimizer steps before them.
        on_timing: Called with each timing as soon as it is there.
        on_stop: Called with a sentence that says why the ladder ended.
        trainer_options: For the Trainer: `accelerator`, `devices` (1 by default), `num_nodes`,
            `strategy`, `precision`, `gradient_clip_val` and so on.

    Returns:
        A timing of each configuration, for `fit_step_time`. The seconds are those of rank 0.

    Raises:
        ValueError: If an argument is out of range, or the data end too early.

    Example:
        >>> from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
        >>> model, data = BoringModel(), RandomDataset(32, 64)
        >>> timings = profile_step_times(model, data, [4, 8], steps=5, accelerator="cpu")
        >>> [(timing.device_batch_size, timing.accumulation) for timing in timings]
        [(4, 1), (4, 2), (8, 1), (8, 2)]
    """
    if accumulation is None:
        accumulation = (1, 2) if module.automatic_optimization else (1,)
    _check_counts("accumulation", accumulation)
    _check_counts("steps", [steps], least=BLOCKS)
    _check_counts("warm_up", [warm_up])
    if not (most := examples_in(data)):
        raise ValueError("`data` must have examples, got none. Give what the module trains on.")
    timings: list[StepTiming] = []
    why: list[str] = []
    ladder: Iterable[int] = _ladder(timings, most, why)
    if device_batch_sizes is not None:
        _check_counts("device_batch_sizes", device_batch_sizes)
        ladder = sorted(set(device_batch_sizes))
    with _quiet(), isolate_rng():
        for size, micro_batches in ((b, k) for b in ladder for k in sorted(set(accumulation))):
            trainer = _trainer(module, micro_batches, steps, warm_up, trainer_options)
            if not _fits_in_memory(trainer, module, data, size):
                why.append(f"A device batch size of {size} does not fit in memory.")
                break
            seconds = _seconds(trainer)
            devices, nodes = trainer.world_size, trainer.num_nodes
            timings.append(StepTiming(size, micro_batches, devices, nodes, seconds))
            if on_timing is not None:
                on_timing(timings[-1])
    for sentence in why:
        on_stop(sentence)
    return timings


def examples_per_second(timing: StepTiming) -> float:
    """Of all devices together.

    Example:
        >>> examples_per_second(StepTiming(8, 2, devices=4, nodes=1, seconds=0.5))
        128.0
    """
    return timing.plan.batch_size / timing.seconds


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no more memory to give."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or is_oom_error(error)
        or (isinstance(error, RuntimeError) and "out of memory" in str(error))
    )


def _ladder(timings: list[StepTiming], most: float, why: list[str]) -> Iterator[int]:
    """Powers of two, for as long as the speeds of `timings`, which the caller adds to, grow."""
    size = 1
    speeds: list[float] = []
    while size <= most:
        yield size
        speeds.append(max(examples_per_second(t) for t in timings if t.device_batch_size == size))
        if len(speeds) > 2 and max(speeds[-2:]) <= ENOUGH_GROWTH * speeds[-3]:
            why.append(f"Beyond a device batch size of {size} examples a second grow no more.")
            return
        size *= 2
    why.append(f"A device batch size of {size} would be more than all data ({most:g} examples).")


class _Clock(Callback):
    """Publishes the seconds of a step: the median over blocks of steps, after a warm-up.

    A step is `accumulation` batches, whatever the module does in them.
    """

    def __init__(self, accumulation: int, steps: int, warm_up: int) -> None:
        self._bounds = {
            (warm_up + steps * block // BLOCKS) * accumulation for block in range(BLOCKS + 1)
        }
        self._accumulation = accumulation
        self._ends: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        batches = trainer.fit_loop.total_batch_idx + 1
        if batches in self._bounds:
            device = trainer.strategy.root_device
            if device.type != "cpu":
                getattr(torch, device.type).synchronize()
            self._ends.append((batches // self._accumulation, time.perf_counter()))

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        pairs = zip(self._ends[:-1], self._ends[1:], strict=True)
        means = [(end - start) / (last - first) for (first, start), (last, end) in pairs]
        seconds = statistics.median(means) if len(means) == BLOCKS else math.nan
        # All ranks have to take the same decisions, so all take those of rank 0.
        publish(trainer, {_METRIC: trainer.strategy.broadcast(seconds)})


def _trainer(
    module: pl.LightningModule,
    accumulation: int,
    steps: int,
    warm_up: int,
    options: dict[str, Any],
) -> pl.Trainer:
    """A Trainer of the package the module is from, that does nothing but train."""
    bases = [kind.__module__ for kind in type(module).__mro__]
    ours = any(base.startswith("lightning.pytorch") for base in bases)
    package = "lightning.pytorch" if ours else "pytorch_lightning"
    logger = importlib.import_module(f"{package}.loggers.logger").DummyLogger()
    defaults: dict[str, Any] = {
        "devices": 1,
        "max_epochs": 1,
        "limit_train_batches": (warm_up + steps) * accumulation,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "accumulate_grad_batches": accumulation,
        "use_distributed_sampler": False,
        "logger": logger,  # takes everything and keeps nothing
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [_Clock(accumulation, steps, warm_up)],
    }
    trainer: pl.Trainer = importlib.import_module(package).Trainer(**{**defaults, **options})
    return trainer


def _fits_in_memory(trainer: pl.Trainer, module: pl.LightningModule, data: Any, size: int) -> bool:
    """Train a copy of the module; whether memory was enough for it."""
    # A trainer it was in before is no part of it, and may be large.
    trained = copy.deepcopy(module, {id(module._trainer): None} if module._trainer else None)
    trained.configure_callbacks = list  # type: ignore[method-assign]
    enough = True
    with batches_of(data, size, int(trainer.limit_train_batches)) as batches:
        try:
            trainer.fit(trained, **batches)
        except Exception as error:
            if trainer.world_size > 1 or not is_out_of_memory(error):
                raise
            enough = False
    if not enough:  # only now is the error gone, with all that its frames held
        garbage_collection_cuda()
    return enough


def _seconds(trainer: pl.Trainer) -> float:
    seconds = float(trainer.callback_metrics[_METRIC])
    if math.isnan(seconds):
        raise ValueError(
            f"`data` must last for {trainer.limit_train_batches} batches, got"
            f" {trainer.fit_loop.total_batch_idx + 1}. Take fewer `steps`, or more data."
        )
    return seconds


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's lines for every Trainer are of no use here, nor is its advice on loaders."""
    loggers = [
        logging.getLogger(name)
        for name in (
            "lightning.pytorch",
            "pytorch_lightning",
            "lightning.fabric",
            "lightning_fabric",
        )
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(pytorch_)?lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_counts(name: str, counts: Sequence[int], least: int = 1) -> None:
    for count in counts:
        if not least <= count < math.inf or count % 1:
            raise ValueError(
                f"`{name}` must be whole and at least {least}, got {count!r}."
                f" Give {max(least, 8)}, for instance."
            )
    if not counts:
        raise ValueError(f"`{name}` must have a value, got none. Leave it out for the default.")
