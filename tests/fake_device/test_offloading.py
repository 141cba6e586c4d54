# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with gradients that are copied to pinned memory of the CPU while the host goes on."""

import warnings
from collections import Counter

import devices
import torch
import torch._dynamo  # which FSDP2 imports, here once and not in every fork
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from ways_of_capture import Net, batch, half_squares

from fake_device.transfers import TO_HOST, TO_HOST_LATER, Transfers
from noisescale import NoiseScaleMeter

STEPS = 6


def copies_to_host(*, measured: bool) -> list[tuple[bool, Counter[str], int]]:
    """Of each step: whether it is measured, its copies, and the hooks on parameters after it.

    A branch is left out: which parameters have gradients is known where they have been written.
    """
    rank = dist.get_rank()
    device = devices.of_rank(rank)
    mesh, policy = init_device_mesh("fake", (2,)), CPUOffloadPolicy(pin_memory=True)
    model = fully_shard(Net().to(device), mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = {"vectors": "bias|norm"}
    meter = NoiseScaleMeter(model, every_n_steps=3, groups=groups) if measured else None
    found = []
    for step in range(STEPS):
        due = meter is not None and meter.due
        x, y = (part.to(device) for part in batch(step, rank, 0, 4))
        with Transfers() as transfers:
            loss = half_squares(model(x, branch=False), y)
            if meter is not None:
                meter.before_backward(loss, 4)
            loss.backward()
        if meter is not None:
            meter.step()
        optimizer.step()
        optimizer.zero_grad()
        hooks = sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())
        found.append((due, transfers.kinds(), hooks))
    if meter is not None:
        assert meter.noise_scale.steps > 0
    return found


def test_unmeasured_steps_copy_gradients_as_without_measuring() -> None:
    """While a parameter has a hook, FSDP has the host wait for the copy of its gradient."""

    def both() -> list[list[tuple[bool, Counter[str], int]]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [copies_to_host(measured=measured) for measured in (False, True)]

    with_gradient = 6  # all but that of the branch and what is frozen
    for plain, measured in on_ranks(2, both):
        assert {kinds[TO_HOST_LATER] for _, kinds, _ in plain} == {with_gradient}
        assert {kinds[TO_HOST] for _, kinds, _ in plain} == {0}
        assert [due for due, _, _ in measured].count(False) == STEPS - 2
        for (due, copies, hooks), (_, without, _) in zip(measured, plain, strict=True):
            assert hooks == 0
            assert due or copies == without
