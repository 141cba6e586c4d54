# SPDX-License-Identifier: Apache-2.0
"""Training is bitwise what it is without the monitor, and no step waits for the device."""

import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import devices
import lightning.pytorch as L
import pytest
import torch
from fits import ddp, fit, fit_here, fits_on_ranks, loader
from tiers import slow, slow_but
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


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.1},
    "comm hook": {"callbacks": [CommHook()]},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}},
}
OPTIONS["all"] = {name: value for one in OPTIONS.values() for name, value in one.items()}


@pytest.mark.parametrize("ranks", [2, slow(3)][: devices.most_ranks() - 1])
@pytest.mark.parametrize("case", slow_but(OPTIONS, "all"))
def test_parameters_after_20_steps_are_bit_identical(
    device: torch.device, ranks: int, case: str
) -> None:
    if devices.shared and ranks > 1:
        pytest.skip("Lightning takes a device for each rank")
    options = {**OPTIONS[case], "max_steps": 20, "max_epochs": -1, "log_every_n_steps": 7}
    others, of_ddp = options.pop("callbacks", []), options.pop("ddp", {})

    def parameters_with(*callbacks: Any) -> list[list[Tensor]]:
        return fit(*callbacks, ranks=ranks, strategy=ddp(**of_ddp), results=parameters, **options)

    without = parameters_with(*others)
    with_it = parameters_with(NoiseScaleMonitor(), *others)

    for ours, theirs in zip(with_it, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Counting(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func.name() == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


class CountHostReads(L.Callback):
    """Count the values that the host reads during each batch: `.item()` and `.tolist()`."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        read, self.mode, self.stack = Tensor.tolist, Counting(), ExitStack()

        def tolist(tensor: Tensor) -> Any:
            self.mode.reads += 1  # on CPU it copies memory and dispatches nothing
            return read(tensor)

        self.stack.enter_context(self.mode)
        self.stack.enter_context(mock.patch.object(Tensor, "tolist", tolist))

    def on_train_batch_end(self, *_: Any) -> None:
        self.stack.close()
        self.reads.append(self.mode.reads)


class ReadsTheMonitor(L.Callback):
    """What the monitor must not do: read its estimate at every step."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        (monitor,) = [c for c in trainer.callbacks if isinstance(c, NoiseScaleMonitor)]
        assert str(monitor.noise_scale)


CALLBACKS: dict[str, Callable[[], list[L.Callback]]] = {
    "none": list,
    "monitor": lambda: [NoiseScaleMonitor()],
    "read monitor": lambda: [NoiseScaleMonitor(), ReadsTheMonitor()],
    "schedule": lambda: [NoiseScaleMonitor(), BatchSizeScheduler({0: 8, 4: 16})],
}


@pytest.fixture(scope="module")
def reads() -> dict[tuple[str, int], list[int]]:
    """Of each batch beside some callbacks, without accumulation and with it."""

    def of_batches(name: str, accumulate: int) -> list[int]:
        counter = CountHostReads()
        options = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 100}
        fit_here(counter, *CALLBACKS[name](), ranks=2, train_loader=loader(4), **options)
        return counter.reads

    cases = [*itertools.product(list(CALLBACKS)[:3], (1, 3)), ("schedule", 1)]
    found = fits_on_ranks(*[partial(of_batches, *case) for case in cases])
    first = {case: of_first for case, (of_first, _) in zip(cases, found, strict=True)}
    assert {len(of_first) for of_first in first.values()} == {13}
    return first


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_that_does_not_log_reads_nothing_more_on_the_host(
    accumulate: int, reads: dict[tuple[str, int], list[int]]
) -> None:
    without, reading = reads["none", accumulate], reads["read monitor", accumulate]

    assert reads["monitor", accumulate] == without
    assert sum(reading) - sum(without) == math.ceil(13 / accumulate)


def test_a_schedule_by_steps_reads_nothing_at_a_step_but_the_first(
    reads: dict[tuple[str, int], list[int]],
) -> None:
    """When ranks agree on it."""
    without, scheduled = reads["none", 1], reads["schedule", 1]

    assert scheduled[1:] == without[1:]
    assert scheduled[0] - without[0] < 4
