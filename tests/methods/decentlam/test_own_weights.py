# SPDX-License-Identifier: Apache-2.0
"""The mean of the ranks' weights, of models of which a part is or was frozen."""

from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, _dynamo, nn

from noisescale import DecentLaM

_ = _dynamo  # Optimizers import it: here once, and not in each rank.


LINE = [[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]


def frozen_and_trained() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    frozen, trained = nn.Parameter(torch.randn(500)), nn.Parameter(torch.randn(500))
    return frozen.requires_grad_(False), trained


def optimizer_of(*parameters: nn.Parameter, topology: Any = "ring") -> DecentLaM:
    return DecentLaM(torch.optim.SGD(parameters, lr=0.1), topology)


def step(optimizer: DecentLaM, trained: nn.Parameter) -> None:
    trained.grad = torch.full((500,), 1.0 + dist.get_rank())
    optimizer.step()


def test_frozen_weights_stay_as_they_are_to_the_last_bit_on_three_ranks() -> None:
    def one_rank() -> tuple[list[Tensor], float]:
        frozen, trained = frozen_and_trained()
        optimizer = optimizer_of(frozen, trained, topology=LINE)
        step(optimizer, trained)
        own = trained.detach().clone()
        with optimizer.use_mean():
            inside, kept = frozen.detach().clone(), optimizer.own_weights
        distance = optimizer.consensus_distance()
        optimizer.average_()
        return [inside, frozen.detach(), own, kept[1], trained.detach()], distance

    of_ranks = on_ranks(3, one_rank)

    frozen, _ = frozen_and_trained()
    own = torch.stack([tensors[2] for tensors, _ in of_ranks])
    wanted = (own - own.mean(0)).square().sum(1).mean() / own.mean(0).square().sum()
    for (inside, last, mine, kept, mean), distance in of_ranks:
        assert torch.equal(inside, frozen)
        assert torch.equal(last, frozen)
        assert torch.equal(mine, kept)
        torch.testing.assert_close(mean, own.mean(0))
        torch.testing.assert_close(distance, float(wanted), rtol=1e-3, atol=0.0)
    assert wanted > 1e-4


def test_weights_that_were_frozen_in_mid_run_are_averaged() -> None:
    def one_rank() -> list[Tensor]:
        _, trained = frozen_and_trained()
        optimizer = optimizer_of(trained)
        step(optimizer, trained)
        own = trained.detach().clone()
        trained.requires_grad_(False)
        optimizer.average_()
        return [own, trained.detach()]

    of_ranks = on_ranks(4, one_rank)

    mean = torch.stack([own for own, _ in of_ranks]).mean(0)
    for own, averaged in of_ranks:
        assert not torch.allclose(own, mean)
        torch.testing.assert_close(averaged, mean)


def test_a_model_that_is_all_frozen_has_no_distance() -> None:
    def one_rank() -> float:
        frozen, _ = frozen_and_trained()
        return optimizer_of(frozen).consensus_distance()

    assert on_ranks(2, one_rank) == [0.0, 0.0]
