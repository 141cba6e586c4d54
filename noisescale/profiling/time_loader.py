# SPDX-License-Identifier: Apache-2.0
"""Time the data loader alone, and a step whose batch is there already."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from noisescale.lightning.trainer_access import isolate_rng
from noisescale.lightning.training import quiet
from noisescale.profiling.time_fit import time_fit
from noisescale.step_time import LoaderTiming

if TYPE_CHECKING:
    import pytorch_lightning as pl

HELD = 4
"""Batches that are held, and trained on again and again."""

ENOUGH = 5.0
"""Seconds after which a slow loader has been timed for long enough."""


def time_loader(
    module: pl.LightningModule,
    data: Any,
    size: int,
    *,
    steps: int,
    warm_up: int,
    trainer_options: dict[str, Any],
) -> LoaderTiming | None:
    """Return the seconds of a batch of the user's loader, and of a step; None if memory runs out.

    First a loader is gone through without a training. Then a copy of the module is trained on its
    first batches, again and again. If a module has several loaders, a step waits for all of them.

    Args:
        module: The module, or the Trainer of transformers; a copy of it is trained.
        data: As for `batches_of`.
        size: Examples in a batch, on one device.
        steps: Optimizer steps to time.
        warm_up: Optimizer steps before the timed ones.
        trainer_options: See `time_steps`.
    """
    seconds: list[float] = []
    workers: list[int] = []

    def hold(loader: DataLoader[Any]) -> DataLoader[Any]:
        batches, took = _go_through(loader)
        seconds.append(took)
        workers.append(loader.num_workers)
        again = _Again(batches, warm_up + steps)
        pins = loader.pin_memory and getattr(loader, "device", None) is None  # not on it already
        return DataLoader(again, batch_size=None, collate_fn=_same, pin_memory=pins)

    with quiet(), isolate_rng():
        fit = time_fit(
            *(module, data, size, 1),
            steps=steps,
            warm_up=warm_up,
            trainer_options=trainer_options,
            change_loader=hold,
        )
    if fit is None:
        return None
    return LoaderTiming(size, sum(seconds), fit.timing.seconds, min(workers))


def _go_through(loader: DataLoader[Any]) -> tuple[list[Any], float]:
    """Return the first batches of a loader, and the mean seconds of the batches after the first.

    The first batches are there when the workers have started, so one for each is not timed.
    """
    batches = iter(loader)
    held = list(islice(batches, 1 + loader.num_workers))
    start = now = time.perf_counter()
    count = 0
    for batch in batches:
        now, count = time.perf_counter(), count + 1
        if len(held) < HELD:
            held.append(batch)
        if now - start > ENOUGH:
            break
    return held[:HELD], (now - start) / max(count, 1)


class _Again(Dataset[Any]):
    """Some batches, again and again."""

    def __init__(self, batches: list[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._batches[index % len(self._batches)]


def _same(batch: Any) -> Any:
    return batch
