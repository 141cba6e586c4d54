# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks on hardware: `make test-gpu`; with one GPU `--share-device nccl` too.

DeepSpeed's are skipped where it is not installed.
"""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from ranks import as_torchrun, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

STEPS, SETTLED = 24, 16
"""By the sixteenth step nothing is looked at for the first time."""

Kind = torch.dtype
FULL = torch.float32
Figure = Callable[[str, float], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(64, 8))


def half_precision(kind: Kind) -> dict[str, Kind]:
    return {} if kind == FULL else {"param_dtype": kind, "reduce_dtype": torch.float32}


def ddp(net: nn.Module, kind: Kind) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp1(net: nn.Module, kind: Kind) -> nn.Module:
    options: dict[str, Any] = {"device_id": devices.of_rank(dist.get_rank())}
    options |= {"use_orig_params": True, "mixed_precision": MixedPrecision(**half_precision(kind))}
    for name, child in list(net.named_children()):
        setattr(net, name, FullyShardedDataParallel(child, **options))
    return FullyShardedDataParallel(net, **options)


def fsdp2(net: nn.Module, kind: Kind) -> nn.Module:
    mesh = init_device_mesh(devices.name, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(**half_precision(kind))
    for part in (*net.children(), net):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return net


def zero(net: nn.Module, kind: Kind, *, stage: int) -> Any:
    from deepspeed_engines import engine_of

    options = {"zero": {"overlap_comm": True}, "bf16": {"enabled": kind is torch.bfloat16}}
    # DeepSpeed clips to 1 unless it is told otherwise.
    return engine_of(net, stage, lr=LEARNING_RATE, gradient_clipping=0.0, **options)


LEARNING_RATE = 0.01
ENGINES: dict[str, Callable[[nn.Module, Kind], Any]] = {
    "DDP": ddp,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    **{f"ZeRO {stage}": partial(zero, stage=stage) for stage in (1, 2, 3)},
}


@contextmanager
def waits() -> Iterator[list[Any]]:
    """Warnings of where the host waits for the device."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
            seen[:] = [each for each in seen if "synchronizing" in str(each.message)]


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    x, y = torch.randn(12, 64, generator=generator), torch.randn(12, 8, generator=generator)
    return x.to(device), y.to(device)


def trained(engine: str, kind: Kind, every_n_steps: int | None) -> tuple[list[float], int]:
    """Train on a rank, with a meter or without: noise and signal, and how often the host waited."""
    device = devices.of_rank(dist.get_rank())
    model = ENGINES[engine](network().to(device), kind)
    zero = engine.startswith("ZeRO")
    optimizer = None if zero else torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    meter = None
    if every_n_steps is not None:
        meter = NoiseScaleMeter(model, every_n_steps=every_n_steps, window=STEPS)
    waited = 0
    for step in range(STEPS):
        x, y = batch(step, device)
        with waits() as found:
            with torch.autocast(device.type, kind, enabled=engine == "DDP" and kind != FULL):
                output = model(x.to(kind) if zero else x)
            loss = (output.float() - y).square().mean()
            if meter is not None:
                meter.backward(loss, len(x))
            elif zero:
                model.backward(loss)
            else:
                loss.backward()
            if zero:
                model.step()  # and the meter's after it
            if meter is not None:
                meter.step()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        waited += len(found) * (step >= SETTLED)
    if meter is None:
        return [], waited
    assert meter.not_measured is None
    assert meter.measured_steps >= (STEPS if every_n_steps == 1 else 1)
    moments = meter.average_moments
    return [moments.noise_trace, moments.grad_sq_norm], waited


def on_two(*runs: tuple[str, Kind, int | None]) -> list[tuple[list[float], int]]:
    """Train on two ranks, one way after the other."""
    if any("ZeRO" in run[0] for run in runs) and not importlib.util.find_spec("deepspeed"):
        pytest.skip("pip install deepspeed")
    if devices.most_ranks() < 2:
        pytest.skip("two devices, or --share-device nccl")
    first, second = on_ranks(2, as_torchrun(lambda: [trained(*run) for run in runs]))
    assert [moments for moments, _ in first] == [moments for moments, _ in second]
    return first


@pytest.mark.parametrize("kind", [FULL, torch.bfloat16])
@pytest.mark.parametrize("engine", list(ENGINES)[1:])
def test_noise_and_signal_are_those_under_ddp(engine: str, kind: Kind, figure: Figure) -> None:
    (expected, _), (got, _) = on_two(("DDP", kind, 1), (engine, kind, 1))
    for name, a, b in zip(("noise", "signal"), got, expected, strict=True):
        figure(f"{name} under {engine} in {kind}, off DDP's", a / b - 1)

    assert got == pytest.approx(expected, rel=1e-4 if kind == FULL else 0.05)


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_wait_no_more_often_than_without_a_meter(engine: str, figure: Figure) -> None:
    """Neither do steps that are measured, nor those between them."""
    names = {None: "a plain step", 1: "a measured step", 1000: "a step that is not measured"}
    found = [waited for _, waited in on_two(*((engine, FULL, every) for every in names))]
    for name, waited in zip(names.values(), found, strict=True):
        figure(f"waits of {name} under {engine}", waited / (STEPS - SETTLED))

    assert max(found[1:]) <= found[0]
