# SPDX-License-Identifier: Apache-2.0
"""The fake device itself, and what finds transfers and hazards on it."""

import gc
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import fake_device
from fake_device.streams import Streams
from fake_device.transfers import (
    READ,
    TO_DEVICE,
    TO_DEVICE_LATER,
    TO_HOST,
    TO_HOST_LATER,
    Transfers,
)


def test_tensors_of_two_devices_do_not_meet() -> None:
    here, there, on_host = (torch.ones(2, device=name) for name in ("fake:0", "fake:1", "cpu"))

    for other in (there, on_host):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.addcmul(here, here, other)
    assert (here * torch.tensor(2.0)).tolist() == [2, 2]  # a single number of the host may


def test_float64_is_refused_where_it_is_switched_off() -> None:
    x = torch.ones(2, device="fake")

    with fake_device.without_float64():
        for refused in (x.double, lambda: x.sum(dtype=torch.float64), lambda: x.to(torch.cdouble)):
            with pytest.raises(TypeError, match="doesn't support float64"):
                refused()
    assert x.double().sum().dtype == torch.float64


def test_memory_is_given_back() -> None:
    gc.collect()
    before = torch.fake.memory_allocated()

    x = torch.ones(1000, device="fake:1")
    during = torch.fake.memory_allocated()
    del x

    assert during - before == 4000
    assert torch.fake.memory_allocated() == before


def test_random_numbers_are_of_the_device() -> None:
    on_host, on_device = torch.get_rng_state(), torch.fake.get_rng_state()

    first = nn.functional.dropout(torch.ones(100, device="fake"))
    torch.fake.set_rng_state(on_device)
    second = nn.functional.dropout(torch.ones(100, device="fake"))

    assert torch.equal(first, second)
    assert not torch.equal(torch.fake.get_rng_state(), on_device)
    assert torch.equal(torch.get_rng_state(), on_host)


def test_transfers_are_counted_by_kind() -> None:
    x = torch.ones(3, device="fake")
    pageable, pinned = torch.ones(3), torch.ones(3).pin_memory()

    with Transfers() as transfers:
        x.sum().item()
        _ = x[x > 0]
        x.cpu()
        x.to("cpu", non_blocking=True)
        torch.tensor([1.0], device="fake")
        pageable.to("fake", non_blocking=True)
        pinned.to("fake", non_blocking=True)
        x[torch.tensor([0])]

    counted = {kind: n for (kind, where), n in transfers.counted.items() if not where}
    assert counted == {READ: 2, TO_HOST: 1, TO_HOST_LATER: 1, TO_DEVICE: 3, TO_DEVICE_LATER: 1}


def test_a_read_in_a_hook_of_a_backward_pass_is_counted() -> None:
    layer = nn.Linear(3, 3).to("fake")
    layer.weight.register_hook(lambda gradient: gradient.sum().item() and None)
    loss = layer(torch.ones(2, 3, device="fake")).sum()

    with Transfers() as transfers:
        loss.backward()

    assert [(*transfer, n) for transfer, n in transfers.counted.items()] == [(READ, "", 1)]
    assert transfers.launched >= 3


def here() -> torch.Stream:
    return torch.accelerator.current_stream()


def kinds(streams: Streams) -> list[str]:
    return [hazard.kind for hazard in streams.hazards()]


def read_of_what_a_stream_wrote(side: torch.Stream, waits: bool) -> None:
    x = torch.ones(4, device="fake") * 2
    if waits:
        side.wait_stream(here())
    with side:
        y = x + 1
    here().wait_stream(side)
    y.sum()


def read_on(side: torch.Stream) -> torch.Tensor:
    """What the other stream reads, and does not wait for."""
    x = torch.ones(4, device="fake")
    side.wait_stream(here())
    with side:
        _ = x + 1
    return x


def overwrite_of_what_a_stream_reads(side: torch.Stream, waits: bool) -> None:
    x = read_on(side)
    if waits:
        here().wait_stream(side)
    x.zero_()


def reuse_of_memory_that_a_stream_reads(side: torch.Stream, waits: bool) -> None:
    x = read_on(side)
    del x
    if waits:
        here().wait_stream(side)
    _ = torch.zeros(2, device="fake")


def reuse_that_the_allocator_knows_of(side: torch.Stream, waits: bool) -> None:
    x = read_on(side)
    if waits:
        x.record_stream(side)
    del x
    _ = torch.zeros(2, device="fake")


def read_of_a_copy_on_the_host(_: torch.Stream, waits: bool) -> None:
    y = torch.ones(4, device="fake").to("cpu", non_blocking=True)
    if waits:
        here().record_event().synchronize()
    y.sum()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (read_of_what_a_stream_wrote, "read before written"),
        (overwrite_of_what_a_stream_reads, "overwritten before read"),
        (reuse_of_memory_that_a_stream_reads, "reused while in use"),
        (reuse_that_the_allocator_knows_of, "reused while in use"),
        (read_of_a_copy_on_the_host, "read before written"),
    ],
)
def test_what_is_not_waited_for_is_a_hazard(work: Any, kind: str, waits: bool) -> None:
    with Streams() as streams:
        work(torch.Stream("fake:0"), waits)

    assert kinds(streams) == [kind] * (not waits)


def test_streams_of_a_backward_pass_are_those_of_the_forward_pass() -> None:
    """And autograd waits where they meet."""
    first, second = nn.Linear(3, 3).to("fake"), nn.Linear(3, 3).to("fake")
    side = torch.Stream("fake:0")

    with Streams() as streams:
        x = first(torch.ones(2, 3, device="fake"))
        side.wait_stream(here())
        with side:
            y = second(x)
        here().wait_stream(side)
        (x + y).sum().backward()

    assert not streams.hazards()
    on_side = [o.name for o in streams.operations if o.stream == (0, side.stream_id)]
    assert on_side.count("mm") >= 1  # the backward pass of the second layer


@pytest.mark.parametrize("waited", [True, False])
def test_collectives_have_a_stream_that_has_to_be_waited_for(waited: bool) -> None:
    def reduced() -> tuple[list[float], list[str]]:
        x = torch.ones(2, device=devices.of_rank(dist.get_rank()))
        with Streams() as streams:
            work = dist.all_reduce(x, async_op=True)
            if waited:
                work.wait()
            y = x + 1
        return y.tolist(), kinds(streams)

    assert on_ranks(2, reduced) == [([3, 3], ["read before written"] * (not waited))] * 2


def test_collectives_of_sharded_models_are_those_of_the_cpu() -> None:
    def everything() -> list[list[float]]:
        rank = dist.get_rank()
        device = devices.of_rank(rank)
        x = torch.arange(4.0, device=device) + rank
        scattered, gathered = torch.zeros(2, device=device), torch.zeros(8, device=device)
        listed = [torch.zeros(4, device=device) for _ in range(2)]
        dist.reduce_scatter(scattered, list(x.chunk(2)))
        dist.all_gather(listed, x)
        torch.distributed.distributed_c10d._get_default_group()._allgather_base(gathered, x).wait()
        return [scattered.tolist(), *(one.tolist() for one in listed), gathered.tolist()]

    first, second = [0, 1, 2, 3], [1, 2, 3, 4]
    rest = [first, second, first + second]
    assert on_ranks(2, everything) == [[[1, 3], *rest], [[5, 7], *rest]]


def test_autocast_lowers_what_it_lowers_on_a_gpu() -> None:
    layer, x = nn.Linear(3, 3).to("fake"), torch.ones(2, 3, device="fake")

    with torch.autocast("fake", dtype=torch.bfloat16):
        y = layer(x)
        loss = nn.functional.mse_loss(y, x)

    assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("read", [True, False])
def test_only_what_the_host_reads_makes_it_wait(read: bool) -> None:
    """Kernels are those of the CPU, but to them the host does not wait for others."""
    side = torch.Stream("fake:0")

    with Streams() as streams:
        x = torch.ones(4, device="fake") * 2
        y = torch.ones(4, device="fake") * 3  # the kernel that comes next
        if read:
            y.tolist()
        with side:
            _ = x + 1

    assert bool(kinds(streams)) != read
