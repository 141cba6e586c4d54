# SPDX-License-Identifier: Apache-2.0
"""Short trainings on the fake device in every way of measuring, and what each step transfers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo  # which FSDP2 imports, here once and not in every fork
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from ways_of_capture import reducing

from fake_device.transfers import Transfer, Transfers
from noisescale import NoiseScaleMeter
from noisescale.methods.inner_product import NoiseAlongGradient

FEATURES, CLASSES, ROWS = 64, 10, 16
STEPS, EVERY, READ_EVERY = 40, 2, 10


class Step(NamedTuple):
    """What one optimizer step transfers in the package, and all that it launches."""

    phase: str
    transfers: Mapping[Transfer, int]
    launched: int
    kinds: Mapping[str, int]
    """Transfers outside of the package, too."""

    @classmethod
    def of(cls, phase: str, transfers: Transfers) -> "Step":
        return cls(phase, transfers.of_package(), transfers.launched, transfers.kinds())


class Way(NamedTuple):
    """A way of training and measuring."""

    accumulation: int = 1
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: (
        torch.optim.SGD(parameters, 1e-2, momentum=0.9)
    )
    options: Callable[[torch.optim.Optimizer], dict[str, Any]] = lambda optimizer: {}
    """Of the meter."""
    arguments: Callable[[int], dict[str, Any]] = lambda rows: {}
    """Of `before_backward`, for a batch of so many rows."""
    rows: Callable[[int], int] = lambda number: ROWS
    """Of the batch of that number."""
    scaled: bool = False
    """Whether a GradScaler scales the losses."""
    model: Callable[[], nn.Module] = lambda: network()
    wrapped: Callable[[nn.Module], Any] | None = None
    """For two ranks."""


def network() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(FEATURES, 128), nn.LayerNorm(128), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def with_frozen_norms() -> nn.Module:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(FEATURES).eval() for _ in range(10)]
    return nn.Sequential(*norms, nn.Linear(FEATURES, CLASSES))


def ddp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def sharded(model: nn.Module, **options: Any) -> Any:
    options["mesh"] = init_device_mesh("fake", (2,))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def adam(**options: Any) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, 1e-3, **options)


def along_momentum(optimizer: Any) -> dict[str, Any]:
    return {**MICRO, "extra": [NoiseAlongGradient], "optimizer": optimizer}


MICRO = {"small_batch": "micro_batch"}
GROUPS = {"groups": {"weights": "weight", "biases": "bias"}}
WAYS: Mapping[str, Way] = {
    "halves": Way(),
    "halves, groups": Way(options=lambda _: GROUPS),
    "halves, frozen BatchNorms": Way(model=with_frozen_norms),
    "halves, groups of rows": Way(
        arguments=lambda rows: {"row_groups": [i // 2 for i in range(rows)]}
    ),
    "halves, weights of rows": Way(
        arguments=lambda rows: {"weight": 1 + torch.arange(rows, device="fake") % 2}
    ),
    "micro-batches": Way(4, options=lambda _: MICRO),
    "micro-batches of unequal sizes": Way(4, options=lambda _: MICRO, rows=lambda i: 8 + i % 7),
    "micro-batches, groups": Way(4, options=lambda _: {**MICRO, **GROUPS}),
    "micro-batches, momentum": Way(4, options=along_momentum),
    "micro-batches, momentum of Adam": Way(4, adam(), along_momentum),
    "micro-batches, momentum of Adam with steps on the device": Way(
        4, adam(capturable=True), along_momentum
    ),
    "micro-batches, weights": Way(
        4, options=lambda _: MICRO, arguments=lambda rows: {"weight": float(rows)}
    ),
    "micro-batches, weights on the device": Way(
        4,
        options=lambda _: MICRO,
        arguments=lambda rows: {"weight": torch.tensor(float(rows)).to("fake")},
    ),
    "micro-batches, weights in tensors of the host": Way(
        4, options=lambda _: MICRO, arguments=lambda rows: {"weight": torch.tensor(float(rows))}
    ),
    "micro-batches, loss scaler": Way(4, options=lambda _: MICRO, scaled=True),
    "DDP": Way(wrapped=ddp()),
    "DDP, bucket views": Way(wrapped=ddp(gradient_as_bucket_view=True)),
    "DDP, accumulation, groups": Way(2, options=lambda _: GROUPS, wrapped=ddp()),
    "DDP, micro-batches": Way(2, options=lambda _: MICRO, wrapped=ddp()),
    "ranks that are not averaged": Way(
        options=lambda _: {"averaged": False}, wrapped=lambda model: model
    ),
    "FSDP2": Way(wrapped=sharded),
    "FSDP2, accumulation, groups": Way(2, options=lambda _: GROUPS, wrapped=sharded),
}


def counted(way: Way, *, measured: bool = True) -> list[Step]:
    """Return the steps of a forked training, of its first rank; without a meter if not `measured`.

    No backward pass on the device may have run in this process.
    """
    steps: list[Step] = on_ranks(1 if way.wrapped is None else 2, _steps, way, measured)[0]
    return steps


class Launched(NamedTuple):
    """Operations of a step that launch kernels."""

    plain: int
    """Without a meter."""
    measured: int


def launched(way: Way, steps: Sequence[Step]) -> Launched:
    """Count what is launched once a training has begun, whose steps were `counted`."""
    steps = [*steps, *counted(way, measured=False)]

    def least(phase: str) -> int:
        return min(step.launched for step in steps if step.phase == phase)

    return Launched(least("plain"), least("measured"))


def _steps(way: Way, measured: bool) -> list[Step]:
    model = way.model().to("fake")
    model = model if way.wrapped is None else way.wrapped(model)
    optimizer = way.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("fake", init_scale=1024.0) if way.scaled else None
    options = {"every_n_steps": EVERY, "grad_scaler": scaler, **way.options(optimizer)}
    meter = NoiseScaleMeter(model, **options) if measured else None
    steps: list[Step] = []
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for step in range(STEPS):
        phase = "plain" if meter is None else "measured" if meter.due else "unmeasured"
        phase = "first measured" if phase == "measured" and step == 0 else phase
        with Transfers() as transfers:
            for part in range(way.accumulation):
                rows = way.rows(step * way.accumulation + part)
                x, y = torch.randn(rows, FEATURES), torch.randint(CLASSES, (rows,))
                x, y = x.pin_memory().to("fake"), y.pin_memory().to("fake")
                with reducing(model, part == way.accumulation - 1):
                    loss = nn.functional.cross_entropy(model(x), y) / way.accumulation
                    loss = loss if scaler is None else scaler.scale(loss)
                    if meter is not None:
                        of_batch = way.arguments(rows) if meter.due else {}
                        meter.before_backward(loss, rows, **of_batch)
                    loss.backward()
            if meter is not None:
                meter.step()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        steps.append(Step.of(phase, transfers))
        if meter is not None and step % READ_EVERY == READ_EVERY - 1:
            with Transfers() as transfers:
                _ = meter.noise_scale, meter.measured_steps
            steps.append(Step.of("read", transfers))
    if meter is not None:
        assert meter.measured_steps > 0, meter.noise_scale
        meter.close()
    return steps


def most(steps: Sequence[Step]) -> dict[str, Counter[Transfer]]:
    """The most transfers of a step, for each phase and line."""
    found: dict[str, Counter[Transfer]] = {}
    for step in steps:
        found[step.phase] = found.get(step.phase, Counter()) | Counter(step.transfers)
    return found
