# SPDX-License-Identifier: Apache-2.0
"""What the collector captures, against gradients computed without DDP, one rank at a time."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from noisescale.collectors.averaged_gradient import share_of
from noisescale.collectors.ddp import DdpCollector, Phase
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.collectors.parameters import trained_parameters

STEPS = 4


class Net(nn.Module):
    """A small model with what makes gradients odd: branches, reentrant blocks, frozen parts."""

    def __init__(self, branches: str = "", reentrant_from: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(8, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.branches = branches
        self.reentrant_from = reentrant_from
        self.passes = 0

    def forward(self, x: Tensor, branch: str) -> Tensor:
        if self.reentrant_from is not None and self.passes >= self.reentrant_from:
            x = x.requires_grad_()
            h = checkpoint(self.first, x, use_reentrant=True).tanh()
        else:
            h = self.first(x).tanh()
        self.passes += 1
        if branch in ("left", "both"):
            h = h + self.left(h)
        if branch in ("right", "both"):
            h = h + self.right(h)
        return self.last(h * self.scale)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3 + rank, 6, generator=generator)


def backward(model: nn.Module, step: int, micro: int, rank: int, branch: str) -> Tensor:
    loss: Tensor = model(batch(step, micro, rank), branch).square().mean() / 2
    return loss


def brute_force(
    model: Net, step: int, micros: int, ranks: int, branch_of: Callable[[int, int], str]
) -> tuple[list[float], float]:
    """Squared norms of every rank's gradient and of their mean, in float64, without DDP."""
    gradients = []
    for rank in range(ranks):
        plain = copy.deepcopy(model).double()
        plain.reentrant_from = None
        for micro in range(micros):
            branch = branch_of(rank, micro)
            loss = plain(batch(step, micro, rank).double(), branch).square().mean() / 2
            loss.backward()
        gradients.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                    for p in plain.parameters()
                    if p.requires_grad
                ]
            )
        )
    mean = torch.stack(gradients).mean(0)
    return [g.square().sum().item() for g in gradients], mean.square().sum().item()


def collector_of(ddp: DistributedDataParallel, parameters: Any = None) -> DdpCollector:
    named = ddp.module.named_parameters()
    return DdpCollector(ddp, GradientNorms(trained_parameters(named, parameters)))


def captured(
    model: Net,
    ddp_options: dict[str, Any],
    micros: int,
    branch_of: Callable[[int, int], str],
    comm_hook: Any = None,
) -> dict[str, Any]:
    """Train on one rank for a few steps; return what was captured and what it should be."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model, **ddp_options)
    if comm_hook is not None:
        ddp.register_comm_hook(None, comm_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    collector = collector_of(ddp)
    rows = []
    for step in range(STEPS):
        expected = brute_force(model, step, micros, ranks, branch_of)
        optimizer.zero_grad()
        for micro in range(micros):
            with nullcontext() if micro == micros - 1 else ddp.no_sync():
                loss = backward(ddp, step, micro, rank, branch_of(rank, micro))
                collector.before_backward(loss, 1)
                loss.backward()
        local = collector.small_sq_norms()
        share = collector.big_sq_norms()
        dist.all_reduce(share)
        rows.append((None if local is None else local.item(), share.item(), *expected))
        collector.reset()
        optimizer.step()
    by_hooks = collector.phase is Phase.BY_HOOKS
    collector.close()
    hooks_left = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return {"rows": rows, "by_hooks": by_hooks, "hooks_left": hooks_left}


def both(rank: int, micro: int) -> str:
    return "both"


def left_on_one_rank(rank: int, micro: int) -> str:
    """`right` is used on rank 0 only, in no last micro-batch; `left` on all."""
    return "both" if rank == 0 and micro == 0 else "left"


def left_everywhere(rank: int, micro: int) -> str:
    return "left"


WAYS: dict[str, tuple[dict[str, Any], Callable[[int, int], str]]] = {
    "default": ({}, both),
    "bucket views": ({"gradient_as_bucket_view": True}, both),
    "small buckets": ({"bucket_cap_mb": 1e-4}, both),
    "unused somewhere": ({"find_unused_parameters": True}, left_on_one_rank),
    "unused everywhere": ({"find_unused_parameters": True}, left_everywhere),
    "unused, bucket views": (
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        left_on_one_rank,
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ranks", "micros"), [(2, 1), (2, 3), (3, 2)])
def test_captured_norms_are_those_of_brute_force(way: str, ranks: int, micros: int) -> None:
    options, branch_of = WAYS[way]

    results = on_ranks(ranks, lambda: captured(Net(), options, micros, branch_of))

    for rank, result in enumerate(results):
        for local, big, expected_locals, expected_big in result["rows"]:
            assert local == pytest.approx(expected_locals[rank], rel=1e-6)
            assert big == pytest.approx(expected_big, rel=1e-6)
        assert result["by_hooks"] is bool(options.get("gradient_as_bucket_view"))
        assert result["hooks_left"] == 0


def test_static_graph_is_captured_from_its_special_first_step_on() -> None:
    results = on_ranks(2, lambda: captured(Net(), {"static_graph": True}, 1, left_everywhere))

    for rank, result in enumerate(results):
        for local, big, expected_locals, expected_big in result["rows"]:
            assert local == pytest.approx(expected_locals[rank], rel=1e-6)
            assert big == pytest.approx(expected_big, rel=1e-6)


def test_a_users_comm_hook_stays_and_local_norms_do_not_see_it() -> None:
    results = on_ranks(2, lambda: captured(Net(), {}, 1, both, fp16_compress_hook))

    for rank, result in enumerate(results):
        for local, big, expected_locals, expected_big in result["rows"]:
            assert local == pytest.approx(expected_locals[rank], rel=1e-6)
            assert big == pytest.approx(expected_big, rel=1e-2)
            assert big != pytest.approx(expected_big, rel=1e-7)  # the hook did round to half


def test_reentrant_checkpointing_is_seen_and_hooks_stay() -> None:
    """There the end-of-backward callback would read averages: see the next test."""
    results = on_ranks(2, lambda: captured(Net(reentrant_from=0), {}, 1, both))

    for rank, result in enumerate(results):
        for local, big, expected_locals, expected_big in result["rows"]:
            assert local == pytest.approx(expected_locals[rank], rel=1e-6)
            assert big == pytest.approx(expected_big, rel=1e-6)
        assert result["by_hooks"]


def test_reentrant_checkpointing_that_starts_later_costs_one_step() -> None:
    results = on_ranks(2, lambda: captured(Net(reentrant_from=2), {}, 1, both))

    for rank, result in enumerate(results):
        locals_ = [local for local, *_ in result["rows"]]
        expected = [expected_locals[rank] for _, _, expected_locals, _ in result["rows"]]
        assert locals_[2] is None
        assert [*locals_[:2], locals_[3]] == pytest.approx([*expected[:2], expected[3]], rel=1e-6)


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


def sparse_oracle(model: SparseNet, step: int, micros: int, ranks: int) -> list[list[Tensor]]:
    """The dense gradient of every micro-batch of every rank, in float64, without DDP."""
    gradients = []
    for rank in range(ranks):
        of_rank = []
        for micro in range(micros):
            plain = copy.deepcopy(model).double()
            loss_of_ids(plain, step, micro, rank).backward()
            dense = [p.grad.to_dense().flatten() for p in plain.parameters() if p.grad is not None]
            of_rank.append(torch.cat(dense))
        gradients.append(of_rank)
    return gradients


@pytest.mark.parametrize("by_micro_batch", [False, True])
@pytest.mark.parametrize(
    ("ranks", "micros", "options"),
    [
        (2, 1, {}),
        (2, 3, {}),
        (3, 2, {}),
        (2, 2, {"gradient_as_bucket_view": True}),
        (2, 2, {"find_unused_parameters": True}),
        (2, 1, {"static_graph": True}),
    ],
)
def test_norms_of_sparse_gradients_are_those_of_brute_force(
    ranks: int, micros: int, options: dict[str, Any], by_micro_batch: bool
) -> None:
    """DDP divides and reduces sparse gradients in place while the backward pass still runs."""

    def measured() -> list[tuple[float, float, float, float]]:
        rank, model = dist.get_rank(), SparseNet()
        ddp = DistributedDataParallel(model, **options)
        norms = GradientNorms(trained_parameters(model.named_parameters(), None))
        collector: Any = DdpCollector(ddp, norms)
        if by_micro_batch:
            collector = MicroBatchCollector(norms, ddp.process_group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        rows = []
        for step in range(6):
            gradients = sparse_oracle(model, step, micros, ranks)
            optimizer.zero_grad()
            for micro in range(micros):
                with nullcontext() if micro == micros - 1 else ddp.no_sync():
                    loss = loss_of_ids(ddp, step, micro, rank)
                    collector.before_backward(loss, 1, capture_average=step % 2 == 0)
                    loss.backward()
            small, share = collector.small_sq_norms(), collector.big_sq_norms()
            dist.all_reduce(share)
            parts = gradients[rank] if by_micro_batch else [torch.stack(gradients[rank]).sum(0)]
            average = torch.stack([torch.stack(some).sum(0) for some in gradients]).mean(0)
            rows.append(
                (
                    small.item(),
                    sum(g.square().sum().item() for g in parts),
                    share.item(),
                    average.square().sum().item(),
                )
            )
            collector.reset()
            optimizer.step()
        return rows

    results = on_ranks(ranks, measured)

    for rows in results:
        for small, expected_small, big, expected_big in rows:
            assert small == pytest.approx(expected_small, rel=1e-6)
            assert big == pytest.approx(expected_big, rel=1e-6)


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


def test_only_trained_parameters_count() -> None:
    def norms() -> tuple[float, float]:
        model = Net()
        ddp = DistributedDataParallel(model)
        collector = collector_of(ddp, model.last.parameters())
        loss = backward(ddp, 0, 0, dist.get_rank(), "both")
        collector.before_backward(loss, 1)
        loss.backward()
        local = collector.small_sq_norms()
        assert local is not None
        plain = Net()
        backward(plain, 0, 0, dist.get_rank(), "both").backward()
        expected = sum(p.grad.square().sum().item() for p in plain.last.parameters())
        return local.item(), expected

    for local, expected in on_ranks(2, norms):
        assert local == pytest.approx(expected, rel=1e-6)


def test_a_model_without_trained_parameters_is_refused() -> None:
    def refused() -> str:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - asserted whole below
            collector_of(DistributedDataParallel(Net()), parameters=[])
        return str(error.value)

    assert on_ranks(1, refused) == [
        "`model` must have parameters that require a gradient, got none."
        " Unfreeze some before training starts, or leave the noise scale out."
    ]


def test_without_a_backward_there_is_no_norm() -> None:
    def nothing() -> list[Any]:
        collector = collector_of(DistributedDataParallel(Net()))
        collector.before_backward(torch.zeros(()), 1)
        return [collector.small_sq_norms(), collector.big_sq_norms().item()]

    assert on_ranks(1, partial(nothing)) == [[None, 0.0]]
