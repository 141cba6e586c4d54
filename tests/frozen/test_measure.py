# SPDX-License-Identifier: Apache-2.0
"""`measure`, against the gradients of all examples one by one, and what it says of the ways."""

import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from ranks import as_torchrun, on_ranks
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from noisescale import Measurement, measure

ON_CPU: dict[str, Any] = {"accelerator": "cpu"}


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float(), torch.tensor(y)


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), *between, nn.Tanh(), nn.Linear(16, 10))


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def loader(batch_size: int = 32, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*digits()), batch_size=batch_size, **options)


def truth_of(net: nn.Module) -> float:
    x, y = digits()
    parameters = {name: p.detach().double() for name, p in net.named_parameters()}

    def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(net, parameters, (x,)), y)

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x.double(), y)
    gradients = torch.cat([g.flatten(1) for g in each.values()], dim=1)
    mean = gradients.mean(dim=0)
    return float((gradients - mean).square().sum(dim=1).mean() / mean.square().sum())


def judged(found: Measurement) -> dict[str, str]:
    return {way.name: way.judgement for way in found.ways}


def test_the_interval_holds_the_truth_and_the_ways_are_right() -> None:
    torch.manual_seed(0)
    net, told = network(), list[str]()

    found = measure(net, loader(shuffle=True), loss=loss_of, progress=told.append, **ON_CPU)

    scale = found.noise_scale
    assert scale.low < truth_of(net) < scale.high < 2.25 * scale.low
    assert judged(found) == {"half": "yes", "example": "yes", "micro_batch": "yes"}
    assert found.batch_size == 32
    assert found.order.at_random
    assert "interval was narrow enough" in found.stopped
    assert "batches: " in told[0]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(nn.BatchNorm1d(16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return loader(shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_rows_that_act_on_each_other_are_told() -> None:
    torch.manual_seed(0)
    found = measure(Module(), batches=20, groups={"head": r"net\.3"}, **ON_CPU)

    assert judged(found) == {"half": "no", "example": "no", "micro_batch": "yes"}
    assert "BatchNorm" in found.ways[0].reason
    assert "nothing to measure" not in found.ways[0].reason
    assert found.noise_scale.steps == 20
    assert found.groups["head"].noise_trace < found.noise_scale.noise_trace
    text = found.to_text()
    assert "accumulate_grad_batches=2" in text


def test_coupled_losses_are_found_out_by_the_ratio() -> None:
    """Halves of a loss over pairs of rows are taken for what they are not."""

    def sorted_loss(net: nn.Module, batch: Any) -> Tensor:
        each = nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return each.sort(descending=True).values[:8].mean()

    torch.manual_seed(0)
    found = measure(
        network(), loader(shuffle=True), loss=sorted_loss, ways=["half"], batches=60, **ON_CPU
    )

    (half, micro_batch) = found.ways
    assert half.judgement == "no"
    assert micro_batch.judgement == "yes"


def by_class(shuffled: bool = False) -> DataLoader[Any]:
    x, y = digits()
    order = torch.randperm(len(y)) if shuffled else y.argsort(stable=True)
    return DataLoader(TensorDataset(x[order], y[order]), batch_size=16)


def test_examples_in_the_order_of_their_classes_are_no_independent_draws() -> None:
    torch.manual_seed(0)
    net = network()

    found = measure(net, by_class(), loss=loss_of, ways=[], **ON_CPU)

    assert not found.order.independent
    assert found.order.successive is not None
    assert found.order.successive.ratio.high < 0.8
    # The number is that of shuffled batches.
    assert found.noise_scale.low < truth_of(net) < found.noise_scale.high
    text = found.to_text()
    assert "no independent draws" in text
    assert "shuffle=True" in text


def test_examples_that_were_shuffled_before_are_independent() -> None:
    torch.manual_seed(0)
    net = network()

    found = measure(net, by_class(shuffled=True), loss=loss_of, ways=[], **ON_CPU)

    assert found.order.independent
    assert found.order.shuffled is not None
    assert found.order.shuffled.judgement != "no"
    assert found.noise_scale.low < truth_of(net) < found.noise_scale.high


def test_a_stream_in_order_has_no_number() -> None:
    torch.manual_seed(0)
    x, y = digits()
    order = y.argsort(stable=True)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(x[order], y[order], strict=True)

    found = measure(network(), DataLoader(Stream(), batch_size=16), loss=loss_of, ways=[], **ON_CPU)

    assert not found.noise_scale.resolved
    assert math.isnan(found.noise_scale.value)
    assert "The noise scale is not known" in found.document().headline


class OneClass(Sampler[list[int]]):
    """Batches of one class each, drawn at random."""

    def __init__(self) -> None:
        self.y = digits()[1]

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(40):
            rows = (self.y == torch.randint(10, ())).nonzero()[:, 0]
            yield rows[torch.randint(len(rows), (16,))].tolist()


def test_batches_of_one_class_are_independent_and_no_random_draws() -> None:
    torch.manual_seed(0)

    found = measure(
        network(),
        DataLoader(TensorDataset(*digits()), batch_sampler=OneClass()),
        loss=loss_of,
        ways=["half"],
        batches=80,
        **ON_CPU,
    )

    assert judged(found) == {"half": "no", "micro_batch": "yes"}
    assert found.order.shuffled is not None
    assert found.order.shuffled.ratio.low > 5
    assert "no random draws of examples" in found.to_text()


def test_ranks_make_one_batch_and_are_judged() -> None:
    def one() -> Any:
        torch.manual_seed(0)
        x, y = digits()
        data = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
        found = measure(network(), data, loss=loss_of, devices=2, strategy="ddp", **ON_CPU)
        return found.noise_scale, found.batch_size, judged(found)

    first, second = on_ranks(2, as_torchrun(one))

    assert first == second
    scale, batch_size, ways = first
    assert (batch_size, ways) == (32, {"rank": "yes"})
    assert scale.low < truth_of(network()) < scale.high


def test_a_checkpoint_is_measured_and_the_module_left_alone(tmp_path: Any) -> None:
    module, trained = Module(), Module()
    L.Trainer(
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **ON_CPU,
    ).fit(trained)
    trained.trainer.save_checkpoint(tmp_path / "a.ckpt")

    torch.manual_seed(0)
    found = measure(module, checkpoint=tmp_path / "a.ckpt", batches=10, ways=[], **ON_CPU)
    torch.manual_seed(0)
    same = measure(trained, batches=10, ways=[], **ON_CPU)

    assert found.step == 5
    assert found.noise_scale == same.noise_scale
    assert "at step 5" in found.to_text()


def test_transformers_trainer_is_a_target(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers_fits import language_model, sentences

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=8, report_to=[]
    )
    trainer = Trainer(language_model(), arguments, train_dataset=sentences())
    before = [p.detach().clone() for p in trainer.model.parameters()]

    found = measure(trainer, batches=12, unit="sequences", **ON_CPU)

    assert found.batch_size == 8
    assert found.noise_scale.steps == 12
    assert found.noise_scale.unit == "sequences"
    for p, kept in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(p, kept)


def test_a_dataset_takes_a_batch_size_and_time_ends_it() -> None:
    torch.manual_seed(0)

    found = measure(
        network(),
        TensorDataset(*digits()),
        loss=loss_of,
        batch_size=8,
        ways=[],
        seconds=1e-9,
        **ON_CPU,
    )

    assert found.batch_size == 8
    assert found.noise_scale.steps == 10
    assert "time was over" in found.stopped


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": 5}, '`batches` must be "auto" or at least 10, got 5'),
        ({"width": 1.0}, "`width` must be more than 1"),
        ({"seconds": 0.0}, "`seconds` must be positive"),
        ({"data": TensorDataset(*digits())}, "`batch_size` must be given with a data set"),
        ({"data": None}, "`target` must come with data"),
        ({"loss": None}, "`loss` must be given for a network that is no LightningModule"),
        ({"target": 3}, "`target` must be a module of torch with a `loss`, got int"),
        ({"data": loader(400)}, "`data` must have at least 10 different batches, got 5"),
        ({"strategy": "ddp_fork", "devices": 2}, "`strategy` must train in this process"),
        ({"checkpoint": "no.ckpt"}, "`checkpoint` must be a file"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    arguments = {"target": network(), "data": loader(shuffle=True), "loss": loss_of} | options
    with pytest.raises((ValueError, OSError), match=message):
        measure(arguments.pop("target"), arguments.pop("data"), **arguments, **ON_CPU)
