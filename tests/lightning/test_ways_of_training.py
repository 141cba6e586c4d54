# SPDX-License-Identifier: Apache-2.0
"""Every way of training x accumulation x precision, and odd models: norms against brute force.

The learning rate is 0, so that all steps have the weights that the model was made with, and the
oracle needs neither Lightning nor any wrapper: every micro-batch of every rank, in float64.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from brute_force import brute_force
from fits import (
    FsdpAnywhere,
    check_norms,
    classifier,
    fit,
    fit_here,
    fits_on_ranks,
    loader,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from ranks import in_a_fork
from tiers import slow
from torch import nn
from zoo import ZOO, mlp

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

BATCH_SIZE = 8


class Precision(NamedTuple):
    trainer_options: dict[str, Any]
    weights: torch.dtype
    tolerance: float
    """Relative error of a squared norm. That of the precision's own arithmetic, not of ours."""


PRECISIONS = {
    "32-true": Precision({}, torch.float32, 2e-6),
    "64-true": Precision({"precision": "64-true"}, torch.float64, 1e-12),
    "bf16-mixed": Precision({"precision": "bf16-mixed"}, torch.float32, 3e-2),
    "16-mixed": Precision({"plugins": [MixedPrecision("16-mixed", "cpu")]}, torch.float32, 5e-3),
    "bf16-true": Precision({"precision": "bf16-true"}, torch.bfloat16, 3e-2),
    "16-true": Precision({"precision": "16-true"}, torch.float16, 5e-3),
}


class Way(NamedTuple):
    ranks: int
    strategy: Callable[[], Any]
    small_batch: str
    compared: str
    """What a small batch is then."""
    tensor_parallel: int = 1


WAYS = {
    "ranks": Way(2, DDPStrategy, "auto", "rank"),
    "ranks with bucket views": Way(
        2, lambda: DDPStrategy(gradient_as_bucket_view=True), "auto", "rank"
    ),
    "ranks that leave parameters out": Way(
        2, lambda: DDPStrategy(find_unused_parameters=True), "auto", "rank"
    ),
    "micro-batches": Way(1, lambda: "auto", "micro_batch", "micro_batch"),
    "micro-batches of ranks": Way(2, DDPStrategy, "micro_batch", "micro_batch"),
    # Lightning reduces every micro-batch of a rank by itself.
    "shards": Way(2, lambda: ModelParallelStrategy(2, 1), "auto", "micro_batch"),
    "shards of parts": Way(2, lambda: ModelParallelStrategy(2, 2), "auto", "micro_batch", 2),
    "parts": Way(1, lambda: ModelParallelStrategy(1, 2), "auto", "micro_batch", 2),
    "shards of flat parameters": Way(2, FsdpAnywhere, "auto", "rank"),
}


class Training(NamedTuple):
    way: str
    accumulated: int
    precision: str
    model: str = "layer normalization"
    compiled: bool = False


QUICK = (
    Training("ranks", 3, "16-mixed"),
    Training("ranks with bucket views", 1, "64-true"),
    Training("shards", 3, "bf16-true"),
    Training("parts", 3, "16-true"),
    Training("shards of flat parameters", 3, "32-true"),
    Training("ranks that leave parameters out", 2, "32-true", "unused"),
    Training("micro-batches", 3, "bf16-mixed"),
    Training("micro-batches", 2, "32-true", "complex"),
)
ON_RANKS = QUICK[:6]
"""In one group."""
FOUND: dict[Training, list[list[StepNorms]]] = {}
"""The steps of each rank."""


def net_of(model: str) -> nn.Module:
    torch.manual_seed(0)
    return mlp(nn.LayerNorm(16)) if model == "layer normalization" else ZOO[model].module().net


def steps_of(training: Training, recorded: list[StepNorms]) -> list[StepNorms]:
    """Of this rank."""
    recorded.clear()
    way = WAYS[training.way]
    strategy = way.strategy()
    sharded = isinstance(strategy, ModelParallelStrategy)
    module = classifier(net=net_of(training.model), lr=0.0, sharded=sharded)
    fit_here(
        NoiseScaleMonitor(small_batch=way.small_batch),
        ranks=way.ranks * way.tensor_parallel,
        strategy=strategy,
        model=torch.compile(module, backend="aot_eager") if training.compiled else module,
        train_loader=loader(BATCH_SIZE),
        accumulate_grad_batches=training.accumulated,
        **PRECISIONS[training.precision].trainer_options,
    )
    return list(recorded)


def check(training: Training, recorded: list[StepNorms]) -> None:
    way, precision = WAYS[training.way], PRECISIONS[training.precision]
    if (ranks := way.ranks * way.tensor_parallel) == 1:
        FOUND[training] = [steps_of(training, recorded)]
    if training not in FOUND:
        together = ON_RANKS if training in ON_RANKS else (training,)
        fits = [partial(steps_of, one, recorded) for one in together]
        FOUND.update(zip(together, fits_on_ranks(*fits, ranks=ranks), strict=True))

    net = net_of(training.model)
    expected = brute_force(
        net.to(precision.weights) if precision.weights != torch.float32 else net,
        ranks=way.ranks,
        accumulated=training.accumulated,
        compared=way.compared,
        examples=100,
        batch_size=BATCH_SIZE,
        inputs=precision.weights,
        dealt=way.tensor_parallel > 1,
    )
    for steps in FOUND[training]:
        assert len(steps) == len(expected)
        check_norms(steps, expected, precision.tolerance)


def cases() -> Iterator[Any]:
    for way, accumulated, precision in itertools.product(WAYS, (1, 3), PRECISIONS):
        # One micro-batch a step has nothing to be compared with.
        possible = way not in ("micro-batches", "parts") or accumulated > 1
        if way in ("shards", "parts", "shards of parts"):
            possible &= precision not in ("64-true", "16-mixed")  # of ModelParallelStrategy
        if way == "shards of flat parameters":  # of FSDPStrategy, which needs CUDA's autocast
            possible &= "true" in precision and precision != "64-true"
        if possible and way != "ranks that leave parameters out":
            yield Training(way, accumulated, precision)
    for way in ("micro-batches", "ranks"):
        yield Training(way, 2, "32-true", compiled=True)
        # Where batches are normalized, parts are, each by itself: that gradient is measured.
        for model in ("lora", "tied", "batch normalization", "complex"):
            yield Training(way, 2, "32-true", model)
    yield Training("ranks with bucket views", 2, "32-true", "complex")
    yield Training("ranks that leave parameters out", 2, "32-true", "unused")


def marked(training: Training) -> Any:
    marks = [pytest.mark.slow] * (training not in QUICK)
    return pytest.param(training, marks=marks, id="-".join(map(str, training)))


@pytest.mark.filterwarnings("ignore:FSDP with .* enables computation in lower precision")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("training", [marked(one) for one in cases()])
def test_norms_are_those_of_brute_force(training: Training, recorded: list[StepNorms]) -> None:
    forks = training.compiled and training.way == "micro-batches"
    (in_a_fork(check) if forks else check)(training, recorded)


@pytest.mark.parametrize("fused", [slow(False), True])
def test_overflows_are_left_out_on_all_ranks_and_the_changing_scale_taken_out(
    fused: bool, recorded: list[StepNorms]
) -> None:
    """Scaled by 2²⁰ the first gradients do not fit into 16 bits, and the scaler halves that."""
    net = net_of("layer normalization")
    module = classifier(net=net, lr=0.0)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    first, second = fit(
        NoiseScaleMonitor(),
        model=module,
        train_loader=loader(BATCH_SIZE),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        results=lambda *_: list(recorded),
    )

    expected = brute_force(
        net, ranks=2, accumulated=1, compared="rank", examples=100, batch_size=BATCH_SIZE
    )
    measured = [index for index, step in enumerate(first) if step.comparable]
    assert 1 <= len(measured) < len(first)
    assert measured == [index for index, step in enumerate(second) if step.comparable]
    assert [first[i] for i in measured] == [second[i] for i in measured]
    check_norms([first[i] for i in measured], [expected[i] for i in measured], rel=5e-3)
