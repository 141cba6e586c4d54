# SPDX-License-Identifier: Apache-2.0
"""Training is bitwise what it is without the monitor, and no step waits for the device."""

import math
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import devices
import lightning.pytorch as L
import pytest
import torch
from fits import ddp, fit, loader
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils._python_dispatch import TorchDispatchMode

from noisescale import BatchSizeScheduler, NoiseScaleMonitor


class CommHook(L.Callback):
    """Lightning ignores `ddp_comm_hook` on CPU: register one as it does on CUDA."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)


def parameters(trainer: Any, module: Any) -> list[Tensor]:
    assert trainer.global_step == 20
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("ranks", [n for n in (2, 3) if n <= devices.most_ranks()])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"callbacks": [CommHook()]},
        {"ddp": {"gradient_as_bucket_view": True}},
        {
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.1,
            "callbacks": [CommHook()],
            "ddp": {"gradient_as_bucket_view": True},
        },
    ],
    ids=["plain", "accumulation", "clipping", "comm hook", "bucket views", "all"],
)
def test_parameters_after_20_steps_are_bit_identical(
    device: torch.device, ranks: int, options: dict[str, Any]
) -> None:
    if devices.shared and ranks > 1:
        pytest.skip("Lightning takes a device for each rank")
    options = {**options, "max_steps": 20, "max_epochs": -1, "log_every_n_steps": 7}
    others = options.pop("callbacks", [])
    of_ddp = options.pop("ddp", {})

    def parameters_with(*callbacks: Any) -> list[list[Tensor]]:
        return fit(*callbacks, ranks=ranks, strategy=ddp(**of_ddp), results=parameters, **options)

    without = parameters_with(*others)
    with_it = parameters_with(NoiseScaleMonitor(), *others)

    for ours, theirs in zip(with_it, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class CountHostReads(L.Callback):
    """Count the values that the host reads during each batch: `.item()` and `.tolist()`."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.stack = ExitStack()
        self.mode = self.stack.enter_context(_Counting())
        self.stack.enter_context(mock.patch.object(Tensor, "tolist", self.mode.counted_tolist))

    def on_train_batch_end(self, *_: Any) -> None:
        self.stack.close()
        self.reads.append(self.mode.seen["aten::_local_scalar_dense"] + self.mode.seen["tolist"])


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))

    @property
    def counted_tolist(self) -> Any:
        """On CPU it copies memory and dispatches nothing."""
        original = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.seen["tolist"] += 1
            return original(tensor)

        return tolist


def host_reads(*callbacks: Any, accumulate: int) -> list[int]:
    counter = CountHostReads()
    (reads, _) = fit(
        counter,
        *callbacks,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=100,
        train_loader=loader(4),
        results=lambda *_: counter.reads,
    )
    assert len(reads) == 13
    return reads


class ReadsTheMonitor(L.Callback):
    """What the monitor must not do: read its estimate at every step."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        (monitor,) = [c for c in trainer.callbacks if isinstance(c, NoiseScaleMonitor)]
        assert str(monitor.noise_scale)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_that_does_not_log_reads_nothing_more_on_the_host(accumulate: int) -> None:
    without = host_reads(accumulate=accumulate)
    reading = host_reads(NoiseScaleMonitor(), ReadsTheMonitor(), accumulate=accumulate)

    assert host_reads(NoiseScaleMonitor(), accumulate=accumulate) == without
    assert sum(reading) - sum(without) == math.ceil(13 / accumulate)


def test_a_schedule_by_steps_reads_nothing_at_a_step_beside_a_monitor() -> None:
    """On two ranks, which agree on the schedule at the first step and never again."""
    schedule = BatchSizeScheduler({0: 8, 4: 16})

    without = host_reads(accumulate=1)
    scheduled = host_reads(NoiseScaleMonitor(), schedule, accumulate=1)

    assert scheduled[1:] == without[1:]
    assert scheduled[0] - without[0] < 4
