# SPDX-License-Identifier: Apache-2.0
"""Every way of training x accumulation x precision: norms against gradients taken one by one.

The learning rate is 0, so that all steps have the weights that the model was made with, and the
oracle needs neither Lightning nor any wrapper: every micro-batch of every rank, in float64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from brute_force import brute_force
from fits import (
    CLASSES,
    FEATURES,
    FsdpAnywhere,
    classifier,
    fit,
    fit_sharded,
    loader,
    needs_measurable_shards,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

EXAMPLES, BATCH_SIZE = 100, 8


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
    strategy: Callable[[], dict[str, Any]]
    small_batch: str
    compared: str
    """What a small batch is then."""
    tensor_parallel: int = 1


WAYS = {
    "ranks": Way(2, dict, "auto", "rank"),
    "ranks with bucket views": Way(
        2,
        lambda: {"strategy": DDPStrategy(start_method="fork", gradient_as_bucket_view=True)},
        "auto",
        "rank",
    ),
    "micro-batches": Way(1, lambda: {"strategy": "auto"}, "micro_batch", "micro_batch"),
    "micro-batches of ranks": Way(2, dict, "micro_batch", "micro_batch"),
    "examples": Way(1, lambda: {"strategy": "auto"}, "example", "example"),
    "examples of ranks": Way(2, dict, "example", "example"),
    # Lightning reduces every micro-batch of a rank by itself.
    "shards": Way(2, dict, "auto", "micro_batch"),
    "shards of parts": Way(2, dict, "auto", "micro_batch", tensor_parallel=2),
    "parts": Way(1, dict, "auto", "micro_batch", tensor_parallel=2),
    "shards of flat parameters": Way(2, lambda: {"strategy": FsdpAnywhere()}, "auto", "rank"),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


@pytest.mark.filterwarnings("ignore:FSDP with .* enables computation in lower precision")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=[needs_measurable_shards] * (w.startswith("shards"))) for w in WAYS],
)
def test_norms_are_those_of_brute_force(
    way: str, accumulated: int, precision: str, recorded: list[StepNorms]
) -> None:
    ranks, strategy, small_batch, compared, tensor_parallel = WAYS[way]
    options, weights, tolerance = PRECISIONS[precision]
    if way in ("micro-batches", "parts") and accumulated == 1:
        pytest.skip("one micro-batch a step has nothing to be compared with")

    model_parallel = way == "shards" or tensor_parallel > 1
    if model_parallel and precision in ("64-true", "16-mixed"):
        pytest.skip("Lightning's ModelParallelStrategy does not have it")
    if way == "shards of flat parameters" and "true" not in precision:
        pytest.skip("Lightning's FSDPStrategy needs CUDA's autocast")
    if way == "shards of flat parameters" and precision == "64-true":
        pytest.skip("Lightning's FSDPStrategy does not have it")

    options = {**options, **strategy()}
    if tensor_parallel > 1:
        options["tensor_parallel"] = tensor_parallel
    results = (fit_sharded if model_parallel or way.startswith("shards") else fit)(
        NoiseScaleMonitor(small_batch=small_batch),
        ranks=ranks * tensor_parallel,
        model=classifier(net=network(), lr=0.0, sharded=model_parallel),
        train_loader=loader(BATCH_SIZE, EXAMPLES),
        accumulate_grad_batches=accumulated,
        results=lambda *_: list(recorded),
        **options,
    )

    expected = brute_force(
        network().to(weights),
        ranks=ranks,
        accumulated=accumulated,
        compared=compared,
        examples=EXAMPLES,
        batch_size=BATCH_SIZE,
        inputs=weights,
        dealt=tensor_parallel > 1,
    )
    for steps in results:
        assert len(steps) == len(expected)
        # The first step by examples is a probe of what they can be told apart by.
        probes = int(compared == "example")
        compared_steps = zip(steps[probes:], expected[probes:], strict=True)
        for got, (small, big, small_size, big_size) in compared_steps:
            assert got.small_sq_norm == pytest.approx(small, rel=tolerance)
            assert got.big_sq_norm == pytest.approx(big, rel=tolerance)
            assert got.small_batch == pytest.approx(small_size)
            assert got.big_batch == pytest.approx(big_size)


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_are_left_out_on_all_ranks_and_the_changing_scale_taken_out(
    fused: bool, recorded: list[StepNorms]
) -> None:
    """Scaled by 2²⁰ the first gradients do not fit into 16 bits, and the scaler halves that."""
    module = classifier(net=network(), lr=0.0)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    first, second = fit(
        NoiseScaleMonitor(),
        model=module,
        train_loader=loader(BATCH_SIZE, EXAMPLES),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        results=lambda *_: list(recorded),
    )

    expected = brute_force(
        network(), ranks=2, accumulated=1, compared="rank", examples=EXAMPLES, batch_size=BATCH_SIZE
    )
    measured = [index for index, step in enumerate(first) if step.comparable]
    assert 1 <= len(measured) < len(first)
    assert measured == [index for index, step in enumerate(second) if step.comparable]
    for index in measured:
        assert first[index] == second[index]
        assert first[index].small_sq_norm == pytest.approx(expected[index][0], rel=5e-3)
        assert first[index].big_sq_norm == pytest.approx(expected[index][1], rel=5e-3)
