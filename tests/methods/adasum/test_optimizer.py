# SPDX-License-Identifier: Apache-2.0
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from methods.adasum.oracle_of_adasum import expected
from ranks import on_ranks
from torch import Tensor, nn

from noisescale import AdasumOptimizer

FEATURES = 5


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, FEATURES, generator=generator)
    return x, x.sum(1, keepdim=True)


def backward(net: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    loss = (net(x) - y).square().mean()
    loss.backward()
    return loss


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def by_hand(
    ranks: int, steps: int, make: Callable[[nn.Module], Any], local_steps: int = 1
) -> list[Tensor]:
    """The weights after some steps, all ranks in one process, by the oracle."""
    nets = [model() for _ in range(ranks)]
    optimizers = [make(net) for net in nets]
    for step in range(steps):
        if step % local_steps == 0:
            start = [p.detach().clone() for p in nets[0].parameters()]
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            backward(net, rank, step)
            optimizer.step()
        if step % local_steps == local_steps - 1:
            same = zip(*(net.parameters() for net in nets), strict=True)
            for before, parameters in zip(start, same, strict=True):
                changes = [(p.detach() - before).double().numpy() for p in parameters]
                combined = before + torch.from_numpy(np.asarray(expected(changes))).float()
                for p in parameters:
                    p.data.copy_(combined)
    return [p.detach() for p in nets[0].parameters()]


def trained(steps: int, make: Callable[[nn.Module], Any], **options: Any) -> list[Tensor]:
    net = model()
    optimizer = AdasumOptimizer(make(net), **options)
    for step in range(steps):
        optimizer.zero_grad()
        backward(net, dist.get_rank(), step)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(("ranks", "local_steps"), [(2, 1), (3, 1), (4, 2)])
def test_the_changes_of_each_rank_are_combined(
    make: Callable[[nn.Module], Any], ranks: int, local_steps: int
) -> None:
    results = on_ranks(ranks, lambda: trained(4, make, local_steps=local_steps))

    for got in results:
        assert all(map(torch.equal, got, results[0]))
        for p, wanted in zip(got, by_hand(ranks, 4, make, local_steps), strict=True):
            torch.testing.assert_close(p, wanted, rtol=1e-4, atol=1e-6)


def test_between_two_reductions_ranks_have_weights_of_their_own() -> None:
    first, second = on_ranks(2, lambda: trained(3, sgd, local_steps=2))

    assert not torch.equal(first[0], second[0])


def test_with_sgd_a_step_is_that_of_adasum_of_the_gradients() -> None:
    def one_rank() -> list[Tensor]:
        return trained(1, lambda net: torch.optim.SGD(net.parameters(), lr=0.1))

    got = on_ranks(2, one_rank)[0]

    nets = [model(), model()]
    for rank, net in enumerate(nets):
        backward(net, rank, 0)
    for p, *both in zip(got, *(net.parameters() for net in nets), strict=True):
        gradient = expected([q.grad.double().numpy() for q in both])
        wanted = both[0].detach() - 0.1 * torch.from_numpy(np.asarray(gradient)).float()
        torch.testing.assert_close(p, wanted)


def test_one_process_trains_bit_by_bit_as_the_inner_optimizer() -> None:
    net = model()
    optimizer = AdasumOptimizer(adam(net))
    plain = model()
    inner = adam(plain)
    for step in range(3):
        for each, steps in ((net, optimizer), (plain, inner)):
            steps.zero_grad()
            backward(each, 0, step)
            steps.step()

    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert optimizer.statistics is None


def test_a_frozen_parameter_and_one_without_a_gradient_stay() -> None:
    def one_rank() -> list[Tensor]:
        net = model()
        net[0].weight.requires_grad_(False)
        optimizer = AdasumOptimizer(sgd(net))
        net[2](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return [*(p.detach() for p in net.parameters()), optimizer.statistics[0]]

    got = on_ranks(2, one_rank)[0]

    before = list(model().parameters())
    assert torch.equal(got[0], before[0])
    assert torch.equal(got[1], before[1])
    assert not torch.equal(got[2], before[2])
    assert len(got[-1]) == 3  # three parameters are combined


def test_unfreezing_in_mid_run_takes_the_parameter_in() -> None:
    def one_rank() -> list[Tensor]:
        net = model()
        net[0].weight.requires_grad_(False)
        optimizer = AdasumOptimizer(sgd(net))
        for step in range(3):
            net[0].weight.requires_grad_(step > 0)
            optimizer.zero_grad()
            backward(net, dist.get_rank(), step)
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    first, second = on_ranks(2, one_rank)

    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], next(model().parameters()))


def test_schedules_of_either_optimizer_and_hooks_and_groups() -> None:
    net = model()
    inner = torch.optim.SGD(net[0].parameters(), lr=1.0)
    optimizer = AdasumOptimizer(inner)
    torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 3.0})
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    backward(net, 0, 0)

    optimizer.step()
    schedule.step()

    assert [group["lr"] for group in inner.param_groups] == [0.5, 1.5]
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert called == ["after"]
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    assert repr(optimizer).startswith("AdasumOptimizer(SGD (")


def test_a_closure_is_handed_on() -> None:
    def one_rank() -> tuple[float, list[Tensor]]:
        net = model()
        optimizer = AdasumOptimizer(torch.optim.LBFGS(net.parameters(), max_iter=3))

        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward(net, dist.get_rank(), 0)

        loss = optimizer.step(closure)
        return float(loss.detach()), [p.detach() for p in net.parameters()]

    (first, of_first), (second, of_second) = on_ranks(2, one_rank)

    assert first != second
    assert all(map(torch.equal, of_first, of_second))


@pytest.mark.parametrize("saved_after", [2, 3])  # in the middle of a round, and at its end
def test_resuming_from_each_ranks_state_is_exact(saved_after: int) -> None:
    def one_rank() -> tuple[list[Tensor], list[Tensor]]:
        net = model()
        optimizer = AdasumOptimizer(adam(net), local_steps=3)
        for step in range(6):
            if step == saved_after:
                state, weights = copy.deepcopy((optimizer.state_dict(), net.state_dict()))
            optimizer.zero_grad()
            backward(net, dist.get_rank(), step)
            optimizer.step()
        again = model()
        again.load_state_dict(weights)
        resumed = AdasumOptimizer(adam(again), local_steps=3)
        resumed.load_state_dict(state)
        assert torch.equal(
            torch.cat(
                [x.flatten() for x in resumed.state_dict()["adasum"]["start"]] or [torch.ones(1)]
            ),
            torch.cat([x.flatten() for x in state["adasum"]["start"]] or [torch.ones(1)]),
        )
        for step in range(saved_after, 6):
            resumed.zero_grad()
            backward(again, dist.get_rank(), step)
            resumed.step()
        return [p.detach() for p in net.parameters()], [p.detach() for p in again.parameters()]

    for whole, resumed in on_ranks(2, one_rank):
        assert all(map(torch.equal, whole, resumed))


def test_the_state_of_a_plain_optimizer_can_be_loaded_and_the_other_way_round() -> None:
    net = model()
    plain = adam(net)
    backward(net, 0, 0)
    plain.step()
    optimizer = AdasumOptimizer(adam(model()))

    optimizer.load_state_dict(plain.state_dict())
    adam(model()).load_state_dict(optimizer.state_dict())

    assert optimizer.steps_done == 0
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_a_state_of_other_parameters_is_refused() -> None:
    def one_rank() -> str:
        optimizer = AdasumOptimizer(sgd(model()), local_steps=2)
        state = optimizer.state_dict() | {"adasum": {"steps_done": 1, "start": [torch.ones(2)]}}
        optimizer.load_state_dict(state)
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return "none"

    assert all("`start` must have the shapes" in each for each in on_ranks(2, one_rank))


@pytest.mark.parametrize("unscaled", [False, True])
def test_with_a_loss_scaler_all_ranks_leave_out_a_step_that_one_cannot_take(unscaled: bool) -> None:
    def one_rank() -> list[list[Tensor]]:
        net = model()
        optimizer = AdasumOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(dist.get_rank(), step)
            loss = (net(x) - y).square().mean()
            if step == 1 and dist.get_rank() == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            found.append([p.detach().clone() for p in net.parameters()])
        return found

    def plainly() -> list[list[Tensor]]:
        net = model()
        optimizer = AdasumOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        found = []
        for step in (0, 2):
            optimizer.zero_grad()
            backward(net, dist.get_rank(), step)
            optimizer.step()
            found.append([p.detach().clone() for p in net.parameters()])
        return found

    scaled, plain = on_ranks(2, one_rank), on_ranks(2, plainly)
    for after in range(3):
        assert all(map(torch.equal, scaled[0][after], scaled[1][after]))
    assert all(map(torch.equal, scaled[0][0], scaled[0][1]))
    for got, wanted in zip(scaled[0][2], plain[0][1], strict=True):
        torch.testing.assert_close(got, wanted)


def errors_of(make: Callable[[int], AdasumOptimizer]) -> list[str]:
    def one_rank() -> str:
        try:
            make(dist.get_rank()).step()
        except ValueError as error:
            return str(error)
        return "none"

    return on_ranks(3, one_rank)


def test_weights_that_differ_at_the_first_step_are_told_on_all_ranks() -> None:
    def make(rank: int) -> AdasumOptimizer:
        net = model()
        with torch.no_grad():
            net[2].bias += rank == 2
        return AdasumOptimizer(sgd(net))

    for error in errors_of(make):
        assert "The weights must be the same on all ranks at the first step" in error
        assert "parameter 3 (shape (1,)) on rank 2 than on rank 0" in error
        assert "torch.distributed.broadcast(p.data, 0)" in error


def test_parameters_of_other_shapes_are_told_on_all_ranks() -> None:
    def make(rank: int) -> AdasumOptimizer:
        return AdasumOptimizer(sgd(nn.Linear(2 + (rank == 1), 1)))

    for error in errors_of(make):
        assert (
            "Tensor 0 has shape (1, 2) and dtype torch.float32 on rank 0, and shape (1, 3)" in error
        )


def test_ranks_that_unfreeze_at_different_steps_are_told_so_instead_of_hanging() -> None:
    def one_rank() -> str:
        net = model()
        net[0].requires_grad_(False)
        optimizer = AdasumOptimizer(sgd(net))
        for step in range(3):
            if step == 1 + dist.get_rank():
                net[0].requires_grad_(True)
            optimizer.zero_grad()
            backward(net, dist.get_rank(), step)
            try:
                optimizer.step()
            except ValueError as error:
                return f"{step}: {error}"
        return "none"

    for error in on_ranks(2, one_rank):
        assert error.startswith("1: `tensors` must be the same in number, shape and dtype")
        assert "got 4 on rank 0 and 2 on rank 1" in error


def test_ranks_at_different_places_of_a_round_are_told_so() -> None:
    def local_steps(rank: int) -> AdasumOptimizer:
        return AdasumOptimizer(sgd(model()), local_steps=1 + rank)

    def resumed(rank: int) -> AdasumOptimizer:
        optimizer = AdasumOptimizer(sgd(model()), local_steps=3)
        start = [p.detach().clone() for p in optimizer.trained_parameters]
        own = {"steps_done": min(rank, 1), "start": start if rank else []}
        optimizer.load_state_dict(optimizer.state_dict() | {"adasum": own})
        return optimizer

    for error in errors_of(local_steps):
        assert "`local_steps` must be the same on all ranks, got 1 and 3" in error
    for error in errors_of(resumed):
        assert "`steps_done` must be the same on all ranks, got 0 and 1" in error


def test_a_process_outside_the_group_is_told_so() -> None:
    def one_rank() -> str:
        optimizer = AdasumOptimizer(sgd(model()), dist.new_group([0]))
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return "none"

    assert "a group without rank 1" in on_ranks(2, one_rank)[1]


def test_groups_and_state_that_others_set_are_those_of_the_inner_optimizer() -> None:
    inner = sgd(model())
    optimizer = AdasumOptimizer(inner)
    groups = [dict(inner.param_groups[0])]

    optimizer.param_groups, optimizer.state = groups, {}  # as Lightning's BaseFinetuning does

    assert inner.param_groups is groups
    assert inner.state == {}


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="`optimizer` must be a torch optimizer, got Linear"):
        AdasumOptimizer(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`local_steps` must be a positive whole number, got 0"):
        AdasumOptimizer(sgd(model()), local_steps=0)


@pytest.mark.parametrize("power", [2, 3])
def test_polynomials_are_fitted_in_fewer_steps_than_by_averaging(power: int) -> None:
    """Horovod's demonstration, in its spirit: y = x**power from rows of 1, x, x², ..., with SGD."""

    def steps(adasum: bool) -> int:
        generator = torch.Generator().manual_seed(dist.get_rank())
        weights = torch.zeros(power + 1, requires_grad=True)
        inner = torch.optim.SGD([weights], lr=0.3)
        optimizer = AdasumOptimizer(inner) if adasum else inner
        wanted = torch.zeros(power + 1)
        wanted[power] = 1
        for step in range(1, 1000):
            x = torch.rand(8, 1, generator=generator) * 2 - 1
            rows = x ** torch.arange(power + 1)
            optimizer.zero_grad()
            (rows @ (weights - wanted)).square().mean().backward()
            if not adasum:
                dist.all_reduce(weights.grad)
                weights.grad /= dist.get_world_size()
            optimizer.step()
            if (weights.detach() - wanted).norm() < 0.1:
                return step
        return 1000

    by_adasum, by_mean = on_ranks(2, lambda: (steps(True), steps(False)))[0]

    assert by_adasum < 0.9 * by_mean
    assert by_mean < 1000
