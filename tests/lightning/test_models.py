# SPDX-License-Identifier: Apache-2.0
"""Models whose gradients are odd: frozen, adapted, tied, unused, normalised, compiled parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from brute_force import brute_force
from fits import CLASSES, FEATURES, classifier, fit, loader, needs_complex_broadcasts, trainer
from lightning.pytorch.strategies import DDPStrategy
from ranks import in_a_fork
from torch import Tensor, nn
from zoo import ZOO, Adapter, PartlyUnused, Tied

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

EXAMPLES, BATCH_SIZE = 96, 8


class SpectralConvolution(nn.Module):
    """Multiply the lowest frequencies by complex weights, as Fourier neural operators do."""

    def __init__(self, channels: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / 4)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bim,iom->bom", low, self.weight)
        return torch.fft.irfft(mixed, n=x.shape[-1])


def fourier_operator() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 4, 1),
        SpectralConvolution(),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * FEATURES, CLASSES),
    )


def frozen() -> nn.Module:
    first = nn.Linear(FEATURES, 16).requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(16, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen": frozen,
    "adapters": lambda: nn.Sequential(Adapter(FEATURES, 16), nn.Tanh(), Adapter(16, CLASSES)),
    "tied": Tied,
    "unused": PartlyUnused,
    "complex": fourier_operator,
    # Every part is normalised by its own statistics: that is the gradient that is measured.
    "batch normalisation": lambda: nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def check(results: list[list[StepNorms]], expected: list[tuple[float, ...]]) -> None:
    for steps in results:
        for got, (small, big, small_size, big_size) in zip(steps, expected, strict=True):
            assert got.small_sq_norm == pytest.approx(small, rel=2e-6)
            assert got.big_sq_norm == pytest.approx(big, rel=2e-6)
            assert (got.small_batch, got.big_batch) == pytest.approx((small_size, big_size))


@pytest.mark.parametrize(
    ("compared", "ranks", "accumulated", "strategy"),
    [
        ("rank", 2, 2, "ddp_fork_find_unused_parameters_true"),
        ("micro_batch", 1, 3, "auto"),
    ],
)
@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[needs_complex_broadcasts] * (m == "complex")) for m in MODELS]
)
def test_what_is_trained_is_measured(
    model: str,
    compared: Any,
    ranks: int,
    accumulated: int,
    strategy: str,
    recorded: list[StepNorms],
) -> None:
    results = fit(
        NoiseScaleMonitor(small_batch=compared),
        ranks=ranks,
        strategy=strategy,
        model=classifier(net=made(model), lr=0.0),
        train_loader=loader(BATCH_SIZE, EXAMPLES),
        accumulate_grad_batches=accumulated,
        results=lambda *_: list(recorded),
    )

    check(
        results,
        brute_force(
            made(model),
            ranks=ranks,
            accumulated=accumulated,
            compared=compared,
            examples=EXAMPLES,
            batch_size=BATCH_SIZE,
        ),
    )


@needs_complex_broadcasts
def test_complex_gradients_are_measured_where_they_are_the_bucket(
    recorded: list[StepNorms],
) -> None:
    strategy = DDPStrategy(start_method="fork", gradient_as_bucket_view=True)

    results = fit(
        NoiseScaleMonitor(),
        strategy=strategy,
        model=classifier(net=made("complex"), lr=0.0),
        train_loader=loader(BATCH_SIZE, EXAMPLES),
        results=lambda *_: list(recorded),
    )

    check(
        results,
        brute_force(
            made("complex"),
            ranks=2,
            accumulated=1,
            compared="rank",
            examples=EXAMPLES,
            batch_size=BATCH_SIZE,
        ),
    )


@pytest.mark.parametrize(("compared", "ranks"), [("rank", 2), ("micro_batch", 1)])
def test_a_compiled_model_is_measured(compared: Any, ranks: int, recorded: list[StepNorms]) -> None:
    measured = in_a_fork(check_compiled) if ranks == 1 else check_compiled
    measured(compared, ranks, recorded)


def check_compiled(compared: Any, ranks: int, recorded: list[StepNorms]) -> None:
    compiled = torch.compile(classifier(net=made("frozen"), lr=0.0), backend="aot_eager")

    results = fit(
        NoiseScaleMonitor(small_batch=compared),
        ranks=ranks,
        strategy="ddp_fork" if ranks > 1 else "auto",
        model=compiled,
        train_loader=loader(BATCH_SIZE, EXAMPLES),
        accumulate_grad_batches=2,
        results=lambda *_: list(recorded),
    )

    check(
        results,
        brute_force(
            made("frozen"),
            ranks=ranks,
            accumulated=2,
            compared=compared,
            examples=EXAMPLES,
            batch_size=BATCH_SIZE,
        ),
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [("reused", "must have"), ("compiled", 'must not be compiled with `small_batch="example"`')],
)
def test_examples_that_were_asked_for_and_cannot_be_told_apart_are_not_measured(
    name: str, why: str
) -> None:
    monitor = NoiseScaleMonitor(small_batch="example")

    with pytest.warns(UserWarning, match=f"has nothing to measure. `model` {why}"):
        trainer(1, strategy="auto", callbacks=[monitor]).fit(ZOO[name].module(), loader())
