# SPDX-License-Identifier: Apache-2.0
"""What is odd about DDP: captures that take turns, comm hooks, checkpoints, sparse gradients."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from brute_force import expected, gradient_of, in_float64, micro_batch
from forked_once import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from ways_of_capture import reducing

from noisescale.collectors.averaged_gradient import share_of
from noisescale.collectors.ddp import DdpCollector, Phase
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.micro_batch import MicroBatchCollector

STEPS = 4


class Net(nn.Module):
    """With a block that reentrant checkpointing may go through from some pass on."""

    def __init__(self, reentrant_from: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2).requires_grad_(False)
        self.reentrant_from = reentrant_from
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant_from is not None and self.passes >= self.reentrant_from:
            h = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        else:
            h = self.first(x)
        self.passes += 1
        return self.last(h.tanh() * self.scale)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(3 + rank, 6, generator=generator).to(next(model.parameters()).dtype)
    loss: Tensor = model(x).square().mean()
    return loss


def norms_of(model: nn.Module) -> GradientNorms:
    return GradientNorms([(n, p) for n, p in model.named_parameters() if p.requires_grad])


class Captured(NamedTuple):
    local: list[float | None]
    big: list[float]
    phases: list[Phase]
    hooked: list[tuple[int, int]]
    """Parameters with a hook in the pass, and before a step that is not measured."""


def captured(model: Net, comm_hook: Any = None, **options: Any) -> Captured:
    """Go through a few steps on one rank; the weights stand still."""
    ddp = DistributedDataParallel(model, **options)
    if comm_hook is not None:
        ddp.register_comm_hook(None, comm_hook)
    collector = DdpCollector(ddp, norms_of(model))
    result = Captured([], [], [], [])
    for step in range(STEPS):
        ddp.zero_grad()
        loss = loss_of(ddp, step, dist.get_rank())
        collector.before_backward(loss, 1)
        in_the_pass = hooked(ddp)
        loss.backward()
        local, share = collector.small_sq_norms(), collector.big_sq_norms()
        dist.all_reduce(share)
        result.local.append(None if local is None else local.item())
        result.big.append(share.item())
        result.phases.append(collector.phase)
        collector.reset()
        if step % 2:
            collector.unhook()
        result.hooked.append((in_the_pass, hooked(ddp)))
    collector.close()
    return result


def hooked(model: nn.Module) -> int:
    return sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())


two = Ranks(2)


@two
def every_way() -> dict[str, Captured]:
    return {
        "default": captured(Net()),
        "bucket views": captured(Net(), gradient_as_bucket_view=True),
        "static graph": captured(Net(), static_graph=True),
        "comm hook": captured(Net(), fp16_compress_hook),
        "reentrant": captured(Net(reentrant_from=0)),
        "reentrant later": captured(Net(reentrant_from=2)),
    }


def check(way: str, *, big: float = 1e-6, but: int | None = None) -> None:
    """Compare with the oracle; in the step `but` nothing is to be measured."""
    model = in_float64(Net())
    for step in range(STEPS):
        parts = [
            micro_batch(gradient_of(model, partial(loss_of, step=step, rank=rank)), 3 + rank)
            for rank in range(2)
        ]
        average = expected(parts).big_sq_norm
        for part, of_rank in zip(parts, every_way(), strict=True):
            got, local = of_rank[way], expected([part]).big_sq_norm
            assert got.local[step] == (None if step == but else pytest.approx(local, rel=1e-6))
            assert got.big[step] == pytest.approx(average, rel=big)


PROBING, HOOKS, END = Phase.PROBING, Phase.BY_HOOKS, Phase.AT_BACKWARD_END


@pytest.mark.parametrize(
    ("way", "phases"),
    [
        ("default", [PROBING, END, END, END]),
        ("bucket views", [HOOKS] * STEPS),  # there the gradient is the bucket
        ("reentrant", [HOOKS] * STEPS),  # where the end of the pass would read averages
        ("static graph", None),  # from its special first step on
    ],
)
def test_hooks_give_way_to_the_end_of_the_backward_pass_or_stay(
    way: str, phases: list[Phase] | None
) -> None:
    check(way)
    if phases is not None:
        assert [of_rank[way].phases for of_rank in every_way()] == [phases, phases]


def test_reentrant_checkpointing_that_starts_later_costs_one_step() -> None:
    check("reentrant later", but=2)
    for of_rank in every_way():
        assert of_rank["reentrant later"].phases[1:] == [END, HOOKS, HOOKS]


def test_a_users_comm_hook_stays_and_local_norms_do_not_see_it() -> None:
    check("comm hook", big=1e-2)
    with pytest.raises(AssertionError):
        check("comm hook", big=1e-7)  # the hook did round to half


@pytest.mark.parametrize(
    ("way", "in_the_pass"),
    [("default", [5, 5, 1, 1]), ("bucket views", [5] * 4), ("reentrant later", [5, 5, 1, 5])],
)
def test_before_a_step_that_is_not_measured_no_parameter_has_a_hook(
    way: str, in_the_pass: list[int]
) -> None:
    for of_rank in every_way():
        found, after = zip(*of_rank[way].hooked, strict=True)
        assert list(found) == in_the_pass
        assert after[1::2] == (0, 0)


class SparseNet(nn.Module):
    """Two tables with sparse gradients; ids occur several times, also within an example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids = nn.Embedding(20, 8, sparse=True)
        self.bags = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.last = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last((self.ids(ids).sum(1) + self.bags(ids)).tanh())


def loss_of_ids(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    loss: Tensor = model(torch.randint(20, (3 + rank, 6), generator=generator)).square().mean()
    return loss


def sparse_norms(micros: int, by_micro_batch: bool, **options: Any) -> list[tuple[float, float]]:
    """Of each step what this rank shows, and |g|² of the average."""
    model = SparseNet()
    ddp = DistributedDataParallel(model, **options)
    collector: Any = DdpCollector(ddp, norms_of(model))
    if by_micro_batch:
        collector = MicroBatchCollector(norms_of(model), ddp.process_group)
    found = []
    for step in range(6):
        ddp.zero_grad()
        for micro in range(micros):
            with reducing(ddp, micro == micros - 1):
                loss = loss_of_ids(ddp, step, micro, dist.get_rank())
                collector.before_backward(loss, 1, capture_average=step % 2 == 0)
                loss.backward()
        small, share = collector.small_sq_norms(), collector.big_sq_norms()
        dist.all_reduce(share)
        found.append((small.item(), share.item()))
        collector.reset()
    return found


SPARSE: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (1, {}),
    (3, {"gradient_as_bucket_view": True}),
    (2, {"find_unused_parameters": True}),
    (1, {"static_graph": True}),
]
RUNS = [(micros, by, options) for micros, options in SPARSE for by in (False, True)]


def sparse_runs() -> list[list[tuple[float, float]]]:
    chosen = RUNS if dist.get_world_size() == 2 else RUNS[:2]
    return [sparse_norms(micros, by, **options) for micros, by, options in chosen]


@pytest.mark.parametrize(("ranks", "found"), [(2, two(sparse_runs)), (3, Ranks(3)(sparse_runs))])
def test_norms_of_sparse_gradients_are_those_of_brute_force(ranks: int, found: Any) -> None:
    """DDP divides and reduces sparse gradients in place while the backward pass still runs."""
    model = in_float64(SparseNet())
    for of_runs in zip(RUNS if ranks == 2 else RUNS[:2], *found(), strict=True):
        (micros, by_micro_batch, _), *of_ranks = of_runs
        for step in range(6):
            gradients = [
                [
                    gradient_of(model, partial(loss_of_ids, step=step, micro=micro, rank=rank))
                    for micro in range(micros)
                ]
                for rank in range(ranks)
            ]
            sums = [torch.stack(of_rank).sum(0) for of_rank in gradients]
            average = torch.stack(sums).mean(0).square().sum().item()
            for rank, of_steps in enumerate(of_ranks):
                parts = gradients[rank] if by_micro_batch else [sums[rank]]
                small = sum(g.square().sum().item() for g in parts)
                assert of_steps[step] == pytest.approx((small, average), rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_hold_every_element_once_and_are_balanced(ranks: int) -> None:
    shapes = [(), (1,), (0, 5), (7,), (64, 32), (3, 1000), (2, 2, 2, 2)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    sizes = []

    for rank in range(ranks):
        size = 0
        for index, start, stop in share_of(parameters, rank, ranks):
            p = parameters[index]
            cut = p.data[start:stop] if p.dim() else p.data
            cut += 1
            size += cut.numel()
        sizes.append(size)

    assert all((p == 1).all() for p in parameters)
    total = sum(p.numel() for p in parameters)
    assert max(sizes) - total / ranks <= 1000  # one row of the widest parameter
