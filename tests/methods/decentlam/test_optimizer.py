# SPDX-License-Identifier: Apache-2.0
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from methods.decentlam.oracle_of_decentlam import decentlam, ring
from ranks import on_ranks
from torch import Tensor, _dynamo, nn

from benchmarks.lib.regressions import Array, dmsgd, regressions, relative_distance
from noisescale import DecentLaM, metropolis_weights

_ = _dynamo  # Optimizers import it: here once, and not in each rank.

WIDTH = 30
LRS = [0.02] * 10 + [0.01] * 10 + [0.03] * 5


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


ONE_PEER = {
    2: [pairs(2, 1, 0.5)],
    3: [pairs(3, 1, 0.5), pairs(3, 2, 0.5)],
    5: [pairs(5, hop, 0.25) for hop in (1, 2, 4)],
    8: [pairs(8, hop, 0.25) for hop in (1, 2, 4)],
}


def star(ranks: int) -> Array:
    matrix = np.diag([1.0 / ranks] + [1 - 1.0 / ranks] * (ranks - 1))
    matrix[0, 1:] = matrix[1:, 0] = 1 / ranks
    return matrix


def on_regressions(
    topology: Any, lrs: list[float], momentum: float, weight_decay: float = 0.0, start: Any = None
) -> Array:
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
    if start is not None:
        optimizer.load_state_dict(optimizer.state_dict())  # they differ, as after a checkpoint
        for half, values in zip(halves, np.split(start[rank], 2), strict=True):
            half.data = torch.tensor(values)
    for lr in lrs:
        gradient = a @ torch.cat([half.detach() for half in halves]) - b
        for half, group, part in zip(halves, inner.param_groups, gradient.chunk(2), strict=True):
            group["lr"] = lr
            half.grad = part
        optimizer.step()
    return torch.cat(halves).detach().numpy()


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_each_rank_is_where_the_paper_has_it(ranks: int) -> None:
    graph = star(ranks) - np.diag(np.diag(star(ranks)))
    topologies = {
        "ring": [ring(ranks)],
        "exponential": [exponential(ranks)],
        "one-peer": ONE_PEER[ranks],
        "star": [star(ranks)],
    }

    def one_rank() -> list[Array]:
        own = [metropolis_weights(graph) if x == "star" else x for x in topologies]
        return [on_regressions(topology, LRS, 0.8, 0.01) for topology in own]

    of_ranks = on_ranks(ranks, one_rank)

    gradients, *_ = regressions(ranks)
    for index, matrices in enumerate(topologies.values()):
        wanted = decentlam(gradients, np.zeros((ranks, WIDTH)), matrices, LRS, 0.8, 0.01)
        got = np.stack([found[index] for found in of_ranks])
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-11)


def test_a_matrix_that_is_not_symmetric_hears_and_tells_different_ranks() -> None:
    matrix = (np.eye(3) + np.roll(np.eye(3), 1, axis=1)) / 2

    got = np.stack(on_ranks(3, lambda: on_regressions(matrix.tolist(), LRS, 0.3)))

    gradients, *_ = regressions(3)
    wanted = decentlam(gradients, np.zeros((3, WIDTH)), [matrix], LRS, 0.3)
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-11)


def test_momentum_adds_no_bias_where_its_rival_has_that_of_the_theory() -> None:
    """Squared distance to the optimum over that of decentralized SGD, at rest, on 8 ranks."""
    gradients, optimum, *_ = regressions(8)
    steps, lr, zeros = 8000, 0.002, np.zeros((8, WIDTH))
    without = decentlam(gradients, zeros, [ring(8)], [lr] * steps, 0.0)
    unit = relative_distance(without, optimum)
    ends = {
        beta: decentlam(gradients, zeros, [ring(8)], [lr] * steps, beta) for beta in (0.5, 0.8, 0.9)
    }

    stays = on_ranks(
        8, lambda: [on_regressions("ring", [lr] * 20, b, start=x) for b, x in ends.items()]
    )

    for index, (beta, theory) in enumerate([(0.5, 4), (0.8, 25), (0.9, 100)]):
        rival = dmsgd(gradients, zeros, ring(8), lr, beta, steps)
        got = np.stack([found[index] for found in stays])
        assert relative_distance(rival, optimum) / unit == pytest.approx(theory, rel=0.2)
        assert relative_distance(got, optimum) / unit == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_equal_shares_of_all_are_momentum_sgd_on_the_mean_gradient(ranks: int) -> None:
    equal = np.full((ranks, ranks), 1 / ranks)

    got = on_ranks(ranks, lambda: on_regressions(equal, LRS, 0.9, 0.01))

    _, _, squares, products = regressions(ranks)
    a, b = torch.tensor(squares.mean(0)), torch.tensor(products.mean(0))
    x = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
    plain = torch.optim.SGD([x], lr=1, momentum=0.9, weight_decay=0.01)
    for lr in LRS:
        plain.param_groups[0]["lr"] = lr
        x.grad = a @ x.detach() - b
        plain.step()
    for each in got:
        np.testing.assert_allclose(each, x.detach().numpy(), rtol=1e-10, atol=1e-11)


def test_without_momentum_it_is_decentralized_sgd() -> None:
    def one_rank() -> list[Array]:
        return [on_regressions(topology, LRS, 0.0) for topology in ("ring", "one-peer")]

    of_ranks = on_ranks(5, one_rank)

    gradients, *_ = regressions(5)
    for index, matrices in enumerate([[ring(5)], [pairs(5, hop, 0.5) for hop in (1, 2, 4)]]):
        x = np.zeros((5, WIDTH))
        for step, lr in enumerate(LRS):
            x = matrices[step % len(matrices)] @ (x - lr * gradients(x, step))
        got = np.stack([found[index] for found in of_ranks])
        np.testing.assert_allclose(got, x, rtol=1e-10, atol=1e-11)


def logistic(ranks: int) -> tuple[Array, Array]:
    """Rows of each rank about a centre and with an optimum of its own."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ranks, 60, 8)) + rng.standard_normal((ranks, 1, 8))
    y = np.einsum("rij,rj->ri", x, rng.standard_normal((ranks, 8))) > 0
    return x, np.asarray(y, np.float64)


def test_logistic_regression_on_unlike_data_ends_where_decentralized_sgd_does() -> None:
    ranks, steps, lr, decay = 4, 400, 0.05, 0.1
    x, y = logistic(ranks)

    def gradients(weights: Array, step: int) -> Array:
        error = 1 / (1 + np.exp(-np.einsum("rij,rj->ri", x, weights))) - y
        return np.asarray(np.einsum("rij,ri->rj", x, error) / x.shape[1])

    def one_rank() -> Array:
        rank = dist.get_rank()
        net = nn.Linear(8, 1, bias=False).double()
        nn.init.zeros_(net.weight)
        inner = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
        optimizer = DecentLaM(inner, "ring")
        rows, labels = torch.tensor(x[rank]), torch.tensor(y[rank])
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(net(rows)[:, 0], labels).backward()
            optimizer.step()
        return net.weight.detach().numpy()[0]

    got = np.stack(on_ranks(ranks, one_rank))

    zeros = np.zeros((ranks, 8))
    wanted = decentlam(gradients, zeros, [ring(ranks)], [lr] * steps, 0.9, decay)
    np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-10)
    without = decentlam(gradients, zeros, [ring(ranks)], [lr] * 10 * steps, 0.0, decay)
    np.testing.assert_allclose(got, without, rtol=1e-3, atol=1e-4)
    assert np.ptp(got, axis=0).max() > 0.01  # the ranks' weights are their own


FEATURES = 5


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def backward(net: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, FEATURES, generator=generator)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    return loss


def sgd(net: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), **({"lr": 0.05, "momentum": 0.9} | options))


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, *, first: int = 0, last: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        optimizer.zero_grad()
        backward(net, rank, step)
        optimizer.step()


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def test_one_process_trains_bit_by_bit_as_the_inner_optimizer() -> None:
    net, plain = model(), model()

    steps(net, DecentLaM(sgd(net)), last=3)
    steps(plain, sgd(plain), last=3)

    assert all(map(torch.equal, net.parameters(), plain.parameters()))


def test_a_parameter_without_a_gradient_on_one_rank_is_averaged_all_the_same() -> None:
    def one_rank() -> list[Tensor]:
        net = model()
        optimizer = DecentLaM(sgd(net, lr=0.1, weight_decay=0.5), "ring")
        backward(net, dist.get_rank(), 0)
        gradient = net[2].bias.grad.clone()
        if dist.get_rank() == 1:
            net[2].bias.grad = None
        optimizer.step()
        return [net[2].bias.detach(), gradient]

    (first, gradient), (second, _) = on_ranks(2, one_rank)

    before = model()[2].bias.detach()
    stepped = before - 0.1 * (gradient + 0.5 * before)
    torch.testing.assert_close(first, (stepped + before) / 2)
    torch.testing.assert_close(second, (stepped + before) / 2)


def test_ranks_that_agree_stay_as_they_are_to_the_last_bit() -> None:
    def one_rank() -> list[Tensor]:
        net = model()
        optimizer = DecentLaM(sgd(net), "ring")
        for _ in range(20):
            optimizer.step()
        return values(net)

    for got in on_ranks(3, one_rank):
        assert all(map(torch.equal, got, model().parameters()))


def test_sparse_and_complex_and_half_precision_parameters_take_part() -> None:
    def one_rank() -> list[Tensor]:
        torch.manual_seed(0)
        rank = dist.get_rank()
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

    for of_table, of_wave, of_half in on_ranks(2, one_rank):
        wanted = torch.tensor([[0.25, 0.25], [0.25, 0.25], [0, 0], [0, 0]])
        torch.testing.assert_close(of_table, wanted)
        torch.testing.assert_close(of_wave, torch.full((2,), 0.75j))
        torch.testing.assert_close(of_half, torch.full((3,), 0.5, dtype=torch.bfloat16))


def test_a_subgroup_averages_among_its_own_ranks() -> None:
    def one_rank() -> list[Tensor]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        net = model()
        optimizer = DecentLaM(sgd(net), [[0.5, 0.5], [0.5, 0.5]], groups[dist.get_rank() % 2])
        steps(net, optimizer, last=3)
        return values(net)

    of_ranks = on_ranks(4, one_rank)

    for one, other in ((0, 2), (1, 3)):
        for p, q in zip(of_ranks[one], of_ranks[other], strict=True):
            torch.testing.assert_close(p, q)
    assert not torch.allclose(of_ranks[0][0], of_ranks[1][0], rtol=1e-3)


def test_messages_longer_than_a_part_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noisescale.methods.decentlam.mixing._MESSAGE_ON_CPU", 4)
    monkeypatch.setattr("noisescale.methods.decentlam.mixing._BLOCK_ON_CPU", 3)

    got = np.stack(on_ranks(5, lambda: on_regressions("exponential", LRS, 0.8)))

    gradients, *_ = regressions(5)
    wanted = decentlam(gradients, np.zeros((5, WIDTH)), [exponential(5)], LRS, 0.8)
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-11)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    def one_rank() -> tuple[float, float, int, list[Tensor], list[Tensor]]:
        net, other = model(), model()
        optimizer, calls = DecentLaM(sgd(net), "ring"), []

        def closure() -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            return backward(net, dist.get_rank(), 0)

        loss = optimizer.step(closure)
        steps(other, DecentLaM(sgd(other), "ring"), last=1)
        wanted = backward(model(), dist.get_rank(), 0)
        return float(loss.detach()), float(wanted.detach()), len(calls), values(net), values(other)

    for loss, wanted, calls, got, plainly in on_ranks(2, one_rank):
        assert (loss, calls) == (wanted, 1)
        assert all(map(torch.equal, got, plainly))


@pytest.mark.filterwarnings("error")
def test_schedules_of_either_optimizer_move_the_learning_rate() -> None:
    def one_rank() -> tuple[list[float], list[Tensor], list[Tensor]]:
        found = []
        for of_inner in (True, False):
            net = model()
            inner = sgd(net)
            optimizer = DecentLaM(inner, "ring")
            schedule = torch.optim.lr_scheduler.StepLR(inner if of_inner else optimizer, 2, 0.5)
            for step in range(4):
                steps(net, optimizer, first=step, last=step + 1)
                schedule.step()
            found.append(values(net))
        return [group["lr"] for group in inner.param_groups], *found

    for lrs, of_inner, of_outer in on_ranks(2, one_rank):
        assert lrs == [0.0125]
        assert all(map(torch.equal, of_inner, of_outer))


def test_after_a_learning_rate_of_zero_training_goes_on() -> None:
    def one_rank() -> list[Tensor]:
        net = model()
        optimizer = DecentLaM(sgd(net), "ring")
        for lr in (0.0, 0.05, 0.0, 0.05):
            optimizer.param_groups[0]["lr"] = lr
            steps(net, optimizer, last=1)
        return values(net)

    for got in on_ranks(3, one_rank):
        assert all(p.isfinite().all() for p in got)
        assert not torch.equal(got[0], model()[0].weight)


@pytest.mark.parametrize("topology", ["one-peer", "exponential"])
def test_resuming_from_each_ranks_state_is_exact(topology: str) -> None:
    def one_rank() -> tuple[list[Tensor], list[Tensor]]:
        net = model()
        optimizer = DecentLaM(sgd(net), topology)
        steps(net, optimizer, last=3)
        state, weights = copy.deepcopy((optimizer.state_dict(), net.state_dict()))
        steps(net, optimizer, first=3, last=6)
        again = model()
        again.load_state_dict(weights)
        resumed = DecentLaM(sgd(again), topology)
        resumed.load_state_dict(state)
        steps(again, resumed, first=3, last=6)
        return values(net), values(again)

    for whole, resumed in on_ranks(4, one_rank):
        assert all(map(torch.equal, whole, resumed))


def test_the_momentum_of_a_plain_optimizer_is_taken_over_and_given_back() -> None:
    net = model()
    plain = sgd(net)
    steps(net, plain, last=3)
    state, weights = copy.deepcopy((plain.state_dict(), net.state_dict()))
    steps(net, plain, first=3, last=5)

    def one_rank() -> tuple[list[Tensor], dict[str, Any]]:
        again = model()
        again.load_state_dict(weights)
        resumed = DecentLaM(sgd(again), "ring")
        resumed.load_state_dict(copy.deepcopy(state))
        for step in range(3, 5):
            resumed.zero_grad()
            backward(again, 0, step)  # the same rows on all ranks
            resumed.step()
        return values(again), resumed.state_dict()

    got, of_ranks = on_ranks(2, one_rank)[0]
    alone = DecentLaM(sgd(again := model()))
    alone.load_state_dict(of_ranks)
    again.load_state_dict(net.state_dict())
    steps(net, plain, first=5, last=6)
    steps(again, alone, first=5, last=6)

    for p, wanted, after in zip(got, values(net), again.parameters(), strict=True):
        torch.testing.assert_close(after, wanted)
        assert not torch.equal(p, wanted)


def test_unfreezing_in_mid_run_takes_the_parameter_in() -> None:
    def one_rank() -> list[Tensor]:
        net = model()
        net[0].weight.requires_grad_(False)
        optimizer = DecentLaM(sgd(net), "ring")
        steps(net, optimizer, last=2)
        net[0].weight.requires_grad_(True)
        steps(net, optimizer, first=2, last=4)
        return values(net)

    first, second = on_ranks(2, one_rank)

    assert not torch.equal(first[0], model()[0].weight)
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(p, q)  # two ranks on a ring are all


def test_the_momentum_of_a_parameter_that_was_frozen_has_the_present_learning_rate() -> None:
    def one_rank() -> list[Tensor]:
        other, paused = (nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = DecentLaM(torch.optim.SGD([other, paused], lr=0.1, momentum=0.9), "ring")
        for lr, slope in ((0.1, 1.0), (0.05, None), (0.01, None), (0.01, 2.0)):
            paused.requires_grad_(slope is not None)
            optimizer.param_groups[0]["lr"] = lr
            other.grad = torch.ones(3)
            paused.grad = None if slope is None else torch.full((3,), slope)
            optimizer.step()
        return [other.detach(), paused.detach()]

    for other, paused in on_ranks(2, one_rank):
        torch.testing.assert_close(
            other, torch.full((3,), -0.1 - 0.05 * 1.9 - 0.01 * 2.71 - 0.01 * 3.439)
        )
        torch.testing.assert_close(paused, torch.full((3,), -0.1 - 0.01 * (0.9 + 2)))


def test_the_mean_is_swapped_in_and_out_and_its_distance_told() -> None:
    def one_rank() -> dict[str, Any]:
        net = model()
        optimizer = DecentLaM(sgd(net), "ring")
        steps(net, optimizer, last=4)
        own = values(net)
        with optimizer.use_mean() as swapped:
            inside = values(net)
            try:
                optimizer.step()
            except RuntimeError as error:
                told = str(error)
        after = values(net)
        optimizer.average_()
        distance = swapped.consensus_distance
        return {
            "own": own,
            "inside": inside,
            "after": after,
            "last": values(net),
            "told": told,
            "distance": distance,
        }

    of_ranks = on_ranks(4, one_rank)

    flat = torch.stack([torch.cat([p.flatten() for p in each["own"]]) for each in of_ranks])
    mean = flat.mean(0)
    distance = ((flat - mean) ** 2).sum(1).mean() / mean.square().sum()
    assert distance > 1e-6
    for each in of_ranks:
        assert all(map(torch.equal, each["after"], each["own"]))
        assert all(map(torch.equal, each["inside"], of_ranks[0]["inside"]))
        assert all(map(torch.equal, each["inside"], each["last"]))
        got = torch.cat([p.flatten() for p in each["inside"]])
        torch.testing.assert_close(got, mean)
        assert each["distance"] == pytest.approx(float(distance), rel=1e-3)
        assert "The mean of the ranks' weights is swapped in" in each["told"]


def test_with_a_loss_scaler_all_ranks_leave_out_a_step_that_one_cannot_take() -> None:
    def one_rank() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        net, plain = model(), model()
        optimizer = DecentLaM(sgd(net), "ring")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
            x = torch.randn(8, FEATURES, generator=generator)
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            if step == 1 and dist.get_rank() == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 0:
                first = values(net)
            if step == 1:
                left_out = values(net)
        other = DecentLaM(sgd(plain), "ring")
        steps(plain, other, last=1)
        steps(plain, other, first=2, last=3)
        return first, left_out, [p - q for p, q in zip(values(net), values(plain), strict=True)]

    for first, left_out, apart in on_ranks(2, one_rank):
        assert all(map(torch.equal, first, left_out))
        assert max(float(p.abs().max()) for p in apart) < 1e-6


def errors_of(make: Callable[[int], Any], ranks: int = 3) -> list[str]:
    """What each rank is told at its construction or its first step."""

    def one_rank() -> str:
        try:
            make(dist.get_rank()).step()
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    return on_ranks(ranks, one_rank)


def test_weights_that_differ_at_the_first_step_are_told_on_all_ranks() -> None:
    def make(rank: int) -> DecentLaM:
        net = model()
        with torch.no_grad():
            net[2].bias += rank == 2
        return DecentLaM(sgd(net))

    for error in errors_of(make):
        assert "The weights must be the same on all ranks at the first step" in error


def test_models_that_differ_are_told_on_all_ranks() -> None:
    for error in errors_of(lambda rank: DecentLaM(sgd(nn.Linear(2 + (rank == 1), 1)))):
        assert "`tensors` must be the same in number, shape and dtype on all ranks" in error


@pytest.mark.parametrize(
    ("name", "option"), [("lr", 0.1), ("momentum", 0.5), ("weight_decay", 0.1)]
)
def test_settings_that_differ_are_told_on_all_ranks(name: str, option: float) -> None:
    for error in errors_of(
        lambda rank: DecentLaM(sgd(model(), **({name: option} if rank == 1 else {})))
    ):
        assert f"`{name}` must be the same on all ranks, got" in error
        assert f"[{option}] on rank 1" in error


def test_topologies_that_differ_are_told_on_all_ranks() -> None:
    third = np.full((3, 3), 1 / 3)

    for error in errors_of(lambda rank: DecentLaM(sgd(model()), "ring" if rank else third)):
        assert "`topology` must be the same on all ranks, got [0.333333 0.333333" in error
        assert '"ring" on rank 1' in error


@pytest.mark.parametrize("on", [{0, 1, 2}, {1}])
def test_a_wrong_matrix_on_any_rank_is_told_on_all(on: set[int]) -> None:
    wrong = np.full((3, 3), 0.3)

    for error in errors_of(lambda rank: DecentLaM(sgd(model()), wrong if rank in on else "ring")):
        assert "`topology` must be doubly stochastic: each row sums to 1, got 0.9 in row 0" in error


def test_another_optimizer_on_one_rank_is_told_on_all() -> None:
    for error in errors_of(
        lambda rank: DecentLaM(
            torch.optim.Adam(model().parameters()) if rank == 2 else sgd(model())
        )
    ):
        assert error.startswith(("TypeError: ", "TypeRefusal: "))
        assert "`optimizer` must be a torch.optim.SGD, got Adam" in error


def test_momentum_that_drives_ranks_apart_is_refused_also_later() -> None:
    shifts = [np.roll(np.eye(8), hop, axis=1) for hop in (0, 1, 2, 4)]
    matrix = np.stack(shifts).mean(0)

    def one_rank() -> list[str]:
        said = []
        net = model()
        optimizer = DecentLaM(sgd(net, momentum=0.0), matrix)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.9
        for attempt in (optimizer.step, lambda: DecentLaM(sgd(net), matrix)):
            try:
                attempt()
            except ValueError as error:
                said.append(str(error))
        return said

    for said in on_ranks(8, one_rank):
        assert len(said) == 2
        for each in said:
            assert "`momentum` must be below 0.5" in each
            assert "The matrix is not symmetric" in each


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nesterov": True}, "`nesterov` must be False, got True"),
        ({"dampening": 0.1}, "`dampening` must be 0, got 0.1"),
        ({"maximize": True}, "`maximize` must be False, got True"),
        ({"momentum": 1.0}, "`momentum` must be at least 0 and below 1, got 1.0"),
    ],
)
def test_options_of_sgd_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecentLaM(sgd(model(), **options))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.LBFGS])
def test_other_optimizers_are_refused_with_a_remedy(make: Any) -> None:
    with pytest.raises(TypeError, match=f"got {make.__name__}.*`torch.optim.SGD"):
        DecentLaM(make(model().parameters()))


def test_a_subclass_of_sgd_is_refused_as_its_step_may_be_another() -> None:
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(TypeError, match=r"must be a torch\.optim\.SGD, got Own"):
        DecentLaM(Own(model().parameters(), lr=0.1))


def test_a_matrix_for_other_ranks_than_the_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="for each of the 1 ranks of the group, got 2 x 2"):
        DecentLaM(sgd(model()), [[0.5, 0.5], [0.5, 0.5]])
