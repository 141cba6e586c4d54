# SPDX-License-Identifier: Apache-2.0
"""The mean of the ranks' weights, also of models of which a part is or was frozen."""

from typing import Any

import pytest
import torch
from methods.across_ranks.small_net import equal, error_of, model, sgd, steps, values
from methods.together import on
from torch import Tensor

from noisescale import DecentLaM

LINE = [[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]


@on(3)
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


@on(3)
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
