# SPDX-License-Identifier: Apache-2.0
"""Models whose gradients are odd: frozen, adapted, tied, unused, normalised, compiled parts."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from brute_force import brute_force
from fits import CLASSES, FEATURES, classifier, fit, loader, trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from noisescale import NoiseScaleMonitor
from noisescale.collectors.rows.step_norms import StepNorms

EXAMPLES, BATCH_SIZE = 96, 8


class Adapter(nn.Module):
    """A frozen linear map plus a trained one of low rank (Hu et al. 2021)."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(features_in, features_out).requires_grad_(False)
        self.down = nn.Linear(features_in, 2, bias=False)
        self.up = nn.Linear(2, features_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES)
        self.decode = nn.Linear(FEATURES, FEATURES)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.decode(self.encode(x).tanh()))
        return out


class PartlyUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(FEATURES, CLASSES)
        self.unused = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


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
@pytest.mark.parametrize("model", MODELS)
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


class Reused(nn.Module):
    """The only layer's weight is used a second time, which only the gradient itself shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.linear(x), self.linear.weight[:CLASSES])


def test_training_goes_on_where_no_example_can_be_told_apart() -> None:
    monitor = NoiseScaleMonitor()
    module = classifier(net=Reused())
    before = module.net.linear.weight.detach().clone()

    with pytest.warns(UserWarning, match="single examples cannot be told apart") as warned:
        trainer(1, strategy="auto", callbacks=[monitor]).fit(module, loader())

    assert len([w for w in warned if "NoiseScaleMonitor" in str(w.message)]) == 1
    assert str(monitor.noise_scale) == "not measured yet"
    assert not torch.equal(before, module.net.linear.weight)
    with pytest.raises(ValueError, match=r"^`model` must have"):
        trainer(1, strategy="auto", callbacks=[NoiseScaleMonitor(small_batch="example")]).fit(
            classifier(net=Reused()), loader()
        )


def test_examples_of_a_compiled_module_are_refused() -> None:
    compiled = torch.compile(classifier(net=made("frozen")), backend="aot_eager")

    with pytest.raises(ValueError, match=r"^`model` must not be compiled where examples are"):
        trainer(1, strategy="auto", callbacks=[NoiseScaleMonitor(small_batch="example")]).fit(
            compiled, loader()
        )
    with pytest.warns(UserWarning, match="`model` must not be compiled"):
        trainer(1, strategy="auto", callbacks=[NoiseScaleMonitor()]).fit(compiled, loader())


def test_parameters_that_are_unfrozen_later_are_told_once() -> None:
    class Unfreeze(L.Callback):
        def on_train_epoch_start(self, fitting: Any, module: Any) -> None:
            if fitting.current_epoch:
                module.net.requires_grad_(True)

    with pytest.warns(UserWarning, match="Parameters have been unfrozen") as warned:
        trainer(
            1,
            strategy="auto",
            max_epochs=3,
            accumulate_grad_batches=2,
            callbacks=[NoiseScaleMonitor(), Unfreeze()],
        ).fit(classifier(net=frozen()), loader())

    assert len([w for w in warned if "unfrozen" in str(w.message)]) == 1
