# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with gradients that are copied to pinned memory of the CPU while the host goes on."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from fake_device.transfers import TO_HOST, TO_HOST_LATER
from fake_device.ways import GROUPS, Way, counted, network, sharded


def with_an_unused_parameter() -> nn.Module:
    """Which parameters have gradients is known where they have been written."""
    model: Any = network()
    model[0].unused = nn.Parameter(torch.ones(3))
    return model  # type: ignore[no-any-return]


def test_unmeasured_steps_copy_gradients_as_without_measuring() -> None:
    """While a parameter has a hook, FSDP has the host wait for the copy of its gradient."""
    offloaded = partial(sharded, offload_policy=CPUOffloadPolicy())
    way = Way(options=lambda _: GROUPS, model=with_an_unused_parameter, wrapped=offloaded)

    (without, *others), measured = (counted(way, measured=it) for it in (False, True))

    assert (without.kinds[TO_HOST_LATER], without.kinds[TO_HOST]) == (8, 0)  # of the used ones
    as_without = [step.phase for step in measured if step.kinds == without.kinds]
    assert as_without == ["unmeasured"] * 20
    assert all(step.kinds == without.kinds for step in others)
