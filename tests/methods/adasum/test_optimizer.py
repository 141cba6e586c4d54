# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_once import Ranks
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
from refused import refused
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
on = {ranks: Ranks(ranks) for ranks in LOCAL_STEPS}
COMBINED = {ranks: on[ranks](combined) for ranks in on}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("ranks", LOCAL_STEPS)
def test_the_changes_of_each_rank_are_combined(name: str, ranks: int) -> None:
    results = [found[name] for found in COMBINED[ranks]()]

    for got in results:
        assert equal(got, results[0])
        wanted = by_hand(ranks, 4, MAKERS[name], LOCAL_STEPS[ranks])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@on[2]
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


@on[2]
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


@on[2]
def refusals() -> dict[str, Any]:
    rank, net = this_rank(), model()
    own = {"steps_done": rank, "start": values(net) if rank else []}
    others = {"steps_done": own, "start": {"steps_done": 1, "start": [torch.ones(2)]}}
    resumed = {name: AdasumOptimizer(sgd(model()), local_steps=3) for name in others}
    for name, optimizer in resumed.items():
        optimizer.load_state_dict(optimizer.state_dict() | {"adasum": others[name]})
    net[0].requires_grad_(False)
    optimizer = AdasumOptimizer(sgd(net))
    steps(net, optimizer, 0, 1)
    net[0].requires_grad_(rank == 0)  # on rank 1 a step later
    return {
        **{name: error_of(other.step) for name, other in resumed.items()},
        "local_steps": error_of(AdasumOptimizer(sgd(model()), local_steps=1 + rank).step),
        "tensors": error_of(lambda: steps(net, optimizer, 1, 2)),
        "group": error_of(AdasumOptimizer(sgd(model()), dist.new_group([0])).step),
    }


def test_ranks_at_different_places_and_states_of_other_parameters_are_told_on_all_ranks() -> None:
    for said in refusals():
        found = {name: (*said[name].arguments, said[name].got) for name in said if name != "group"}
        assert found.pop("start")[0] == "start"
        assert found == {
            "local_steps": ("local_steps", "1 on rank 0 and 2 on rank 1"),
            "steps_done": ("steps_done", "0 on rank 0 and 1 on rank 1"),
            "tensors": ("tensors", "4 on rank 0 and 2 on rank 1"),
        }
    assert refusals()[1]["group"].got == "a group without rank 1"
    with refused("optimizer", error=TypeError, got="Linear"):
        AdasumOptimizer(nn.Linear(1, 1))  # type: ignore[arg-type]
    with refused("local_steps", got="0"):
        AdasumOptimizer(sgd(model()), local_steps=0)
