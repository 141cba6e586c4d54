# SPDX-License-Identifier: Apache-2.0
"""What AdasumOptimizer and DecentLaM have in common."""

import copy
import math
from typing import Any

import pytest
import torch
from forked_once import Ranks
from methods.across_ranks.small_net import (
    adam,
    equal,
    error_of,
    model,
    sgd,
    steps,
    this_rank,
    values,
    with_scaler,
)
from torch import nn

from noisescale import AdasumOptimizer, DecentLaM
from noisescale.methods.across_ranks.alike import check_alike, check_same_values

three = Ranks(3)
WAYS: dict[str, Any] = {
    "adasum": lambda net: AdasumOptimizer(adam(net)),
    "local steps": lambda net: AdasumOptimizer(adam(net), local_steps=3),
    "decentlam": lambda net: DecentLaM(sgd(net), "one-peer"),
    "exponential": lambda net: DecentLaM(sgd(net), "exponential"),
}


@three
def of_ranks() -> dict[str, dict[str, Any]]:
    return {
        name: resumed(make) | frozen(make) | scaled(make) | differing(make)
        for name, make in WAYS.items()
    }


def resumed(make: Any) -> dict[Any, Any]:
    """After step 2, in the middle of a round of three local steps, and after step 3."""
    found = {}
    for saved_after in (2, 3):
        net, again = model(), model()
        optimizer = make(net)
        steps(net, optimizer, 0, saved_after)
        state, weights = copy.deepcopy((optimizer.state_dict(), net.state_dict()))
        steps(net, optimizer, saved_after, 6)
        again.load_state_dict(weights)
        other = make(again)
        other.load_state_dict(state)
        loaded = copy.deepcopy(other.state_dict())
        steps(again, other, saved_after, 6)
        starts = [each.get("adasum", {}).get("start", []) for each in (state, loaded)]
        found["resumed", saved_after] = (values(net), values(again), *starts)
    return found


def frozen(make: Any) -> dict[str, Any]:
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = make(net)
    steps(net, optimizer, 0, 3)
    first = values(net)
    net[0].weight.requires_grad_(True)
    steps(net, optimizer, 3, 6)
    return {"frozen": first, "thawed": values(net)}


def scaled(make: Any) -> dict[Any, Any]:
    """With a scaler that unscales by itself, or not; and without a step that is left out."""
    found: dict[Any, Any] = {}
    for unscale in (False, True):
        net = model()
        found["scaled", unscale] = with_scaler(make(net), net, unscale=unscale)
    plain = model()
    optimizer = make(plain)
    steps(plain, optimizer, 0, 1)
    steps(plain, optimizer, 2, 3)
    return found | {"plain": values(plain)}


def differing(make: Any) -> dict[str, Any]:
    moved = model()
    with torch.no_grad():
        moved[2].bias += this_rank() == 2
    other = nn.Linear(2 + (this_rank() == 1), 1)
    return {"moved": error_of(make(moved).step), "other": error_of(make(other).step)}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("saved_after", [2, 3])
def test_resuming_from_each_ranks_state_is_exact(way: str, saved_after: int) -> None:
    for found in of_ranks():
        whole, again, saved, loaded = found[way]["resumed", saved_after]
        assert equal(whole, again)
        assert len(saved) == len(loaded) == (4 if (way, saved_after) == ("local steps", 2) else 0)
        assert equal(saved, loaded)


def test_a_frozen_parameter_stays_until_it_is_trained(way: str) -> None:
    first, second, _ = (found[way] for found in of_ranks())

    assert torch.equal(first["frozen"][0], model()[0].weight)
    assert not torch.equal(first["thawed"][0], model()[0].weight)
    if way != "decentlam":  # else ranks have weights of their own
        torch.testing.assert_close(first["thawed"], second["thawed"])


@pytest.mark.parametrize("unscale", [False, True])
def test_with_a_loss_scaler_all_ranks_leave_out_a_step_that_one_cannot_take(
    way: str, unscale: bool
) -> None:
    for found in of_ranks():
        first, left_out, last = found[way]["scaled", unscale]
        assert equal(first, left_out)
        torch.testing.assert_close(last, found[way]["plain"], rtol=1e-5, atol=1e-6)


def test_weights_and_models_that_differ_are_told_on_all_ranks(way: str) -> None:
    for found in of_ranks():
        moved, other = found[way]["moved"], found[way]["other"]
        assert "parameter 3 (shape (1,)) on rank 2 than on rank 0" in str(moved)
        assert (other.arguments, other.got) == (("tensors",), "2 on rank 0 and 2 on rank 1")
        assert "(1, 2) and dtype torch.float32 on rank 0, and shape (1, 3)" in other.remedy


@pytest.mark.parametrize("name", ["adasum", "decentlam"])
def test_one_process_trains_bit_by_bit_as_the_inner_optimizer(name: str) -> None:
    net, plain = model(), model()
    optimizer = WAYS[name](net)

    steps(net, optimizer, 0, 3)
    steps(plain, adam(plain) if name == "adasum" else sgd(plain), 0, 3)

    assert equal(values(net), values(plain))


@three
def compared() -> list[Any]:
    rank = this_rank()
    finite = torch.randn(300, 301, generator=torch.Generator().manual_seed(0))
    moved = finite.t().contiguous().t() if rank else finite  # other memory, the same bits
    tensors = [torch.tensor([math.nan, 1.0]), torch.ones(2, dtype=torch.complex64)]
    tensors += [moved, moved.half(), moved.double()]
    check_alike(tensors, [None])
    check_same_values(tensors, [None])
    check_same_values([], [None])
    same_sum = torch.tensor([3.0, -3.0] if rank else [1.0, -1.0])
    mixed = torch.arange(4.0).flip(0) if rank else torch.arange(4.0)
    others = [[torch.ones(1), same_sum], [mixed]]
    return [error_of(lambda other=other: check_same_values(other, [None])) for other in others]


def test_the_same_bits_pass_and_neither_another_sum_nor_another_order_does() -> None:
    for same_sum, mixed in compared():
        assert "parameter 1 (shape (2,)) on rank 1 than on rank 0" in str(same_sum)
        assert "parameter 0 (shape (4,)) on rank 1 than on rank 0" in str(mixed)
