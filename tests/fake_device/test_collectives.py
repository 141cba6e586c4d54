# SPDX-License-Identifier: Apache-2.0
"""Collectives beside those of the training: waited for by the stream, on tensors of the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import devices
import pytest
import torch
import torch._dynamo  # which FSDP2 imports, here once and not in every fork
import torch.distributed as dist
from ranks import on_ranks
from recorded_collectives import RecordedCollectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from ways_of_capture import Net, batch, half_squares

from fake_device.streams import Clocks, Operation, Streams
from noisescale import NoiseScaleMeter
from noisescale.batches.shared_examples import BATCHES, SharedExamples
from noisescale.collectors.rows import step_rows
from noisescale.lab.sweep.timed_run import TimedRun
from noisescale.methods.across_ranks.alike import on_any_rank
from noisescale.methods.autowu.epoch_losses import EpochLosses
from noisescale.plan import Plan
from noisescale.scheduling import agreement
from noisescale.scheduling.agreement import Agreement
from noisescale.scheduling.controller import BatchSizeController


def sharded(**options: Any) -> Any:
    """Over a group of its own, whose communicator is not that of the group of all ranks."""
    model = Net().to(device())
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "fake")
    fully_shard(model.first, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def device() -> torch.device:
    return devices.of_rank(dist.get_rank())


def loss_of(model: Any, step: int) -> Tensor:
    x, y = (part.to(device()) for part in batch(step, dist.get_rank(), 0, 4))
    return half_squares(model(x), y)


# ---- one after another


class Beside(Clocks):
    """Finds collectives of two groups of which the later one does not wait for the earlier one."""

    def __init__(self, record: Streams) -> None:
        self.pairs: list[tuple[str, str]] = []
        self._last: dict[Any, tuple[int, Operation]] = {}
        super().__init__(record)

    def _run(self, operation: Operation) -> None:
        super()._run(operation)
        if operation.name.endswith(("allreduce_", "allgather_base_", "reduce_scatter_base_")):
            stream = operation.stream
            for other, (time, earlier) in self._last.items():
                if not self._knows(stream, other, time):
                    self.pairs.append((str(earlier), str(operation)))
            self._last[stream] = self.clocks[stream][stream], operation


def rows(model: Any) -> NoiseScaleMeter:
    meter = NoiseScaleMeter(model, every_n_steps=1)
    for step in range(4):
        meter.backward(loss_of(model, step), 4)
        meter.step()
        model.zero_grad()
    return meter


def compared_batch_sizes(model: Any) -> None:
    compared = Agreement(device())
    for step in range(4):
        loss_of(model, step).backward()
        compared.check(8, in_background=True)
        model.zero_grad()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("train", "module"), [(rows, step_rows), (compared_batch_sizes, agreement)]
)
def test_streams_wait_for_collectives_in_the_background(
    train: Callable[[Any], Any], module: Any, waits: bool
) -> None:
    """So that those of the training, of another group, do not run beside them."""

    def beside() -> list[tuple[str, str]]:
        model = sharded()
        dropped = nullcontext() if waits else mock.patch.object(module, "let_stream_wait")
        with dropped, Streams() as streams:
            train(model)
        return Beside(streams).pairs

    for pairs in on_ranks(2, beside):
        assert bool(pairs) != waits
        assert all(f"({module.__name__.replace('.', '/')}.py" in one for one, _ in pairs)


# ---- devices


@contextmanager
def group_of_devices_alone() -> Iterator[set[str]]:
    """The types of the devices that collectives are called on, of a group that takes no CPU's.

    Gloo is what it reduces by, so it has to say otherwise.
    """
    found: set[str] = set()
    with (
        mock.patch.object(dist, "get_backend_config", return_value="fake:nccl"),
        RecordedCollectives() as recorded,
    ):
        yield found
    found |= {device for call in recorded.collectives for device in call.devices}
    assert recorded.collectives


def offloaded_rows() -> None:
    """Under FSDP2 with parameters on the CPU."""
    _ = rows(sharded(offload_policy=CPUOffloadPolicy())).noise_scale


def offloaded_decisions() -> None:
    optimizer = torch.optim.SGD(sharded(offload_policy=CPUOffloadPolicy()).parameters(), lr=0.1)
    plan = Plan(4, 1, 2)
    BatchSizeController(plan, optimizer, policy={0: 8, 1: 16}, max_batch_size=64).decide()


def losses_as_numbers() -> None:
    losses = EpochLosses()
    losses.observe(1.0 + dist.get_rank())
    losses.end_step()
    assert losses.end_epoch().tolist() == [1.5]


def numbers_of_ranks() -> None:
    assert on_any_rank(dist.get_rank() == 1, [None])


def batches_on_the_cpu() -> None:
    told: list[str] = []
    shared = SharedExamples(device(), 1, told.append)
    for seed in range(BATCHES):
        shared.look([torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))])
    assert shared.over
    assert told


def metrics_on_the_cpu() -> None:
    """As of a library that computes them there."""

    class Ended(TimedRun):
        def _is_due(self, step: int) -> bool:
            return True

        def _ending_at(self, trainer: Any, value: float, step: int) -> str:
            return "ended"

    def reduced(x: Tensor, reduce_op: str) -> Tensor:
        dist.all_reduce(x)
        return x / 2

    strategy = SimpleNamespace(root_device=device(), reduce=reduced, broadcast=lambda x: x)
    metrics = {"auc": torch.tensor(0.5 + dist.get_rank())}
    run = Ended({}, "auc")
    run._look(SimpleNamespace(strategy=strategy, callback_metrics=metrics, global_step=3))  # type: ignore[arg-type]
    assert run.result()["values"] == [1.0]


OFFLOADED = [offloaded_rows, offloaded_decisions]
ON_THE_CPU = [losses_as_numbers, numbers_of_ranks, batches_on_the_cpu, metrics_on_the_cpu]


@pytest.mark.parametrize("run", [*OFFLOADED, *ON_THE_CPU])
def test_no_tensor_of_a_cpu_goes_to_a_group_of_devices(run: Callable[[], None]) -> None:
    def found() -> set[str]:
        with group_of_devices_alone() as types:
            run()
        return types

    assert on_ranks(2, found) == [{"fake"}] * 2
