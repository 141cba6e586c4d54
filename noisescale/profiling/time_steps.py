# SPDX-License-Identifier: Apache-2.0
"""Time the optimizer steps of a LightningModule at a ladder of device batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from noisescale.lightning.resized_loaders import examples_in
from noisescale.lightning.trainer_access import isolate_rng, rank_zero_info
from noisescale.lightning.training import quiet
from noisescale.profiling.blocks import BLOCKS, TimedFit
from noisescale.profiling.time_fit import time_fit
from noisescale.refusal import Refusal
from noisescale.step_time import StepTiming

if TYPE_CHECKING:
    import pytorch_lightning as pl

ENOUGH_GROWTH = 1.05
"""The ladder ends where two doublings bring no more than 5 % more examples a second."""


def time_steps(
    module: pl.LightningModule,
    data: Any,
    device_batch_sizes: Sequence[int] | None = None,
    *,
    accumulation: Sequence[int] | None = None,
    steps: int = 20,
    warm_up: int = 5,
    on_fit: Callable[[TimedFit], None] | None = None,
    on_too_large: Callable[[int], None] | None = None,
    on_stop: Callable[[str], None] = rank_zero_info,
    **trainer_options: Any,
) -> list[StepTiming]:
    """Time optimizer steps at several device batch sizes, in short fits of copies of a module.

    Each fit takes real steps, without logging, checkpoints, validation and callbacks. The first
    steps are left out. The others are timed in blocks; the host waits for the device only at the
    ends of blocks. The module, the data and the random number generators are left as they were.

    If the device runs out of memory, the ladder ends, and the timings so far are returned. With
    several devices the error is raised, as the other devices would wait for the failed one for
    ever: find the largest device batch size on one device first.

    Args:
        module: Any LightningModule, of `lightning.pytorch` or `pytorch_lightning`; or the Trainer
            of transformers, which takes no `trainer_options`.
        data: A Dataset, a DataLoader or a LightningDataModule that makes one. Its batch size and
            its samplers are replaced: examples are drawn at random, with replacement.
        device_batch_sizes: Examples in a micro-batch on one device. By default powers of two, until
            memory runs out, the examples per second stop growing, or all data are in one batch.
        accumulation: Numbers of micro-batches in a step, each timed at every batch size. By default
            1 and 2, which show what a step costs once; 1 with manual optimization.
        steps: Optimizer steps to time.
        warm_up: Optimizer steps before the timed ones.
        on_fit: Called with each fit as soon as it is timed.
        on_too_large: Called with a device batch size that does not fit in memory.
        on_stop: Called with a sentence that says why the ladder ended.
        trainer_options: Arguments of the Trainer: `accelerator`, `devices` (1 by default),
            `num_nodes`, `strategy`, `precision`, `gradient_clip_val` and so on.

    Returns:
        A timing of each configuration, for `fit_step_time`. The seconds are those of rank 0.

    Raises:
        ValueError: If an argument is out of range, or the data end too early.

    Examples:
        >>> from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
        >>> model, data = BoringModel(), RandomDataset(32, 64)
        >>> timings = time_steps(model, data, [4, 8], steps=5, accelerator="cpu")
        >>> [(timing.device_batch_size, timing.accumulation) for timing in timings]
        [(4, 1), (4, 2), (8, 1), (8, 2)]
    """
    if accumulation is None:
        accumulation = (1, 2) if getattr(module, "automatic_optimization", True) else (1,)
    _check_counts("accumulation", accumulation)
    _check_counts("steps", [steps], least=BLOCKS)
    _check_counts("warm_up", [warm_up])
    if not (most := examples_in(data)):
        raise Refusal("data", "have examples", "none", "Give what the module trains on.")
    timings: list[StepTiming] = []
    why: list[str] = []
    ladder: Iterable[int] = _ladder(timings, most, why)
    if device_batch_sizes is not None:
        _check_counts("device_batch_sizes", device_batch_sizes)
        ladder = sorted(set(device_batch_sizes))
    with quiet(), isolate_rng():
        for size, micro_batches in ((b, k) for b in ladder for k in sorted(set(accumulation))):
            fit = time_fit(
                module,
                data,
                size,
                micro_batches,
                steps=steps,
                warm_up=warm_up,
                trainer_options=trainer_options,
            )
            if fit is None:
                if on_too_large is not None:
                    on_too_large(size)
                why.append(f"A device batch size of {size:,} does not fit in memory.")
                break
            timings.append(fit.timing)
            if on_fit is not None:
                on_fit(fit)
    for sentence in why:
        on_stop(sentence)
    return timings


def _ladder(timings: list[StepTiming], most: float, why: list[str]) -> Iterator[int]:
    """Yield powers of two while the speeds grow. The caller adds each timing to `timings`."""
    size = 1
    speeds: list[float] = []
    while size <= most:
        yield size
        speeds.append(max(t.examples_per_second for t in timings if t.device_batch_size == size))
        if len(speeds) > 2 and max(speeds[-2:]) <= ENOUGH_GROWTH * speeds[-3]:
            why.append(
                f"Beyond a device batch size of {size:,} the examples per second grow no more."
            )
            return
        size *= 2
    why.append(
        f"A device batch size of {size:,} would be more than all data ({most:,.0f} examples)."
    )


def _check_counts(name: str, counts: Sequence[int], least: int = 1) -> None:
    for count in counts:
        if not least <= count < math.inf or count % 1:
            raise Refusal(
                name,
                f"be whole and at least {least}",
                repr(count),
                f"Give {max(least, 8)}, for instance.",
            )
    if not counts:
        raise Refusal(name, "have a value", "none")
