# SPDX-License-Identifier: Apache-2.0
"""Nothing is read on a stream before it has waited for what wrote it, in any way of capture.

Each test drops a wait, too, and the hazard has to be found.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest import mock

import devices
import pytest
import torch
import torch._dynamo  # which FSDP2 imports, here once and not in every fork
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from ways_of_capture import reducing

from fake_device.streams import Streams
from noisescale import NoiseScaleMeter
from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.ddp import DdpCollector, Phase
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows import step_rows
from noisescale.collectors.rows.step_rows import StepRows
from noisescale.methods.inner_product import NoiseAlongGradient

MICRO_BATCHES = 2
STEPS = 6  # after two of DDP, hooks have given way to the end of the backward pass


class Block(nn.Module):
    """With a branch that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        return self.main(x).tanh() + (self.side(x) if branch else 0)


class TwoStreams(nn.Module):
    """Two blocks at once: one of them on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.here, self.there = Block(), Block()
        self.last = nn.Linear(8, 3)
        self.to(device)
        self.stream = torch.Stream(device)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        now = torch.accelerator.current_stream()
        h = self.norm(self.first(x)).tanh()
        self.stream.wait_stream(now)
        with self.stream:
            there = self.there(h, branch)
        here = self.here(h, branch)
        now.wait_stream(self.stream)
        h.record_stream(self.stream)
        there.record_stream(now)
        return self.last(here + there)


class TwoBranches(nn.Module):
    """Two branches, the second on a stream of its own, that waits once a step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 24))
        self.second = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 24))
        self.to(device)
        self.stream, self.passes = torch.Stream(device), 0

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        now = torch.accelerator.current_stream()
        if self.passes % MICRO_BATCHES == 0:  # for the weights
            self.stream.wait_stream(now)
        self.passes += 1
        with self.stream:
            z = self.second(x)
        y = self.first(x)
        now.wait_stream(self.stream)
        return (y + z)[:, :3]


class OneStream(TwoStreams):
    """FSDP has streams of its own."""

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        h = self.norm(self.first(x)).tanh()
        return self.last(self.here(h, branch) + self.there(h, branch))


class Way(NamedTuple):
    """A way of training and of measuring."""

    ranks: int
    wrapped: Callable[[torch.device], Any]
    options: dict[str, Any]
    """Of the meter, without the optimizer."""
    micro_batches: int = 1
    captured: bool | None = None
    """Whether the average is captured at the end of the pass; None: the meter's choice."""
    unused: bool = False
    """Whether a parameter has no gradient in every second step."""
    aside: bool = False
    """Whether forward passes run on a stream of their own, and wait for nothing within a step."""


def ddp(device: torch.device, **options: Any) -> nn.Module:
    return DistributedDataParallel(TwoStreams(device), **options)


def sharded(device: torch.device, shape: Sequence[int] = (2,), *, offloaded: bool = False) -> Any:
    names = ("replica", "shard")[-len(shape) :]
    options: dict[str, Any] = {"mesh": init_device_mesh("fake", tuple(shape), mesh_dim_names=names)}
    if offloaded:
        options["offload_policy"] = CPUOffloadPolicy()
    model = OneStream(device)
    for block in (model.here, model.there):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def run(way: Way) -> tuple[list[str], float]:
    """The hazards that one rank finds in some steps, and the steps that were measured."""
    rank = dist.get_rank() if way.ranks > 1 else 0
    device = devices.of_rank(rank)
    model = way.wrapped(device)
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    meter = NoiseScaleMeter(model, every_n_steps=1, optimizer=optimizer, **way.options)
    now = torch.accelerator.current_stream(device)
    stream = torch.Stream(device) if way.aside else now
    with Streams() as streams, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            stream.wait_stream(now)  # for the weights
            for micro in range(way.micro_batches):
                last = micro == way.micro_batches - 1
                with reducing(model, last):
                    with stream:
                        x, y = torch.randn(8, 6, device=device), torch.randn(8, 3, device=device)
                        branch = not way.unused or step % 2 == 0
                        loss = (model(x, branch) - y).square().mean() / way.micro_batches
                    now.wait_stream(stream)
                    loss.record_stream(now)
                    meter.before_backward(
                        loss, 8, capture_average=bool(way.captured) and last, last=way.captured
                    )
                    loss.backward()
            meter.step()
            optimizer.step()
            optimizer.zero_grad()
        measured = meter.noise_scale.steps
    meter.close()
    return [*map(str, streams.hazards())], measured


# ---- waits that are dropped


@contextmanager
def norms_on_a_stream_of_their_own() -> Iterator[None]:
    """It waits for nothing, and nothing for it."""
    with ExitStack() as patches:
        patches.enter_context(a_buffer_that_the_allocator_thinks_is_free())
        for name in (
            "noisescale.collectors.gradient_norms.norms_of",
            "noisescale.collectors.gradient_norms.norms_of_one",
        ):
            replaced = partial(_on_another_stream, resolve_name(name))
            patches.enter_context(mock.patch(name, replaced))
        yield


def _on_another_stream(function: Callable[..., Any], *arguments: Any) -> Any:
    with torch.Stream(torch.device("fake", torch.accelerator.current_device_index())):
        return function(*arguments)


def rows_that_are_not_waited_for() -> AbstractContextManager[Any]:
    def reduced(rows: StepRows, row: Tensor, *of_step: Any) -> None:
        step_rows._LAST.append(dist.all_reduce(row, group=rows._group, async_op=True))
        rows._waiting.append(step_rows._Waiting(row, None, *of_step))

    return mock.patch.object(StepRows, "_reduce", reduced)


def the_end_of_the_pass_where_hooks_are_needed() -> AbstractContextManager[Any]:
    """Where `p.grad` is the bucket that is being reduced by then."""
    phase = property(lambda collector: Phase.AT_BACKWARD_END, lambda collector, phase: None)
    return mock.patch.object(DdpCollector, "phase", phase, create=True)


def an_average_before_it_is_there() -> AbstractContextManager[Any]:
    """Captured by a callback that is queued before DDP's."""

    def on_backward_start(average: AveragedGradient, one: Any, _: Tensor) -> None:
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        queue_callback(lambda: average._capture(one))

    return mock.patch.object(AveragedGradient, "_on_backward_start", on_backward_start)


def norms_of_streams_that_are_not_waited_for() -> AbstractContextManager[Any]:
    return mock.patch.object(GradientNorms, "wait")


def a_buffer_that_the_allocator_thinks_is_free() -> AbstractContextManager[Any]:
    return mock.patch.object(torch.Tensor, "record_stream")


OF_NORMS = [norms_on_a_stream_of_their_own]
OF_RANKS = [*OF_NORMS, rows_that_are_not_waited_for]
OF_VIEWS = [*OF_RANKS, the_end_of_the_pass_where_hooks_are_needed]
OF_BUFFERS = [*OF_RANKS, a_buffer_that_the_allocator_thinks_is_free]
HALF: dict[str, Any] = {"small_batch": "half"}
MICRO: dict[str, Any] = {"small_batch": "micro_batch"}
RANK: dict[str, Any] = {"small_batch": "rank"}
ADAM: dict[str, Any] = {"extra": [NoiseAlongGradient]}
NOBODY: dict[str, Any] = {"averaged": False}
GROUPS: dict[str, Any] = {"groups": {"vectors": "bias|norm"}}
GROUPED: dict[str, Any] = RANK | GROUPS
VIEWS = partial(ddp, gradient_as_bucket_view=True)
UNUSED = partial(ddp, find_unused_parameters=True)
REPLICATED = partial(sharded, shape=(2, 2))

WAYS: dict[str, tuple[Way, list[Callable[[], AbstractContextManager[Any]]]]] = {
    "halves": (Way(1, TwoStreams, HALF), OF_NORMS),
    "halves, of Adam": (Way(1, TwoStreams, HALF | ADAM), OF_NORMS),
    "micro-batches": (Way(1, TwoStreams, MICRO, 3), OF_NORMS),
    "micro-batches, of Adam": (Way(1, TwoStreams, MICRO | ADAM | GROUPS, 2), OF_NORMS),
    "halves, aside": (Way(1, TwoStreams, HALF, aside=True), OF_NORMS),
    "micro-batches, aside": (Way(1, TwoStreams, MICRO, 3, aside=True), OF_NORMS),
    "DDP": (Way(2, ddp, RANK), OF_RANKS),
    "DDP, accumulated": (Way(2, ddp, RANK, 2), OF_RANKS),
    "DDP, captured average": (Way(2, ddp, RANK, captured=True), OF_RANKS),
    "DDP, average at the step": (Way(2, ddp, RANK, captured=False), OF_RANKS),
    "DDP, bucket views": (Way(2, VIEWS, RANK), OF_VIEWS),
    "DDP, bucket views, captured average": (
        Way(2, VIEWS, GROUPED, captured=True),
        [*OF_VIEWS, an_average_before_it_is_there],
    ),
    "DDP, bucket views, aside": (Way(2, VIEWS, RANK, 2, aside=True), OF_RANKS),
    "DDP, static graph": (Way(2, partial(ddp, static_graph=True), RANK), OF_RANKS),
    "DDP, unused parameters": (Way(2, UNUSED, RANK, unused=True), OF_RANKS),
    "DDP, micro-batches": (Way(2, ddp, MICRO, 2), OF_RANKS),
    "averaged by nobody": (Way(2, TwoStreams, NOBODY), OF_RANKS),
    "averaged by nobody, captured": (Way(2, TwoStreams, NOBODY, captured=True), OF_RANKS),
    "FSDP2": (Way(2, sharded, RANK), OF_RANKS),
    "FSDP2, accumulated, captured average": (Way(2, sharded, GROUPED, 2, True), OF_RANKS),
    "FSDP2, accumulated, aside": (Way(2, sharded, RANK, 2, aside=True), OF_RANKS),
    "FSDP2, unused parameters": (Way(2, sharded, GROUPED, unused=True), OF_BUFFERS),
    "FSDP2, offloaded": (Way(2, partial(sharded, offloaded=True), RANK), OF_RANKS),
    "FSDP2, replicated, unused parameters": (Way(4, REPLICATED, GROUPED, unused=True), OF_BUFFERS),
}


@pytest.mark.parametrize("way", WAYS)
def test_streams_wait_for_what_they_read(way: str) -> None:
    measured, mutations = WAYS[way]

    def hazards() -> list[list[str]]:
        none, steps = run(measured)
        assert steps > 0
        found = [none]
        for dropped in mutations:
            with dropped():
                found.append(run(measured)[0])
        return found

    for none, *found in [hazards()] if measured.ranks == 1 else on_ranks(measured.ranks, hazards):
        assert none == []
        for dropped, with_it in zip(mutations, found, strict=True):
            assert any("(noisescale/" in hazard for hazard in with_it), dropped.__name__


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        (MICRO, "captured.current_stream"),
        (MICRO | ADAM, "gradient_norms.GradientNorms.keep"),
        (MICRO, "captured.keep_from"),
    ],
)
def test_norms_are_read_once_they_are_there_and_freed_once_they_were_read(
    options: dict[str, Any], dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is that of the stream that made them, and they are gone after the pass."""

    def of_package() -> set[str]:
        found, _ = run(Way(1, TwoBranches, options, MICRO_BATCHES))
        return {hazard.partition(":")[0] for hazard in found if "(noisescale/" in hazard}

    if dropped != "captured.keep_from":
        # Gradients of each branch are normed in mid-pass, while some of the other are kept.
        monkeypatch.setattr("noisescale.collectors.captured._MOST_BYTES_KEPT", 560)
    assert not of_package()

    monkeypatch.setattr(f"noisescale.collectors.{dropped}", lambda *_: None)
    if dropped == "captured.current_stream":
        assert "read before written" in of_package()
    else:
        assert of_package() == {"reused while in use"}


@pytest.mark.parametrize("dropped", [nullcontext, norms_of_streams_that_are_not_waited_for])
def test_norms_of_shards_are_waited_for_where_fsdp_does_not_wait(dropped: Any) -> None:
    """As it does not before the last pass of several: `set_is_last_backward`."""

    def not_waited_for(device: torch.device) -> Any:
        model = sharded(device)
        model.set_is_last_backward(False)
        return model

    def hazards() -> list[str]:
        with dropped():
            return run(Way(2, not_waited_for, RANK))[0]

    for found in on_ranks(2, hazards):
        norms = [one for one in found if one.count("(noisescale/collectors/squared_norms.py") == 2]
        assert bool(norms) == (dropped is not nullcontext)
