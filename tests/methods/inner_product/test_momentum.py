# SPDX-License-Identifier: Apache-2.0
"""Gradients along the optimizer's momentum, against gradients taken one by one."""

import copy
import gc
import math
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from ranks import on_ranks
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


def examples(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, 4, generator=generator)
    return x, x.sum(1, keepdim=True) + torch.randn(ROWS, 1, generator=generator)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, y = examples(number)
    return nn.functional.mse_loss(model(x), y)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """With a momentum of three steps."""
    made: dict[str, Any] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    optimizer: torch.optim.Optimizer = made[name](model.parameters())
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


@cache
def on_two_ranks(name: str, bucket_view: bool) -> list[tuple[float, float, float]]:
    def run() -> tuple[float, float, float]:
        model = model_of()
        optimizer = optimizer_of(model, name)
        v = direction_of(model, optimizer)
        rank = torch.distributed.get_rank()
        by_hand = float(gradient(model, loss_of(model, rank)).double() @ v)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        collector = collector_of(ddp, optimizer)
        for _ in range(3):  # the last of which capture A sees, unless `.grad` is the bucket
            optimizer.zero_grad()
            collector.reset()
            loss = loss_of(ddp, rank)
            collector.before_backward(loss, ROWS)
            loss.backward()
            small = collector.small_sq_norms()
            big = collector.big_sq_norms()
        assert small is not None
        return by_hand, float(small[-1]), float(big[-1])

    found: list[tuple[float, float, float]] = on_ranks(2, run)
    return found


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_each_rank_has_the_square_of_its_own_product_and_a_share_of_the_steps(
    name: str, bucket_view: bool
) -> None:
    found = on_two_ranks(name, bucket_view)

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
        loss = loss_of(model, number)
        collector.before_backward(loss, ROWS)
        loss.backward()
    small, big = collector.small_sq_norms(), collector.big_sq_norms()

    assert small is not None
    assert float(small[-1]) == pytest.approx(sum(d**2 for d in dots), rel=1e-5)
    assert float(big[-1]) == pytest.approx(sum(dots) ** 2, rel=1e-5)  # of the sum of gradients


@pytest.mark.parametrize("small_batch", ["half", "micro_batch"])
def test_at_frozen_weights_it_is_the_ratio_of_brute_force(small_batch: Any) -> None:
    """v'Σv/(G·v)² of 400 examples, their gradients taken one by one."""
    model = model_of()
    optimizer = optimizer_of(model, "SGD")
    v = direction_of(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 4, generator=generator)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(400, 1, generator=generator)
    along = [
        float(
            gradient(model, nn.functional.mse_loss(model(x[i : i + 1]), y[i : i + 1])).double() @ v
        )
        for i in range(400)
    ]
    products = torch.tensor(along, dtype=torch.float64)
    truth = float(products.var(correction=0) / products.mean() ** 2)

    meter = NoiseScaleMeter(
        model,
        extra=[NoiseAlongGradient],
        optimizer=optimizer,
        small_batch=small_batch,
        every_n_steps=1,
        unit="examples",
    )
    meter.follow()
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

    def meter_of() -> NoiseScaleMeter:
        made = NoiseScaleMeter(
            model, extra=[NoiseAlongGradient], optimizer=optimizer, every_n_steps=1
        )
        made.follow()
        return made

    first = meter_of()
    for number in range(12):
        optimizer.zero_grad()
        first.backward(loss_of(model, number), local_batch_size=ROWS)
        first.step()
        if number == 0:
            assert first.extra_noise_scales["along_gradient"] is not None
            assert not first.extra_noise_scales["along_gradient"].resolved
        optimizer.step()
    first.close()
    second = meter_of()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.close()

    assert first.extra_noise_scales["along_gradient"] == second.extra_noise_scales["along_gradient"]
    assert first.extra_noise_scales["along_gradient"] is not None
    # The first of 12 steps has no momentum, and the next one sets the level.
    assert first.extra_noise_scales["along_gradient"].steps <= 10


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


def test_without_momentum_it_is_refused() -> None:
    model = model_of()
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adagrad(model.parameters()),
        torch.optim.Adam(model.parameters(), betas=(0.0, 0.9)),
    ):
        with pytest.raises(ValueError, match="`optimizer` must be one with momentum in"):
            NoiseScaleMeter(model, extra=[NoiseAlongGradient], optimizer=optimizer)
    with pytest.raises(ValueError, match="`extra` must be empty if examples are the small"):
        NoiseScaleMeter(
            model,
            extra=[NoiseAlongGradient],
            optimizer=torch.optim.Adam(model.parameters()),
            small_batch="example",
        )


def test_what_keeps_no_mean_of_gradients_is_refused() -> None:
    model = model_of()
    rmsprop = torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9)
    of_some = torch.optim.SGD(list(model.parameters())[:2], lr=0.1, momentum=0.9)
    given: Any = 0.9
    with pytest.raises(ValueError, match="must be one with momentum in all parameter gro"):
        NoiseScaleMeter(model, extra=[NoiseAlongGradient], optimizer=rmsprop)
    with pytest.raises(ValueError, match="must be that of all measured parameters"):
        NoiseScaleMeter(model, extra=[NoiseAlongGradient], optimizer=of_some)
    with pytest.raises(TypeError, match=r"`optimizer` must be an optimizer, got 0\.9\."):
        NoiseScaleMeter(model, extra=[NoiseAlongGradient], optimizer=given)


def steps_of_embeddings(meter: NoiseScaleMeter, model: nn.Module, optimizer: Any) -> None:
    """Of an optimizer that keeps its mean under a name of its own."""
    for step in range(3):
        optimizer.zero_grad()
        for k in range(2):
            meter.backward((model(torch.tensor([k, step])) ** 2).mean(), local_batch_size=2)
        meter.step()
        optimizer.step()
        for state in optimizer.state.values():
            state["mean"] = state.pop("momentum_buffer")


def meter_of_embeddings(sparse: bool) -> tuple[NoiseScaleMeter, nn.Module, torch.optim.Optimizer]:
    model = nn.Embedding(5, 3, sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meter = NoiseScaleMeter(
        model,
        extra=[NoiseAlongGradient],
        optimizer=optimizer,
        small_batch="micro_batch",
        every_n_steps=1,
    )
    meter.follow()
    return meter, model, optimizer


def test_sparse_gradients_are_not_measured() -> None:
    made = meter_of_embeddings(sparse=True)

    with pytest.warns(UserWarning, match="Gradients must be dense for the noise along them"):
        steps_of_embeddings(*made)
    made[0].close()


def test_a_mean_under_another_name_is_told() -> None:
    made = meter_of_embeddings(sparse=False)

    with pytest.warns(UserWarning, match="keeps a dense `momentum_buffer` or `exp_avg`, got SGD"):
        steps_of_embeddings(*made)
    made[0].close()


def test_frozen_parameters_are_no_part_of_the_direction() -> None:
    model = model_of()
    optimizer = optimizer_of(model, "SGD")
    collector = collector_of(model, optimizer, small_batch="micro_batch")
    model[0].requires_grad_(False)  # in mid-run
    v = torch.cat([optimizer.state[p]["momentum_buffer"].flatten() for p in model[2].parameters()])
    loss = loss_of(model, 1)
    grads = torch.autograd.grad(loss, list(model[2].parameters()), retain_graph=True)
    dot = float(torch.cat([g.flatten() for g in grads]) @ v / v.norm())

    collector.before_backward(loss, ROWS)
    loss.backward()
    small = collector.small_sq_norms()

    assert small is not None
    assert float(small[-1]) == pytest.approx(dot**2, rel=1e-5)


def test_a_closed_meter_keeps_the_optimizer_no_longer() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    meter = NoiseScaleMeter(model, extra=[NoiseAlongGradient], optimizer=optimizer)
    meter.follow()
    meter.close()
    kept = weakref.ref(optimizer)
    del optimizer, model
    gc.collect()

    assert kept() is None


def test_without_it_nothing_is_computed() -> None:
    meter = NoiseScaleMeter(model_of())

    assert not meter.extra_noise_scales
    assert math.isnan(meter.noise_scale.value)
    meter.close()
