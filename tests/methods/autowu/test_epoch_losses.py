# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from refused import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from noisescale.methods.autowu.epoch_losses import EpochLosses


def test_micro_batches_of_a_step_are_averaged_as_they_were_and_an_empty_step_is_nan() -> None:
    losses = EpochLosses()
    for step in ([1.0], [2.0, 6.0], [], [5.0]):
        for value in step:
            losses.observe(loss := torch.tensor(value))
            loss.fill_(7.0)
        losses.end_step()

    np.testing.assert_array_equal(losses.end_epoch(), [1, 4, math.nan, 5])


def test_the_host_reads_no_loss_before_the_epoch_ends() -> None:
    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    losses = EpochLosses()
    observed = [torch.tensor(float(i), requires_grad=True) for i in range(4)]

    with Reads() as reads:
        for loss in observed:
            losses.observe(loss)
            losses.end_step()

    assert reads.count == 0
    assert losses.end_epoch().tolist() == [0, 1, 2, 3]


def test_ranks_average_their_losses_by_one_all_reduce_an_epoch_and_groups_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_one() -> tuple[Tensor, int, Tensor]:
        calls: list[int] = []
        all_reduce = dist.all_reduce

        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            return all_reduce(*arguments, **options)

        monkeypatch.setattr(dist, "all_reduce", counted)
        losses = EpochLosses()
        for step in range(5):
            losses.observe(torch.tensor(float(10 * dist.get_rank() + step)))
            losses.end_step()
        of_all, count = losses.end_epoch(), len(calls)
        alone = EpochLosses([dist.new_group([rank]) for rank in range(2)][dist.get_rank()])
        alone.observe(torch.tensor(float(dist.get_rank())))
        alone.end_step()
        return of_all, count, alone.end_epoch()

    for rank, (losses, calls, of_group) in enumerate(on_ranks(2, on_one)):
        assert losses.tolist() == [5, 6, 7, 8, 9]
        assert calls == 1
        assert of_group.tolist() == [rank]


def test_the_state_carries_an_epoch_under_way() -> None:
    losses, resumed = EpochLosses(), EpochLosses()
    losses.observe(1.5)
    losses.end_step()
    losses.observe(2.0)

    resumed.load_state_dict(losses.state_dict())
    for one in (losses, resumed):
        one.observe(4.0)
        one.end_step()

    assert resumed.end_epoch().tolist() == losses.end_epoch().tolist() == [1.5, 3.0]


def test_only_the_first_epoch_must_have_a_loss() -> None:
    losses, never = EpochLosses(), EpochLosses()
    losses.observe(1.5)
    losses.end_step()
    losses.end_epoch()
    for each in (losses, never):
        each.end_step()

    assert losses.end_epoch().isnan().tolist() == [True]
    with pytest.raises(RuntimeError, match=r"`observe` .* 1 steps"):
        never.end_epoch()
    with refused("loss", got="shape (8,)"):  # one that was not reduced
        never.observe(torch.zeros(8))
