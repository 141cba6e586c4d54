# SPDX-License-Identifier: Apache-2.0
"""Steps of a model that is sharded, in rounds, and what their norms should be."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import devices
import pytest
import torch
import torch.distributed as dist
from brute_force import columns_of, gradient_of, in_float64
from forked_once import Ranks
from tiers import slow
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint
from ways_of_capture import reducing

from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.sharded.rounds import RoundsCollector

STEPS = 2
EXACT = 2e-6  # float32 gradients and norms against float64

# The backward passes of a step, in rounds: the last pass of each reduces the sum.
SINGLE = [[0]]
EVERY_PASS = [[0], [1], [2]]
SUMMED = [[0, 1, 2]]
TWO_ROUNDS = [[0, 1], [2, 3]]

Rounds = Sequence[Sequence[int]]
Branch = Callable[[int, int], bool]


class Block(nn.Module):
    def __init__(self, inner: int, wide: int) -> None:
        super().__init__()
        self.up = nn.Linear(inner, wide)
        self.norm = nn.LayerNorm(wide)
        self.down = nn.Linear(wide, inner, bias=False)
        self.side = nn.Linear(inner, inner, bias=False)  # in a branch that may be unused

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        h = x + self.down(self.norm(self.up(x)).tanh())
        return h + self.side(x) if branch else h


class Net(nn.Module):
    """Dimensions that do not divide evenly: shards are padded, some are empty."""

    def __init__(
        self, inner: int = 7, wide: int = 9, *, reentrant: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again, self.reentrant = partial(Net, inner, wide, tied=tied), reentrant
        self.first = nn.Linear(5, inner)
        self.blocks = nn.ModuleList([Block(inner, wide), Block(inner, wide)])
        if tied:
            self.blocks[1].side = self.blocks[0].side  # type: ignore[union-attr]
        self.last = nn.Linear(inner, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            if self.reentrant:
                h = checkpoint(block, h, branch, use_reentrant=True)
            else:
                h = block(h, branch)
        return self.last(h)


def always(step: int, pass_: int) -> bool:
    return True


def in_first_pass_only(step: int, pass_: int) -> bool:
    return pass_ == 0


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    torch.set_num_threads(1)
    return init_device_mesh(
        devices.name, shape, mesh_dim_names=("pipe", "replica", "shard")[-len(shape) :]
    )


def batch(step: int, pass_: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * pass_ + rank)
    return torch.randn(examples(pass_, rank), 5, generator=generator)


def examples(pass_: int, rank: int) -> int:
    return 3 + rank + 2 * pass_


def loss_of(net: nn.Module, step: int, pass_: int, rank: int, branch: bool = True) -> Tensor:
    weight = next(net.parameters())
    x = batch(step, pass_, rank).to(weight.device, weight.dtype)
    loss: Tensor = net(x, branch)
    return (loss if loss.dtype == torch.float64 else loss.float()).square().mean()


def whole(model: Any) -> nn.Module:
    """What is sharded, in float64: the weights stand still."""
    return in_float64(model.again())


def brute_force(
    net: nn.Module, step: int, rounds: Rounds, branch: Branch, norms: GradientNorms, divisor: float
) -> tuple[list[float], list[float]]:
    """Σ|g_round|² of this rank, and |g|² of the mean over ranks; both for every entry."""
    entry_of = dict(zip(norms.names, norms.entry_of, strict=True))
    columns = [columns_of(net, lambda n, e=e: entry_of.get(n) == e) for e in range(norms.entries)]

    def gradient(pass_: int) -> Tensor:
        rank, on = dist.get_rank(), branch(step, pass_)
        return gradient_of(net, lambda net: loss_of(net, step, pass_, rank, on) / divisor)

    of_rounds = torch.stack([sum(gradient(p) for p in passes) for passes in rounds])
    mean = of_rounds.sum(0) / dist.get_world_size()
    dist.all_reduce(mean)
    return (
        [of_rounds[:, some].square().sum().item() for some in columns],
        [mean[some].square().sum().item() for some in columns],
    )


def steps_of(
    collector: RoundsCollector,
    model: Any,
    rounds: Rounds,
    branch: Branch = always,
    *,
    capture: bool = False,
    together: bool = False,
) -> dict[str, Any]:
    """Go through a few steps; return what was captured and what it should be.

    `together`: a round is one backward pass, through all of its forward passes.
    """
    rank, passes = dist.get_rank(), [pass_ for round_ in rounds for pass_ in round_]
    result: dict[str, Any] = {"rows": []}
    for step in range(STEPS):
        expected = brute_force(whole(model), step, rounds, branch, collector.norms, len(passes))
        model.zero_grad()
        for round_ in rounds:
            for of_pass in [round_] if together else [[pass_] for pass_ in round_]:
                with reducing(model, of_pass[-1] == round_[-1]):
                    losses = [loss_of(model, step, p, rank, branch(step, p)) for p in of_pass]
                    loss, size = sum(losses) / len(passes), sum(examples(p, rank) for p in of_pass)
                    last = of_pass[-1] == passes[-1]
                    collector.before_backward(loss, size, capture_average=capture and last)
                    loss.backward()
                assert not collector.gradients_dropped
        if capture:
            assert collector.average_captured
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.1)  # as clipping would
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        dist.all_reduce(big, group=collector.group)
        result["rows"].append([None if small is None else small.tolist(), big.tolist(), *expected])
        collector.reset()
    collector.close()
    return result


class WithoutNorms:
    """Steps of a model that should have no small norms, and some that should."""

    def __init__(self, collector: RoundsCollector, model: Any) -> None:
        self.collector, self.model = collector, model

    def run(self, *reduces: bool, announced: bool = True) -> None:
        """One pass after the other, that reduces gradients or adds to them."""
        for on in reduces:
            with reducing(self.model, on):
                self.backward(announced=announced)

    def backward(self, *, announced: bool = True) -> None:
        loss = loss_of(self.model, 0, 0, dist.get_rank())
        if announced:
            self.collector.before_backward(loss, 1)
        loss.backward()

    def close(self, what: str, *, norms: bool = False) -> None:
        assert (self.collector.small_sq_norms() is not None) == norms, what
        self.collector.reset()
        self.model.zero_grad()

    def go_through_all(self) -> None:
        self.close("no pass")
        self.run(True, announced=False)
        self.close("none that was announced")
        self.run(False)
        self.close("none that reduces")
        self.run(True)  # which reduces what was left
        self.collector.reset()
        self.run(True, False, True)
        self.close("rounds of unequal length")
        self.run(True)
        self.close("a good step", norms=True)


def check(results: list[dict[str, Any]], tolerance: float = EXACT) -> None:
    for result in results:
        for small, big, expected_small, expected_big in result["rows"]:
            assert small == pytest.approx(expected_small, rel=tolerance, abs=1e-12)
            assert big == pytest.approx(expected_big, rel=tolerance, abs=1e-12)


GROUPS = {"first block": r"blocks\.0", "vectors": r"bias|norm"}
CAPTURE: dict[str, Any] = {"capture": True}
WITHOUT: dict[str, Any] = {"branch": in_first_pass_only, "groups": GROUPS}
IN_GROUPS: dict[str, Any] = {"groups": GROUPS}
TOGETHER: dict[str, Any] = {"together": True}
EVERY_WAY = [(SINGLE, GROUPS), (EVERY_PASS, None), (SUMMED, None), (TWO_ROUNDS, GROUPS)]


class Run(NamedTuple):
    """Steps of a model."""

    make: Callable[[], Any]
    rounds: Rounds
    tolerance: float = EXACT
    how: dict[str, Any] = {}  # noqa: RUF012 # nobody writes to it


class Runs:
    """Runs by name, all of which go through `steps` on ranks that are forked once.

    Args:
        steps: Called with a model, the rounds and the options of the run.
    """

    def __init__(self, steps: Callable[..., dict[str, Any]]) -> None:
        self._steps = steps
        self._found: dict[str, tuple[Callable[[], Any], float]] = {}
        self.names: list[Any] = []

    def add(self, ranks: Ranks, runs: dict[str, Run], *, quick: bool = True) -> None:
        def call() -> dict[str, Any]:
            return {n: self._steps(r.make(), r.rounds, **r.how) for n, r in runs.items()}

        found = ranks(call)
        self._found |= {name: (found, run.tolerance) for name, run in runs.items()}
        self.names += runs if quick else map(slow, runs)

    def check(self, name: str) -> None:
        found, tolerance = self._found[name]
        check([of_rank[name] for of_rank in found()], tolerance)
