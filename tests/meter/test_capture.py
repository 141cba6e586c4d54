# SPDX-License-Identifier: Apache-2.0
"""The training loss in the rows of a run, however its steps are made up."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fits import data, loss_of, network
from ranks import on_ranks
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter

X, Y = data(1000).tensors
STEPS = 4

Loss = Callable[[Any, int, int], torch.Tensor]


def plain(net: Any, start: int, end: int) -> torch.Tensor:
    return loss_of(net, (X[start:end], Y[start:end]))


def with_penalty(net: Any, start: int, end: int) -> torch.Tensor:
    return plain(net, start, end) + 1e-3 * sum(p.square().sum() for p in net.parameters())


def with_penalty_on_one_rank(net: Any, start: int, end: int) -> torch.Tensor:
    return (with_penalty if dist.get_rank() else plain)(net, start, end)


def with_penalty_in_second_passes(net: Any, start: int, end: int) -> torch.Tensor:
    return (with_penalty if start % 16 else plain)(net, start, end)


def parts_of(step: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    starts = [step * sum(sizes) + sum(sizes[:k]) for k in range(len(sizes))]
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def train(
    sizes: Sequence[int],
    loss: Loss = plain,
    *,
    scaler: GradScaler | None = None,
    weighted: bool = False,
    every: int = 1,
) -> list[float]:
    """The losses of the rows of some steps. The passes of a step are dealt to the ranks."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model: Any = network() if ranks == 1 else DistributedDataParallel(network())
    meter = NoiseScaleMeter(
        model,
        grad_scaler=scaler,
        small_batch="micro_batch" if len(sizes) > 1 else "half",
        every_n_steps=every,
        log_every_n_steps=1,
    )
    for step in range(STEPS):
        own = parts_of(step, sizes)[rank::ranks]
        for start, end in own:
            # One mean over the rows of the step, or the mean of the passes' means.
            share = ranks * (end - start) / sum(sizes) if weighted else 1 / len(own)
            of_pass = loss(model, start, end) * share
            weight = float(end - start) if weighted else None
            accumulates = ranks > 1 and (start, end) != own[-1]
            with model.no_sync() if accumulates else nullcontext():
                of_pass = of_pass if scaler is None else scaler.scale(of_pass)
                meter.backward(of_pass, end - start, weight=weight)
        meter.step()
        for p in model.parameters():
            p.data -= 0.05 * p.grad / (1.0 if scaler is None else scaler.get_scale())
            p.grad = None
    return meter.history["training_loss"].tolist()


def expected(sizes: Sequence[int], *, weighted: bool = False) -> list[float]:
    """The mean loss of each step's examples. The first measured step only sets the level."""
    net, found = network(), []
    for step in range(STEPS):
        parts = parts_of(step, sizes)
        losses = [plain(net, start, end) for start, end in parts]
        shares = [size / sum(sizes) for size in sizes]
        found.append(sum(s * x.item() for s, x in zip(shares, losses, strict=True)))
        by = shares if weighted else [1 / len(sizes)] * len(sizes)
        sum(s * x for s, x in zip(by, losses, strict=True)).backward()
        for p in net.parameters():
            p.data -= 0.05 * p.grad
            p.grad = None
    return [math.nan, *found[1:]]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([16], {}),
        ([16], {"scaler": GradScaler("cpu", init_scale=1024.0)}),
        ([6, 2, 4, 4], {}),
        ([6, 2, 4, 4], {"weighted": True}),
    ],
)
def test_it_is_the_mean_over_examples_undivided_and_unscaled(
    sizes: list[int], options: dict[str, Any]
) -> None:
    mean = expected(sizes, weighted="weighted" in options)

    assert train(sizes, **options) == pytest.approx(mean, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("sizes", [[12, 4], [6, 2, 2, 6]])
@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_agree_on_that_of_one_process(sizes: list[int], weighted: bool) -> None:
    first, second = on_ranks(2, partial(train, sizes, weighted=weighted))

    assert first == pytest.approx(second, nan_ok=True)
    assert first == pytest.approx(expected(sizes, weighted=weighted), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("loss", [with_penalty, with_penalty_on_one_rank])
def test_a_loss_that_is_no_cross_entropy_on_some_rank_is_not_heard(loss: Loss) -> None:
    for losses in on_ranks(2, partial(train, [8, 8], loss)):
        assert len(losses) == STEPS
        assert all(map(math.isnan, losses))


def test_a_step_with_one_pass_that_is_no_cross_entropy_is_not_heard() -> None:
    assert all(map(math.isnan, train([8, 8], with_penalty_in_second_passes)))


def test_only_losses_of_measured_steps_count() -> None:
    assert train([4, 4], every=2) == pytest.approx(expected([4, 4])[::2], nan_ok=True)
