# SPDX-License-Identifier: Apache-2.0
"""Gradients along the optimizer's momentum, against gradients taken one by one."""

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from brute_force import gradients_of_examples
from forked_once import Ranks
from refused import refused
from tiers import slow
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noisescale import NoiseScaleMeter
from noisescale.collectors.collector import Collector
from noisescale.meter.choosing import choose_collector
from noisescale.meter.options import MeterOptions
from noisescale.methods.inner_product import NoiseAlongGradient
from noisescale.methods.inner_product.momentum import MomentumDirection

ROWS = 6


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def collector_of(model: nn.Module, optimizer: Any, **options: Any) -> Collector:
    measured = NoiseAlongGradient(MeterOptions(), optimizer)
    return choose_collector(model, MeterOptions(**options), extra=[measured])


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, 4, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(ROWS, 1, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def squares(collector: Collector, loss: Tensor) -> tuple[Any, Any]:
    collector.before_backward(loss, ROWS)
    loss.backward()
    return collector.small_sq_norms(), collector.big_sq_norms()


def following(model: nn.Module, optimizer: Any, **options: Any) -> NoiseScaleMeter:
    measured = {"extra": [NoiseAlongGradient], "optimizer": optimizer, "every_n_steps": 1}
    meter = NoiseScaleMeter(model, **{**measured, **options})
    meter.follow()
    return meter


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """With a momentum of three steps."""
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    for number in (101, 102, 103):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def direction_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """m/|m|."""
    names = ("momentum_buffer", "exp_avg")
    states = [optimizer.state[p] for p in model.parameters()]
    m = torch.cat([next(s[n] for n in names if n in s).flatten() for s in states]).double()
    return m / m.norm()


CASES = list(itertools.product(("SGD", "AdamW"), (False, True)))


@Ranks(2)
def of_two_ranks() -> list[tuple[float, float, float]]:
    """Of each case the product by hand, its small square and this rank's share of the big one."""
    found, rank = [], torch.distributed.get_rank()
    for name, bucket_view in CASES:
        model = model_of()
        optimizer = optimizer_of(model, name)
        v = direction_of(model, optimizer)
        by_hand = float(gradient(model, loss_of(model, rank)).double() @ v)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        collector = collector_of(ddp, optimizer)
        for _ in range(3):  # the last of which capture A sees, unless `.grad` is the bucket
            optimizer.zero_grad()
            collector.reset()
            small, big = squares(collector, loss_of(ddp, rank))
        found.append((by_hand, float(small[1]), float(big[1])))
    return found


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_each_rank_has_the_square_of_its_own_product_and_a_share_of_the_steps(case: int) -> None:
    found = [of_rank[case] for of_rank in of_two_ranks()]

    dots = [by_hand for by_hand, _, _ in found]
    assert [small for _, small, _ in found] == pytest.approx([d**2 for d in dots], rel=1e-5)
    of_step = (sum(dots) / 2) ** 2
    assert sum(big for _, _, big in found) == pytest.approx(of_step, rel=1e-5)


def test_micro_batches_are_squared_one_by_one() -> None:
    model = model_of()
    optimizer = optimizer_of(model, "SGD")
    v = direction_of(model, optimizer)
    collector = collector_of(model, optimizer, small_batch="micro_batch")
    dots = []

    for number in range(3):
        dots.append(float(gradient(model, loss_of(model, number)).double() @ v))
        small, big = squares(collector, loss_of(model, number))

    assert float(small[1]) == pytest.approx(sum(d**2 for d in dots), rel=1e-5)
    assert float(big[1]) == pytest.approx(sum(dots) ** 2, rel=1e-5)  # of the sum of gradients


@pytest.mark.parametrize("small_batch", ["micro_batch", slow("half")])
def test_at_frozen_weights_it_is_the_ratio_of_brute_force(small_batch: Any) -> None:
    """v'Σv/(G·v)² of 400 examples, their gradients taken one by one."""
    model = model_of()
    optimizer = optimizer_of(model, "SGD")
    v = direction_of(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 4, generator=generator)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(400, 1, generator=generator)
    each = gradients_of_examples(model, (x, y), nn.functional.mse_loss)
    products = torch.stack(each) @ v
    truth = float(products.var(correction=0) / products.mean() ** 2)

    meter = following(model, optimizer, small_batch=small_batch, unit="examples")
    for _ in range(300):
        optimizer.zero_grad()
        for _ in range(1 if small_batch == "half" else 2):
            rows = torch.randint(400, (8,), generator=generator)
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            meter.backward(loss, local_batch_size=8)
        meter.step()
    found, whole = meter.extra_noise_scales["along_gradient"], meter.noise_scale
    meter.close()

    assert found is not None
    assert found.steps >= 8
    assert 5 * found.low / 1.3 <= truth <= found.high / 5 * 1.3
    assert whole.low > 1.05 * truth  # which the noise scale is not


def test_before_the_first_step_nothing_is_known_and_it_is_resumed() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    first = following(model, optimizer)
    for number in range(12):
        optimizer.zero_grad()
        first.backward(loss_of(model, number), local_batch_size=ROWS)
        first.step()
        if number == 0:
            assert not first.extra_noise_scales["along_gradient"].resolved
        optimizer.step()
    first.close()
    second = following(model, optimizer)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.close()

    assert first.extra_noise_scales == second.extra_noise_scales
    # The first of 12 steps has no momentum, and the next one sets the level.
    assert 0 < first.extra_noise_scales["along_gradient"].steps <= 10


@pytest.mark.parametrize("shape", [(), (3,), (700, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_products_are_exact(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
    g, m = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    optimizer.state[p]["momentum_buffer"] = m

    if dtype.is_complex:
        g = g.conj()  # lazily, as gradients may be
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = float((g.to(wide) * m.to(wide).conj()).real.sum())
    for one in (g, g.T.contiguous().T if g.dim() == 2 else g):
        found = float(sum(MomentumDirection(optimizer, [p]).compute([(p, one, slice(None))])))
        scale = float(g.abs().double().norm() * m.abs().double().norm())
        assert found == pytest.approx(expected, abs=1e-5 * scale)


@pytest.mark.parametrize(
    ("make", "argument", "requirement"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "optimizer", "all parameter groups"),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.9)), "optimizer", "all parameter groups"),
        # It keeps no mean of gradients.
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), "optimizer", "all parameter groups"),
        (lambda p: torch.optim.Adam(p[:2]), "optimizer", "all measured parameters"),
        (lambda _: 0.9, "optimizer", "an optimizer"),
    ],
)
def test_what_has_no_momentum_to_measure_along_is_refused(
    make: Any, argument: str, requirement: str
) -> None:
    model = model_of()

    with refused(argument, requirement=requirement):
        following(model, make(list(model.parameters())))


@pytest.mark.parametrize(("sparse", "told"), [(True, "dense"), (False, "`momentum_buffer`")])
def test_sparse_gradients_and_a_mean_under_another_name_are_told(sparse: bool, told: str) -> None:
    model = nn.Embedding(5, 3, sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meter = following(model, optimizer, small_batch="micro_batch")

    def train() -> None:
        for step in range(3):
            optimizer.zero_grad()
            for k in range(2):
                meter.backward((model(torch.tensor([k, step])) ** 2).mean(), local_batch_size=2)
            meter.step()
            optimizer.step()
            for state in optimizer.state.values():
                state["mean"] = state.pop("momentum_buffer")

    with pytest.warns(UserWarning, match=told) as warned:
        train()
    meter.close()

    assert len(warned) == 1


def test_frozen_parameters_are_no_part_of_the_direction() -> None:
    model = model_of()
    optimizer = optimizer_of(model, "SGD")
    collector = collector_of(model, optimizer, small_batch="micro_batch")
    model[0].requires_grad_(False)  # in mid-run
    v = torch.cat([optimizer.state[p]["momentum_buffer"].flatten() for p in model[2].parameters()])
    loss = loss_of(model, 1)
    grads = torch.autograd.grad(loss, list(model[2].parameters()), retain_graph=True)
    dot = float(torch.cat([g.flatten() for g in grads]) @ v / v.norm())

    small, _ = squares(collector, loss)

    assert float(small[1]) == pytest.approx(dot**2, rel=1e-5)


def test_a_closed_meter_keeps_the_optimizer_no_longer() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    following(model, optimizer).close()
    kept = weakref.ref(optimizer)
    del optimizer, model
    gc.collect()

    assert kept() is None
