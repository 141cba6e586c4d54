# SPDX-License-Identifier: Apache-2.0
"""Fits by a Lightning Trainer on forked ranks, and what each rank saw."""

import importlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import devices
import lightning.pytorch as L
import pytest
import torch
from huge_pages import use_huge_pages
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from ranks import as_torchrun, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from noisescale import NoiseScaleMonitor

FEATURES, CLASSES = 8, 3


def data(examples: int = 100, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, FEATURES, generator=generator)
    noise = torch.randn(examples, CLASSES, generator=generator)
    return TensorDataset(x, (x[:, :CLASSES] + noise).argmax(1))


def both_loggers(folder: Path) -> list[Any]:
    """Loggers into the folders "board" (TensorBoard) and "csv"."""
    return [
        TensorBoardLogger(folder, name="board", version=""),
        CSVLogger(folder, name="csv", version=""),
    ]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class _Spoils(torch.autograd.Function):
    """The identity; its backward pass is spoiled for any other, as losses that save memory do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (factor,) = ctx.saved_tensors
        result = gradient * factor
        factor.data.zero_()
        return result


class Opaque(nn.Module):
    """A linear map whose examples no formula tells apart, and that stands one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((FEATURES, CLASSES), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return _Spoils.apply(x @ self.weight)


def opaque_network() -> nn.Module:
    return Opaque()


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


def classifier(
    package: ModuleType = L, net: nn.Module | None = None, lr: float = 0.1, sharded: bool = False
) -> Any:
    class Classifier(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network() if net is None else net

        def configure_model(self) -> None:
            if sharded and not isinstance(self.net, FSDPModule):
                if (tensor := self.device_mesh["tensor_parallel"]).size() > 1:
                    parallelize_module(self.net, tensor, plan_of(self.net))
                for child in [c for c in self.net.children() if list(c.parameters())]:
                    fully_shard(child, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def test_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=lr)

    return Classifier()


def plan_of(net: nn.Module) -> dict[str, Any]:
    """Share out the first and the last linear layer over ranks; others lie outside of the plan."""
    first, *_, last = (name for name, child in net.named_children() if isinstance(child, nn.Linear))
    return {
        first: ColwiseParallel(output_layouts=Replicate()),
        last: RowwiseParallel(input_layouts=Replicate()),
    }


def loader(batch_size: int = 8, examples: int = 100) -> DataLoader[Any]:
    return DataLoader(data(examples), batch_size=batch_size)


def trainer(ranks: int = 2, package: ModuleType = L, **options: Any) -> Any:
    """A quiet Trainer on forked ranks."""
    defaults: dict[str, Any] = {
        "accelerator": accelerator(),
        "devices": ranks,
        "strategy": ddp() if ranks > 1 else "auto",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return package.Trainer(**{**defaults, **options})


def accelerator() -> Any:
    """Of the device that tests run on."""
    if devices.name == "fake":
        from fake_device.lightning import FakeAccelerator

        return FakeAccelerator()
    return devices.name


def ddp(**options: Any) -> Any:
    """DDP on forked ranks."""
    if devices.name == "fake":
        from fake_device.lightning import FakeDDP

        return FakeDDP(start_method="fork", **options)
    return DDPStrategy(start_method="fork", **options) if options else "ddp_fork"


def fit(
    *callbacks: Any,
    ranks: int = 2,
    package: ModuleType = L,
    model: Any = None,
    train_loader: Any = None,
    ckpt_path: Any = None,
    results: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Fit on `ranks` processes; return `results(trainer, module)` of every rank.

    It is called when the fit has ended; by default it returns what the monitor knows then.
    """
    _import_for_ranks()
    with tempfile.TemporaryDirectory() as folder:
        recorder = _recorder(package, Path(folder), results or monitored)
        fitting = trainer(ranks, package, callbacks=[*callbacks, recorder], **options)
        fitting.fit(
            classifier(package) if model is None else model,
            loader() if train_loader is None else train_loader,
            ckpt_path=ckpt_path,
        )
        return [torch.load(Path(folder) / f"{rank}", weights_only=False) for rank in range(ranks)]


def fit_here(
    *callbacks: Any,
    ranks: int = 1,
    package: ModuleType = L,
    model: Any = None,
    train_loader: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Fit in this process, which may be one of some ranks; return the Trainer."""
    options = {"strategy": "auto" if ranks == 1 else "ddp", "callbacks": list(callbacks), **options}
    fitting = trainer(ranks, package, **options)
    fitting.fit(
        classifier(package) if model is None else model,
        loader() if train_loader is None else train_loader,
        ckpt_path=ckpt_path,
    )
    return fitting


def fits_on_ranks(*fits: Callable[[], Any], ranks: int = 2) -> list[tuple[Any, ...]]:
    """What each of some fits returns on each rank, one after the other in one group."""
    _import_for_ranks()
    of_ranks = on_ranks(ranks, as_torchrun(lambda: [one() for one in fits]))
    return list(zip(*of_ranks, strict=True))


def _import_for_ranks() -> None:
    """Import what optimizers import once, and not in each rank."""
    importlib.import_module("torch._dynamo")
    use_huge_pages()


@contextmanager
def heard() -> Iterator[list[str]]:
    """All that a block warns of, in a list that is full when the block has ended."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught]


def check_norms(steps: Iterable[Any], expected: Iterable[Any], rel: float = 2e-6) -> None:
    """Compare the norms and sizes of steps with those of an oracle."""
    for got, want in zip(steps, expected, strict=True):
        assert got.small_sq_norm == pytest.approx(want.small_sq_norm, rel=rel)
        assert got.big_sq_norm == pytest.approx(want.big_sq_norm, rel=rel)
        assert got.small_batch == pytest.approx(want.small_batch)
        assert got.big_batch == pytest.approx(want.big_batch)


class NotFinite(L.Callback):
    """Spoils gradients where `bad(trainer)` is true, and leaves the parameters as they are."""

    def __init__(self, bad: Callable[[Any], bool], value: float = math.nan) -> None:
        self.bad, self.value = bad, value

    def on_fit_start(self, fitting: Any, module: Any) -> None:
        def spoil(gradient: Tensor) -> Tensor | None:
            return torch.full_like(gradient, self.value) if self.bad(fitting) else None

        def leave_out(*_: Any, **__: Any) -> None:
            for p in module.parameters():
                p.grad.nan_to_num_(0, 0, 0)

        next(module.parameters()).register_hook(spoil)
        module.configure_gradient_clipping = leave_out


class FsdpAnywhere(FSDPStrategy):
    """FSDP1 without Lightning's check for a GPU, on the device that tests run on."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            device_id=self.root_device,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            **self.kwargs,
        )


def fit_sharded(
    *callbacks: Any,
    ranks: int = 2,
    tensor_parallel: int = 1,
    strategy: Any = None,
    results: Callable[[Any, Any], Any],
    **options: Any,
) -> list[Any]:
    """Fit under FSDP2, as `fit` does, or by another strategy.

    For FSDP2 the model has to be `classifier(sharded=True)`.

    Lightning's launcher would carry weights back to this process, which sharded ones do not
    survive: so the ranks are ours, and Lightning finds itself under torchrun.
    """

    def on_one() -> Any:
        by = strategy or ModelParallelStrategy(ranks // tensor_parallel, tensor_parallel)
        fitting = fit_here(*callbacks, ranks=ranks, strategy=by, **options)
        return results(fitting, fitting.lightning_module)

    return list(fits_on_ranks(on_one, ranks=ranks)[0])


def monitored(fitting: Any, module: Any = None) -> dict[str, Any]:
    (monitor,) = [c for c in fitting.callbacks if isinstance(c, NoiseScaleMonitor)]
    state = monitor.state_dict()
    return {
        "noise_scale": monitor.noise_scale,
        "history": {name: column.tolist() for name, column in monitor.history.items()},
        "metrics": {k: v.item() for k, v in fitting.callback_metrics.items()},
        "state": state,
        "meter": untimed(state["optimizers"][0]["meter"]) if "optimizers" in state else {},
    }


def untimed(meter: dict[str, Any]) -> dict[str, Any]:
    """The state of a meter without the seconds of its steps."""
    return meter | {"pace": {**meter["pace"], "seconds": None}}


def _recorder(package: ModuleType, folder: Path, results: Callable[[Any, Any], Any]) -> Any:
    class Recorder(package.Callback):
        def on_fit_end(self, fitting: Any, module: Any) -> None:
            torch.save(results(fitting, module), folder / f"{fitting.global_rank}")

    return Recorder()
