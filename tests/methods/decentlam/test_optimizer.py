# SPDX-License-Identifier: Apache-2.0
import copy
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_once import Ranks
from methods.across_ranks.small_net import (
    closure_of,
    equal,
    error_of,
    loss_of,
    model,
    sgd,
    steps,
    this_rank,
    values,
)
from methods.decentlam.oracle_of_decentlam import decentlam, ring
from refused import refused
from tiers import slow_but
from torch import Tensor, nn

from benchmarks.lib.regressions import Array, regressions
from noisescale import DecentLaM, metropolis_weights
from noisescale.methods.decentlam.mixing import _add

WIDTH = 30
LRS = [0.02] * 5 + [0.01] * 5 + [0.03] * 3
ONE_WAY = (np.eye(3) + np.roll(np.eye(3), 1, axis=1)) / 2
"""Not symmetric: each rank hears one rank, and tells another one."""


def exponential(ranks: int) -> Array:
    """Equal shares of all ranks at distance 1, 2, 4, ... either way round."""
    matrix = np.zeros((ranks, ranks))
    for rank in range(ranks):
        heard = {rank}
        hop = 1
        while hop < ranks:
            heard |= {(rank + hop) % ranks, (rank - hop) % ranks}
            hop *= 2
        matrix[rank, sorted(heard)] = 1 / len(heard)
    return matrix


def pairs(ranks: int, hop: int, share: float) -> Array:
    matrix = np.eye(ranks)
    for one, other in ((i, i | hop) for i in range(ranks) if not i & hop and i | hop < ranks):
        matrix[[one, other], [one, other]] = 1 - share
        matrix[[one, other], [other, one]] = share
    return matrix


HOPS = {2: (1,), 3: (1, 2), 5: (1, 2, 4), 8: (1, 2, 4)}


def star(ranks: int) -> Array:
    matrix = np.diag([1.0 / ranks] + [1 - 1.0 / ranks] * (ranks - 1))
    matrix[0, 1:] = matrix[1:, 0] = 1 / ranks
    return matrix


def on_regressions(topology: Any, momentum: float, weight_decay: float = 0.0) -> Array:
    """This rank's weights after a step with each of the learning rates."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, _, squares, products = regressions(ranks)
    a, b = torch.tensor(squares[rank]), torch.tensor(products[rank])
    # Two parameters of two groups, to be one message.
    halves = [torch.zeros(WIDTH // 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inner = torch.optim.SGD(
        [{"params": [half]} for half in halves], lr=1, momentum=momentum, weight_decay=weight_decay
    )
    optimizer = DecentLaM(inner, topology)
    for lr in LRS:
        gradient = a @ torch.cat([half.detach() for half in halves]) - b
        for half, group, part in zip(halves, inner.param_groups, gradient.chunk(2), strict=True):
            group["lr"] = lr
            half.grad = part
        optimizer.step()
    return torch.cat(halves).detach().numpy()


def all_regressions() -> dict[str, Array]:
    ranks = dist.get_world_size()
    graph = star(ranks) - np.diag(np.diag(star(ranks)))
    of_graph = {"star": metropolis_weights(graph), "equal": np.full((ranks, ranks), 1 / ranks)}
    found = {
        name: on_regressions(of_graph.get(name, name), 0.8, 0.01)
        for name in ("ring", "exponential", "one-peer", "star", "equal")
    }
    for name in ("ring", "one-peer"):
        found[f"{name} without momentum"] = on_regressions(name, 0.0)
    if ranks == 3:
        found["one way"] = on_regressions(ONE_WAY.tolist(), 0.3)
        mixing = "noisescale.methods.decentlam.mixing"
        with patch(f"{mixing}._MESSAGE_ON_CPU", 4), patch(f"{mixing}._BLOCK_ON_CPU", 3):
            found["messages"] = on_regressions("exponential", 0.8)
    return found


on = {ranks: Ranks(ranks) for ranks in HOPS}
REGRESSIONS = {ranks: on[ranks](all_regressions) for ranks in on}


@pytest.mark.parametrize("ranks", slow_but(HOPS, 2, 3, 5))
def test_each_rank_is_where_the_paper_has_it(ranks: int) -> None:
    share = 0.5 if ranks < 5 else 0.25
    one_peer, in_turn = ([pairs(ranks, hop, s) for hop in HOPS[ranks]] for s in (share, 0.5))
    wanted: dict[str, Any] = {
        "ring": ([ring(ranks)], 0.8, 0.01),
        "exponential": ([exponential(ranks)], 0.8, 0.01),
        "one-peer": (one_peer, 0.8, 0.01),
        "star": ([star(ranks)], 0.8, 0.01),
        "equal": ([np.full((ranks, ranks), 1 / ranks)], 0.8, 0.01),
        "ring without momentum": ([ring(ranks)], 0.0),
        "one-peer without momentum": (in_turn, 0.0),
    }
    if ranks == 3:
        wanted |= {"one way": ([ONE_WAY], 0.3), "messages": ([exponential(ranks)], 0.8)}

    of_ranks = REGRESSIONS[ranks]()

    gradients, *_ = regressions(ranks)
    for name, (matrices, *options) in wanted.items():
        expected = decentlam(gradients, np.zeros((ranks, WIDTH)), matrices, LRS, *options)
        got = np.stack([found[name] for found in of_ranks])
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-11, err_msg=name)


@on[2]
def without_a_gradient_on_rank_1() -> tuple[Tensor, Tensor]:
    net = model()
    optimizer = DecentLaM(sgd(net, lr=0.1, weight_decay=0.5), "ring")
    loss_of(net, 0).backward()
    gradient = net[2].bias.grad.clone()
    if dist.get_rank() == 1:
        net[2].bias.grad = None
    optimizer.step()
    return net[2].bias.detach(), gradient


def test_a_parameter_without_a_gradient_on_one_rank_is_averaged_all_the_same() -> None:
    (first, gradient), (second, _) = without_a_gradient_on_rank_1()

    before = model()[2].bias.detach()
    stepped = before - 0.1 * (gradient + 0.5 * before)
    torch.testing.assert_close([first, second], [(stepped + before) / 2] * 2)


@on[3]
def without_any_gradient() -> list[Tensor]:
    net = model()
    optimizer = DecentLaM(sgd(net), "ring")
    for _ in range(20):
        optimizer.step()
    return values(net)


def test_ranks_that_agree_stay_as_they_are_to_the_last_bit() -> None:
    for got in without_any_gradient():
        assert equal(got, values(model()))


@on[2]
def of_other_kinds() -> list[Tensor]:
    torch.manual_seed(0)
    rank = this_rank()
    table = nn.Embedding(4, 2, sparse=True)
    wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    before = [p.detach().clone() for p in (table.weight, wave, half)]
    optimizer = DecentLaM(torch.optim.SGD([table.weight, wave, half], lr=0.5), "ring")
    table(torch.tensor([rank])).sum().backward()
    wave.grad = torch.full((2,), 1j * (1 + rank))
    half.grad = torch.full((3,), 2.0 * rank, dtype=torch.bfloat16)
    optimizer.step()
    after = (table.weight, wave, half)
    return [old - new.detach() for old, new in zip(before, after, strict=True)]


def test_sparse_and_complex_and_half_precision_parameters_take_part() -> None:
    table = torch.tensor([[0.25, 0.25], [0.25, 0.25], [0, 0], [0, 0]])
    wave, half = torch.full((2,), 0.75j), torch.full((3,), 0.5, dtype=torch.bfloat16)
    for found in of_other_kinds():
        torch.testing.assert_close(found, [table, wave, half])


@on[3]
def in_a_subgroup() -> list[Tensor]:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    net = model()
    group = groups[dist.get_rank() % 2]
    matrix = np.full((group.size(),) * 2, 1 / group.size())
    steps(net, DecentLaM(sgd(net), matrix, group), 0, 3)
    return values(net)


def test_a_subgroup_averages_among_its_own_ranks() -> None:
    first, alone, third = in_a_subgroup()

    torch.testing.assert_close(first, third)
    assert not torch.allclose(first[0], alone[0], rtol=1e-3)


@on[2]
def by_a_closure() -> tuple[float, float, int, list[Tensor], list[Tensor]]:
    net, other, calls = model(), model(), []
    optimizer = DecentLaM(sgd(net), "ring")
    closure = closure_of(optimizer, net)
    loss = float(optimizer.step(lambda: calls.append(1) or closure()).detach())
    steps(other, DecentLaM(sgd(other), "ring"), 0, 1)
    return loss, float(loss_of(model(), 0).detach()), len(calls), values(net), values(other)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    for loss, wanted, calls, got, plainly in by_a_closure():
        assert (loss, calls) == (wanted, 1)
        assert equal(got, plainly)


@on[2]
def by_schedules() -> dict[str, Any]:
    """Of the inner and of the outer optimizer, and one that goes to zero and back."""
    found: dict[str, Any] = {}
    for name in ("inner", "outer"):
        net = model()
        inner = sgd(net)
        optimizer = DecentLaM(inner, "ring")
        of = inner if name == "inner" else optimizer
        schedule = torch.optim.lr_scheduler.StepLR(of, 2, 0.5)  # its warnings are errors
        for step in range(4):
            steps(net, optimizer, step, step + 1)
            schedule.step()
        found[name], found["lr"] = values(net), inner.param_groups[0]["lr"]
    net = model()
    optimizer = DecentLaM(sgd(net), "ring")
    for lr in (0.0, 0.05, 0.0, 0.05):
        optimizer.param_groups[0]["lr"] = lr
        steps(net, optimizer, 0, 1)
    return found | {"zero": values(net)}


def test_schedules_of_either_optimizer_move_the_learning_rate_also_from_zero() -> None:
    for found in by_schedules():
        assert found["lr"] == 0.0125
        assert equal(found["inner"], found["outer"])
        assert all(p.isfinite().all() for p in found["zero"])
        assert not torch.equal(found["zero"][0], model()[0].weight)


def of_a_plain_optimizer() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """After three steps, with copies of its state and of the weights."""
    net = model()
    plain = sgd(net)
    steps(net, plain, 0, 3, rank=0)
    return net, plain, *copy.deepcopy((plain.state_dict(), net.state_dict()))


@on[2]
def from_a_plain_optimizer() -> tuple[list[Tensor], dict[str, Any]]:
    _, _, state, weights = of_a_plain_optimizer()
    again = model()
    again.load_state_dict(weights)
    resumed = DecentLaM(sgd(again), "ring")
    resumed.load_state_dict(state)
    steps(again, resumed, 3, 5, rank=0)  # the same rows on all ranks
    return values(again), resumed.state_dict()


def test_the_momentum_of_a_plain_optimizer_is_taken_over_and_given_back() -> None:
    net, plain, *_ = of_a_plain_optimizer()
    steps(net, plain, 3, 5, rank=0)
    wanted, again = values(net), model()

    got, of_ranks = from_a_plain_optimizer()[0]
    alone = DecentLaM(sgd(again))
    alone.load_state_dict(of_ranks)
    again.load_state_dict(net.state_dict())
    steps(net, plain, 5, 6)
    steps(again, alone, 5, 6)

    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(values(again), values(net))
    assert not torch.equal(got[0], values(net)[0])


@on[2]
def paused_and_thawed() -> list[Tensor]:
    other, paused = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = DecentLaM(torch.optim.SGD([other, paused], lr=0.1, momentum=0.9), "ring")
    for lr, slope in ((0.1, 1.0), (0.05, None), (0.01, None), (0.01, 2.0)):
        paused.requires_grad_(slope is not None)
        optimizer.param_groups[0]["lr"] = lr
        other.grad = torch.ones(3)
        paused.grad = None if slope is None else torch.full((3,), slope)
        optimizer.step()
    return [other.detach(), paused.detach()]


def test_the_momentum_of_a_parameter_that_was_frozen_has_the_present_learning_rate() -> None:
    for other, paused in paused_and_thawed():
        moved = -0.1 - 0.05 * 1.9 - 0.01 * 2.71 - 0.01 * 3.439
        torch.testing.assert_close(other, torch.full((3,), moved))
        torch.testing.assert_close(paused, torch.full((3,), -0.1 - 0.01 * (0.9 + 2)))


SETTINGS = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}
EQUAL, WRONG = np.full((3, 3), 1 / 3), np.full((3, 3), 0.3)


@on[3]
def refusals() -> dict[str, Any]:
    """What each rank is told at the construction or the first step."""
    rank, net = this_rank(), model()
    late = DecentLaM(sgd(net, momentum=0.0), ONE_WAY)
    late.step()
    late.param_groups[0]["momentum"] = 0.9
    here = SETTINGS if rank == 1 else {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}
    of_one = {
        name: lambda name=name: DecentLaM(sgd(model(), **{name: here[name]})) for name in SETTINGS
    }
    made: dict[str, Any] = {
        "topology": lambda: DecentLaM(sgd(model()), "ring" if rank else EQUAL),
        "wrong on all": lambda: DecentLaM(sgd(model()), WRONG),
        "wrong on rank 1": lambda: DecentLaM(sgd(model()), WRONG if rank == 1 else "ring"),
        "adam": lambda: DecentLaM(
            torch.optim.Adam(model().parameters()) if rank == 2 else sgd(model())
        ),
        "momentum at once": lambda: DecentLaM(sgd(net, momentum=0.9), ONE_WAY),
        "momentum later": lambda: late,
    }
    return {name: error_of(lambda m=m: m().step()) for name, m in (made | of_one).items()}


def test_what_differs_or_is_wrong_on_any_rank_is_told_on_all() -> None:
    for said in refusals():
        for name, value in SETTINGS.items():
            assert said[name].arguments == (name,)
            assert f"[{value}] on rank 1" in said[name].got
        assert said["topology"].arguments == ("topology",)
        assert said["topology"].got.startswith("[0.333333 0.333333")
        assert said["topology"].got.endswith('"ring" on rank 1')
        for name in ("wrong on all", "wrong on rank 1"):
            assert "`topology`" in str(said[name])
            assert "0.9 in row 0" in str(said[name])
        assert isinstance(said["adam"], TypeError)
        assert "`optimizer`" in str(said["adam"])
        for name in ("momentum at once", "momentum later"):  # which would drive ranks apart
            assert (said[name].arguments, said[name].got) == (("momentum",), "0.9")
            assert "0.501" in said[name].requirement


@pytest.mark.parametrize(
    ("name", "value"),
    [("nesterov", True), ("dampening", 0.1), ("maximize", True), ("momentum", 1.0)],
)
def test_options_of_sgd_that_are_refused(name: str, value: Any) -> None:
    with refused(name, got=repr(value)):
        DecentLaM(sgd(model(), **{name: value}))


class Own(torch.optim.SGD):
    """Its step may be another one."""


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.LBFGS, Own])
def test_other_optimizers_are_refused_with_a_remedy(make: Any) -> None:
    with refused("optimizer", error=TypeError, got=make.__name__, remedy="`torch.optim.SGD"):
        DecentLaM(make(model().parameters(), lr=0.1))


@pytest.mark.parametrize("shares", [[0.2] * 2, [0.2] * 3, [0.1, 0.1, 0.3, 0.3, 0.05]])
def test_weighted_differences_from_all_neighbours_are_added(shares: list[float]) -> None:
    torch.manual_seed(0)
    into, own = torch.randn(100), torch.randn(100)
    theirs = [torch.randn(100) for _ in shares]
    wanted = into.double()
    for share, each in zip(shares, theirs, strict=True):
        wanted += share * (own.double() - each.double())

    _add(into, own, theirs, shares)

    torch.testing.assert_close(into, wanted.float())


def test_a_small_difference_in_16_bits_is_not_lost_in_a_sum() -> None:
    """1 + 2^-7 and 1 are both in bfloat16, and their sum is not."""
    into, own = torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)

    _add(into, own, [own + 2**-7, own.clone()], [0.25, 0.25])

    assert torch.equal(into, torch.full((3,), -(2.0**-9), dtype=torch.bfloat16))


LINE = [[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]


@on[3]
def swapped() -> dict[str, Any]:
    net = model()
    net[0].requires_grad_(False)
    optimizer = DecentLaM(sgd(net), LINE)
    steps(net, optimizer, 0, 4)
    found: dict[str, Any] = {"own": values(net)}
    with optimizer.use_mean() as mean:
        found |= {"inside": values(net), "kept": [p.clone() for p in optimizer.own_weights]}
        found["error"] = error_of(optimizer.step)
    found |= {"after": values(net), "distances": [mean.consensus_distance]}
    found["distances"].append(optimizer.consensus_distance())
    optimizer.average_()
    return found | {"last": values(net)}


def test_the_mean_is_swapped_in_and_out_and_frozen_weights_stay_to_the_last_bit() -> None:
    of_ranks = swapped()

    frozen = values(model())[:2]
    flat = torch.stack([torch.cat([p.flatten() for p in each["own"][2:]]) for each in of_ranks])
    mean = flat.mean(0)
    distance = float(((flat - mean) ** 2).sum(1).mean() / mean.square().sum())
    assert distance > 1e-4
    for each in of_ranks:
        for name in ("own", "inside", "last"):
            assert equal(each[name][:2], frozen)
        assert equal(each["after"], each["own"])
        assert equal(each["kept"], each["own"])
        assert equal(each["inside"], of_ranks[0]["inside"])
        assert equal(each["inside"], each["last"])
        torch.testing.assert_close(torch.cat([p.flatten() for p in each["inside"][2:]]), mean)
        assert each["distances"] == pytest.approx([distance] * 2, rel=1e-3)
        assert isinstance(each["error"], RuntimeError)
        assert "`use_mean()`" in str(each["error"])


@on[3]
def frozen_in_mid_run() -> tuple[list[Tensor], list[Tensor], float]:
    net, never = model(), model().requires_grad_(False)
    optimizer = DecentLaM(sgd(net), LINE)
    steps(net, optimizer, 0, 1)
    own = values(net)
    net.requires_grad_(False)
    optimizer.average_()
    return own, values(net), DecentLaM(sgd(never), "ring").consensus_distance()


def test_weights_that_were_frozen_in_mid_run_are_averaged_and_others_have_no_distance() -> None:
    of_ranks = frozen_in_mid_run()

    mean = [torch.stack(same).mean(0) for same in zip(*(own for own, *_ in of_ranks), strict=True)]
    for own, averaged, distance in of_ranks:
        assert not torch.allclose(own[0], mean[0])
        torch.testing.assert_close(averaged, mean)
        assert distance == 0
