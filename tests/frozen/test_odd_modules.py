# SPDX-License-Identifier: Apache-2.0
"""Modules and data that change, repeat or hide something, against the noise scale of one by one."""

from collections.abc import Iterator
from typing import Any

import fits
import lightning.pytorch as L
import pytest
import torch
from refused import refused
from tiers import slow
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from noisescale import Measurement, measure
from noisescale.history.optimizers import OptimizerKind, OptimizerMix

ON_CPU: dict[str, Any] = {"accelerator": "cpu", "ways": []}


def numbers(count: int = 2000) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=g)
    return x, x @ torch.randn(8, 1, generator=g) + torch.randn(count, 1, generator=g)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 1)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def truth(x: Tensor, y: Tensor) -> float:
    """tr(Σ)/|G|² by the gradients of a linear model in closed form."""
    net = linear().double()
    error = 2 * (net(x.double()) - y.double()).detach()
    gradients = torch.cat([error * x.double(), error], dim=1)
    mean = gradients.mean(dim=0)
    return float((gradients - mean).square().sum(dim=1).mean() / mean.square().sum())


TRUTH = truth(*numbers())


def loader(batch_size: int = 32, count: int = 2000, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(*numbers(count))
    return DataLoader(data, batch_size=batch_size, **{"shuffle": True, **options})


def of_linear(data: Any, **options: Any) -> Measurement:
    return measure(linear(), data, **{"loss": loss_of, **ON_CPU, **options})


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = linear()
        self.register_buffer("scale", torch.ones(8))
        self.teacher = linear().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, (batch[0] * self.scale, batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def holds(found: Measurement) -> bool:
    scale = found.noise_scale
    return scale.low < TRUTH < scale.high < 3 * scale.low


class MadeAtTheStart(Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale.zero_()
        self.net.weight.requires_grad_(False)

    def on_train_start(self) -> None:
        self.scale.fill_(1.0)

    def on_train_epoch_start(self) -> None:
        self.net.weight.requires_grad_(True)


class Reassigns(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        self.scale = self.scale * 0.5


class TeachesAnew(Module):
    """The teacher's weights are those of the net after each batch, and not in the first one."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.teacher.weight)
        nn.init.zeros_(self.teacher.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return loss_of(self.net, (x, y + self.teacher(x)))

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher.load_state_dict(self.net.state_dict())


class ReadsSchedules(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.lr_schedulers().get_last_lr()[0])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        assert self.trainer.max_epochs > 0  # type: ignore[operator]  # it has some
        # Of fewer steps than there are batches.
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SkipsBatches(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, *_: Any) -> None:
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p)


@pytest.mark.parametrize(
    "kind", [Module, MadeAtTheStart, Reassigns, TeachesAnew, ReadsSchedules, SkipsBatches]
)
def test_what_a_module_does_beside_its_steps_changes_nothing(kind: Any) -> None:
    torch.manual_seed(1)
    assert holds(measure(kind(), loader(), **ON_CPU))


class Fades(Module):
    """In an attribute that nobody can see."""

    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.factor *= 0.9
        return self.factor * super().training_step(batch, batch_idx)


def test_noise_that_changes_along_the_batches_has_no_number() -> None:
    found = measure(Fades(), loader(), batches=40, **ON_CPU)

    assert not found.noise_scale.resolved
    assert found.drifts


class Laid(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]  # until `setup`

    def setup(self, stage: str) -> None:
        if self.net is None:
            self.net = linear()


def test_a_checkpoint_is_loaded_after_setup_and_measured_as_what_left_it(tmp_path: Any) -> None:
    trained = Laid()
    trainer = fits.trainer(1, strategy="auto", max_epochs=None, max_steps=5)
    trainer.fit(trained, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    linear()  # draws what `setup` of a new module draws
    same = measure(trained, loader(), batches=10, **ON_CPU)

    found = measure(Laid(), loader(), checkpoint=tmp_path / "a.ckpt", batches=10, **ON_CPU)

    assert found.step == 5
    assert found.noise_scale == same.noise_scale


@pytest.mark.parametrize(("count", "batch"), [(60, 20), slow(64, 32), slow(100, 10)])
def test_small_data_sets_have_the_noise_scale_of_their_examples(count: int, batch: int) -> None:
    """Batches of an epoch share no example: they vary less, and halves of one do not."""
    torch.manual_seed(0)

    found = of_linear(loader(batch, count), ways=["half"], batches=60)

    scale = found.noise_scale
    assert scale.low < truth(*numbers(count)) < scale.high
    assert found.ways[0].judgement != "wrong"


def test_the_signal_of_a_small_data_set_is_not_what_an_epoch_cancels() -> None:
    """Whole epochs have the mean gradient itself, whatever the noise of their batches."""
    torch.manual_seed(0)
    x, y = numbers(60)
    net = linear()
    loss_of(net, (x, y)).backward()
    exact = sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None)

    found = of_linear(loader(12, 60), batches=100)

    assert found.noise_scale.grad_sq_norm == pytest.approx(exact, rel=0.005)


def test_a_batch_of_more_than_half_of_the_data_is_refused() -> None:
    with refused("batch_size", got="40 of 60"):
        of_linear(loader(40, 60))


def test_weights_that_vary_tell_nothing_of_the_order() -> None:
    x, y = numbers()

    class Unequal(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            g = torch.Generator().manual_seed(1)
            while True:
                count = 8 if torch.rand((), generator=g) < 0.5 else 400
                rows = torch.randint(len(x), (count,), generator=g)
                yield x[rows], y[rows]

    weights = {"batch_size_fn": lambda _: 8.0, "weight_fn": lambda batch: float(len(batch[0]))}
    found = of_linear(DataLoader(Unequal(), batch_size=None), batches=60, **weights)

    assert found.order.independent
    assert found.noise_scale.resolved


def in_batches(count: int) -> Iterator[Any]:
    x, y = numbers()
    for k in range(count):
        yield x[32 * k : 32 * k + 32], y[32 * k : 32 * k + 32]


def test_what_can_be_gone_through_once_ends() -> None:
    found = of_linear(in_batches(30), width=1.01)

    assert found.noise_scale.steps == 30
    assert "loader" in found.stopped
    with refused("data", got="5"):
        of_linear(in_batches(5))


def test_one_batch_that_makes_the_noise_is_told() -> None:
    batches = [(x * (9.0 if k == 2 else 1.0), y) for k, (x, y) in enumerate(in_batches(30))]

    assert "One batch makes" in of_linear(iter(batches), batches=30).to_text()


def test_batches_without_tensors_are_known_again() -> None:
    x, y = numbers()
    names = [f"{k}" for k in range(40)]

    def loss(net: nn.Module, batch: Any) -> Tensor:
        rows = [int(name) for name in batch]
        return loss_of(net, (x[rows], y[rows]))

    with refused("data", got="5"):
        of_linear(DataLoader(names, batch_size=8), loss=loss, batch_size_fn=len)  # type: ignore[arg-type]  # a list will do


def test_samplers_of_torch_draw_at_random() -> None:
    data = TensorDataset(*numbers())
    for sampler in (SubsetRandomSampler(range(1000)), WeightedRandomSampler([1.0] * 2000, 2000)):
        found = of_linear(DataLoader(data, batch_size=32, sampler=sampler), batches=10)
        assert found.order.at_random


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


def test_a_data_module_takes_another_batch_size_and_is_put_back() -> None:
    data = Data()

    found = measure(Module(), data, batch_size=64, batches=10, **ON_CPU)

    assert found.batch_size == 64
    assert data.trainer is None
    assert "train_dataloader" not in vars(data)


def test_a_network_is_measured_in_the_mode_to_train() -> None:
    modes = []

    def loss(net: nn.Module, batch: Any) -> Tensor:
        modes.append(net.training)
        return loss_of(net, batch)

    net = linear().eval()
    measure(net, loader(), loss=loss, batches=10, **ON_CPU)

    assert set(modes) == {True}
    assert not net.training


def test_transformers_trainer_is_a_target_with_its_precision_and_sampler(tmp_path: Any) -> None:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments
    from transformers_fits import Classifier, digits

    kinds = set()

    class Odd(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            kinds.add(torch.is_autocast_enabled("cpu"))
            return super().compute_loss(model, inputs)

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]  # a list

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=4, report_to=[], bf16=True
    )
    trainer = Odd(Classifier(), arguments, train_dataset=digits())
    before = [p.detach().clone() for p in trainer.model.parameters()]
    found = measure(trainer, batches=12, unit="sequences", **ON_CPU)

    scale = found.noise_scale
    assert (found.batch_size, scale.steps, scale.unit) == (4, 12, "sequences")
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert kinds == {True}
    assert found.optimizer == OptimizerMix(OptimizerKind.ADAM)  # its default
    assert not found.order.at_random
    with refused("target", got="a Trainer without `train_dataset`"):
        measure(Trainer(Classifier(), arguments), **ON_CPU)
