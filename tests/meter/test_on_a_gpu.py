# SPDX-License-Identifier: Apache-2.0
"""What only hardware shows: `make test-gpu`, or `make test-mps` on a Mac.

Figures are kept, not judged: a busy machine would fail tests of time.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import devices
import pytest
import torch
from torch import Tensor, nn

from noisescale import NoiseScaleMeter
from noisescale.collectors.squared_norms import squared_norm

pytestmark = pytest.mark.gpu
on_cuda_alone = pytest.mark.skipif(devices.name != "cuda", reason="needs CUDA")

ROUNDS = 40
WARM_UP = 5

Figure = Callable[[str, float], None]

WAYS = {
    "halves": {"small_batch": "half"},
    "micro-batches": {"small_batch": "micro_batch"},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.wide(self.norms[1](x))
        return out


def transformer(device: torch.device) -> nn.Sequential:
    """19 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(512) for _ in range(6)]).to(device)


def perceptron(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)


def rows(seed: int, number: int, width: int = 64, length: int = 16) -> Tensor:
    return torch.randn(number, length, width, generator=torch.Generator().manual_seed(seed))


def train(meter: NoiseScaleMeter | None, model: nn.Module, batches: list[Tensor]) -> None:
    """One step, a micro-batch for each of `batches`."""
    model.zero_grad()
    for x in batches:
        loss = (model(x) - x).square().mean() / len(batches)
        if meter is None:
            loss.backward()
        else:
            meter.backward(loss, len(x))
    if meter is not None:
        meter.step()


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def parts_of(way: str, step: int, device: torch.device) -> list[Tensor]:
    """The micro-batches of a step."""
    parts = 2 if way == "micro-batches" else 1
    return [rows(10 * step + part, 16).to(device) for part in range(parts)]


@on_cuda_alone
@pytest.mark.parametrize("way", WAYS)
def test_measured_steps_do_not_wait_for_the_device(device: torch.device, way: str) -> None:
    model = perceptron(device)
    meter = NoiseScaleMeter(model, every_n_steps=1, **WAYS[way])
    batches = [parts_of(way, step, device) for step in range(24)]
    for step, batch in enumerate(batches):
        with nullcontext() if step < 20 else no_synchronisation():
            train(meter, model, batch)

    assert meter.measured_steps == 24


def moments(
    device: torch.device, way: str = "halves", *, compiled: bool = False
) -> tuple[float, ...]:
    model = perceptron(device)
    called = torch.compile(model, mode="reduce-overhead") if compiled else model
    meter = NoiseScaleMeter(model, every_n_steps=1, window=8, **WAYS[way])
    for step in range(12):
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        train(meter, called, parts_of(way, step, device))
    assert meter.measured_steps == 12
    assert meter.average_moments is not None
    return meter.average_moments


@pytest.mark.parametrize("way", WAYS)
def test_the_noise_scale_is_that_of_the_cpu(device: torch.device, way: str) -> None:
    assert moments(device, way) == pytest.approx(moments(torch.device("cpu"), way), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1000, 2**20, 2**26])
def test_squared_norms_are_exact_to_1e_6(
    device: torch.device, dtype: torch.dtype, elements: int, figure: Figure
) -> None:
    """On CUDA a norm is summed pairwise in float32, whatever its length."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth = float(x.double().square().sum())

    error = squared_norm([x.to(device)], device=device).item() / truth - 1

    figure(f"error of |x|², {elements:,} of {dtype}", error)
    assert abs(error) < 1e-6


@on_cuda_alone
def test_cuda_graphs_of_a_compiled_model_are_measured_by_halves(device: torch.device) -> None:
    """mode="reduce-overhead" reuses the memory of what it returned at the last call."""
    assert moments(device, compiled=True) == pytest.approx(moments(device), rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_measured_step_costs(device: torch.device, way: str, figure: Figure) -> None:
    """In plain steps: `COST_OF_NORMS`, and 0.75 for halves, are what the cadence is paid from."""
    model, parts = transformer(device), 2 if way == "micro-batches" else 1
    meter = NoiseScaleMeter(model, every_n_steps=1, **WAYS[way])
    batch = [rows(part, 32, width=512, length=128).to(device) for part in range(parts)]
    ratios = []
    for round_ in range(WARM_UP + ROUNDS):
        seconds = {}
        for measured in (True, False) if round_ % 2 else (False, True):
            (meter.resume if measured else meter.pause)()
            torch.accelerator.synchronize(device)
            began = time.perf_counter()
            train(meter if measured else None, model, batch)
            torch.accelerator.synchronize(device)
            seconds[measured] = time.perf_counter() - began
        ratios.append(seconds[True] / seconds[False])
    cost = statistics.median(ratios[WARM_UP:]) - 1
    figure(f"cost of a measured step by {way}, in plain steps", cost)

    assert meter.measured_steps >= ROUNDS
