# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from methods.across_ranks.small_net import (
    adam,
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
from methods.adasum.oracle_of_adasum import expected
from methods.together import on
from ranks import on_ranks
from refused import refused
from tiers import slow
from torch import Tensor, nn

from noisescale import AdasumOptimizer


def by_hand(
    ranks: int, count: int, make: Callable[[nn.Module], Any], local_steps: int = 1
) -> list[Tensor]:
    """The weights after some steps, all ranks in one process, by the oracle."""
    nets = [model() for _ in range(ranks)]
    optimizers = [make(net) for net in nets]
    for step in range(count):
        if step % local_steps == 0:
            start = values(nets[0])
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            steps(net, optimizer, step, step + 1, rank)
        if step % local_steps == local_steps - 1:
            same = zip(*(net.parameters() for net in nets), strict=True)
            for before, parameters in zip(start, same, strict=True):
                changes = [(p.detach() - before).double().numpy() for p in parameters]
                combined = before + torch.from_numpy(np.asarray(expected(changes))).float()
                for p in parameters:
                    p.data.copy_(combined)
    return values(nets[0])


def trained(count: int, make: Callable[[nn.Module], Any], **options: Any) -> list[Tensor]:
    net = model()
    steps(net, AdasumOptimizer(make(net), **options), 0, count)
    return values(net)


MAKERS = {"sgd": sgd, "adam": adam}


def combined() -> dict[str, list[Tensor]]:
    local_steps = LOCAL_STEPS[dist.get_world_size()]
    return {name: trained(4, make, local_steps=local_steps) for name, make in MAKERS.items()}


LOCAL_STEPS = {2: 1, 3: 1, 4: 2}
COMBINED = {ranks: on(ranks)(combined) for ranks in LOCAL_STEPS}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ranks", LOCAL_STEPS)
def test_the_changes_of_each_rank_are_combined(name: str, ranks: int) -> None:
    results = [found[name] for found in COMBINED[ranks]()]

    for got in results:
        assert equal(got, results[0])
        wanted = by_hand(ranks, 4, MAKERS[name], LOCAL_STEPS[ranks])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@on(2)
def without_a_gradient() -> tuple[list[Tensor], int]:
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = AdasumOptimizer(sgd(net))
    net[2](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return values(net), len(optimizer.statistics[0])


def test_a_parameter_without_a_gradient_stays_and_a_frozen_one_is_not_combined() -> None:
    after, combined = without_a_gradient()[0]

    assert [*map(torch.equal, after, values(model()))] == [True, True, False, False]
    assert combined == 3


def test_schedules_of_either_optimizer_and_hooks_and_groups() -> None:
    net = model()
    inner = torch.optim.SGD(net[0].parameters(), lr=1.0)
    optimizer = AdasumOptimizer(inner)
    torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.add_param_group({"params": net[2].parameters(), "lr": 3.0})
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    loss_of(net, 0).backward()

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
    groups = [dict(inner.param_groups[0])]
    optimizer.param_groups, optimizer.state = groups, {}  # as Lightning's BaseFinetuning does
    assert inner.param_groups is groups
    assert inner.state == {}


@on(2)
def by_a_closure() -> tuple[float, list[Tensor]]:
    net = model()
    optimizer = AdasumOptimizer(torch.optim.LBFGS(net.parameters(), max_iter=3))
    return float(optimizer.step(closure_of(optimizer, net)).detach()), values(net)


def test_a_closure_is_handed_on() -> None:
    (first, of_first), (second, of_second) = by_a_closure()

    assert first != second
    assert equal(of_first, of_second)


def test_the_state_of_a_plain_optimizer_can_be_loaded_and_the_other_way_round() -> None:
    net = model()
    plain = adam(net)
    steps(net, plain, 0, 1)
    optimizer = AdasumOptimizer(adam(model()))

    optimizer.load_state_dict(plain.state_dict())
    adam(model()).load_state_dict(optimizer.state_dict())

    assert optimizer.steps_done == 0
    assert optimizer.state_dict()["state"][0]["step"] == 1


@on(3)
def refusals_of_three() -> dict[str, Any]:
    rank = this_rank()
    resumed = AdasumOptimizer(sgd(model()), local_steps=3)
    own = {"steps_done": min(rank, 1), "start": values(model()) if rank else []}
    resumed.load_state_dict(resumed.state_dict() | {"adasum": own})
    other = AdasumOptimizer(sgd(model()), local_steps=1 + rank)
    return {"local_steps": error_of(other.step), "steps_done": error_of(resumed.step)}


def test_ranks_at_different_places_of_a_round_are_told_so() -> None:
    for said in refusals_of_three():
        for name, got in (("local_steps", "1 and 3"), ("steps_done", "0 and 1")):
            assert (said[name].arguments, said[name].got) == ((name,), got)


@on(2)
def refusals_of_two() -> dict[str, Any]:
    rank, net = this_rank(), model()
    other = AdasumOptimizer(sgd(model()), local_steps=2)
    own = {"steps_done": 1, "start": [torch.ones(2)]}
    other.load_state_dict(other.state_dict() | {"adasum": own})
    net[0].requires_grad_(False)
    optimizer = AdasumOptimizer(sgd(net))
    steps(net, optimizer, 0, 1)
    net[0].requires_grad_(rank == 0)  # on rank 1 a step later
    outside = AdasumOptimizer(sgd(model()), dist.new_group([0]))
    return {
        "start": error_of(other.step),
        "unfrozen": error_of(lambda: steps(net, optimizer, 1, 2)),
        "outside": error_of(outside.step),
    }


def test_a_state_of_other_parameters_and_unfreezing_at_different_steps_are_refused() -> None:
    for said in refusals_of_two():
        assert said["start"].arguments == ("start",)
        assert said["unfrozen"].arguments == ("tensors",)
        assert said["unfrozen"].got == "4 on rank 0 and 2 on rank 1"


def test_a_process_outside_the_group_is_told_so() -> None:
    assert refusals_of_two()[1]["outside"].got == "a group without rank 1"


def test_wrong_arguments() -> None:
    with refused("optimizer", error=TypeError, got="Linear"):
        AdasumOptimizer(nn.Linear(1, 1))  # type: ignore[arg-type]
    with refused("local_steps", got="0"):
        AdasumOptimizer(sgd(model()), local_steps=0)


@pytest.mark.parametrize("power", [2, slow(3)])
def test_polynomials_are_fitted_in_fewer_steps_than_by_averaging(power: int) -> None:
    """Horovod's demonstration, in its spirit: y = x**power from rows of 1, x, x², ..., with SGD."""

    def count(adasum: bool) -> int:
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

    by_adasum, by_mean = on_ranks(2, lambda: (count(True), count(False)))[0]

    assert by_adasum < 0.9 * by_mean
    assert by_mean < 1000
