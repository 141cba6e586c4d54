# SPDX-License-Identifier: Apache-2.0
"""`measure`, against the gradients of all examples one by one, and what it says of the ways."""

import math
import random
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from ranks import as_torchrun, on_ranks
from refused import refused
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from noisescale import Measurement, NoiseScaleMonitor, measure, read_run
from noisescale.bounded import Bounded
from noisescale.frozen.comparison import Comparison, Order, Way

ON_CPU: dict[str, Any] = {"accelerator": "cpu"}


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float(), torch.tensor(y)


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), *between, nn.Tanh(), nn.Linear(16, 10))


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def loader(batch_size: int = 32, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*digits()), batch_size=batch_size, **options)


def measured(data: Any, **options: Any) -> Measurement:
    """Of the network, with the same random numbers each time."""
    torch.manual_seed(0)
    return measure(network(), data, **{"loss": loss_of, **ON_CPU, **options})


@cache
def truth() -> float:
    """tr(Σ)/|G|² of the network, from the gradient of each example."""
    (x, y), net = digits(), network()
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
    told = list[str]()

    found = measured(loader(shuffle=True), progress=told.append)

    scale = found.noise_scale
    assert scale.low < truth() < scale.high < 2.25 * scale.low
    assert judged(found) == {"half": "not contradicted", "micro_batch": "right"}
    assert 1.25 < found.ways[0].factor < 2
    assert "A factor of 1." in " ".join(found.to_text(details=True).split())
    assert found.batch_size == 32
    assert found.order.at_random
    assert "narrow" in found.stopped
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

    assert judged(found) == {"half": "not measured", "micro_batch": "right"}
    assert "BatchNorm" in found.ways[0].reason
    assert found.noise_scale.steps == 20
    assert found.groups["head"].noise_trace < found.noise_scale.noise_trace
    assert "accumulate_grad_batches=2" in found.to_text()


def test_coupled_losses_are_not_measured_by_halves() -> None:
    """Halves of a loss over pairs of rows are taken for what they are not."""

    def sorted_loss(net: nn.Module, batch: Any) -> Tensor:
        each = nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return each.sort(descending=True).values[:8].mean()

    found = measured(loader(shuffle=True), loss=sorted_loss, ways=["half"], batches=60)

    assert judged(found) == {"half": "not measured", "micro_batch": "right"}


def by_class(shuffled: bool = False) -> TensorDataset:
    x, y = digits()
    order = torch.randperm(len(y)) if shuffled else y.argsort(stable=True)
    return TensorDataset(x[order], y[order])


def test_examples_in_the_order_of_their_classes_are_no_independent_draws() -> None:
    found = measured(DataLoader(by_class(), batch_size=16), ways=[])

    assert not found.order.independent
    assert found.order.successive.ratio.high < 0.8
    # The number is that of shuffled batches.
    assert found.noise_scale.low < truth() < found.noise_scale.high
    assert "shuffle=True" in found.to_text()


def test_examples_that_were_shuffled_before_are_independent() -> None:
    torch.manual_seed(0)
    found = measured(DataLoader(by_class(shuffled=True), batch_size=16), ways=[])

    assert found.order.independent
    assert found.order.shuffled.judgement != "no"
    assert found.noise_scale.low < truth() < found.noise_scale.high


def test_a_stream_in_order_has_no_number() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from by_class()

    found = measured(DataLoader(Stream(), batch_size=16), ways=[])

    assert not found.noise_scale.resolved
    assert math.isnan(found.noise_scale.value)
    assert "not known" in found.document().headline


@pytest.mark.parametrize(("run", "examples"), [(1, 12_000), (1500, 12_000), (1500, 3_000)])
def test_a_stream_that_is_alike_for_long_is_found_out_far_on(run: int, examples: int) -> None:
    """A buffer of neighbours looks like random draws, as far as the first batches go.

    Where the stream ends before, its next pass is read on in.
    """
    x, y = digits()
    classes = [(y == digit).nonzero().flatten() for digit in range(3)]
    passes = count()

    class Buffered(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            draw = random.Random(next(passes))
            kept: list[int] = []
            for number in range(examples):
                members = classes[number // run % 3 if run > 1 else draw.randrange(3)]
                kept.append(int(members[draw.randrange(len(members))]))
                if len(kept) > 100:
                    index = kept.pop(draw.randrange(100))
                    yield x[index], y[index]

    found = measured(DataLoader(Buffered(), batch_size=16), ways=[])

    assert found.order.independent == found.noise_scale.resolved == (run == 1)


def test_batches_far_on_decide_where_successive_ones_tell_nothing() -> None:
    unknown = Comparison(Bounded(0.05, 0.03, math.inf), 43)

    assert Order(False, unknown).independent
    assert not Order(False, unknown, near=Comparison(Bounded(0.004, 0.003, 0.005), 6)).independent


@pytest.mark.parametrize("batch", [8.0, 64.0])
@pytest.mark.parametrize("ratio", [0.61, 1.0, 1.05])
def test_a_way_shows_what_follows_from_its_own_signal(ratio: float, batch: float) -> None:
    """The squared norm of a batch has no error: what a way does not count as noise is signal."""
    trace, signal = 96.0, 1.5
    sq_norm = signal + trace / batch
    by_way = ratio * trace
    wanted = by_way / (sq_norm - by_way / batch) / (trace / signal)

    exact = [Bounded(x, x, x) for x in (ratio, trace / signal)]
    found = Comparison(exact[0], 60).noise_scale_ratio(exact[1], batch)

    assert found.value == found.low == found.high == pytest.approx(wanted)


def test_bounds_of_what_a_way_shows_say_whether_it_is_right() -> None:
    scale = Bounded(24.0, 12.0, 48.0)

    def way(*ratio: float) -> Way:
        one = Comparison(Bounded(*ratio), 60)
        return Way("half", one, shown=one.noise_scale_ratio(scale, 1.0))

    assert way(1, 0.999, 1.001).judgement == "right"
    assert way(0.61, 0.5, 0.7).judgement == "wrong"
    assert way(0.99, 0.97, 1.01).judgement == "not contradicted"
    assert way(0.99, 0.97, 1.01).factor == pytest.approx((1 + 0.03 * 48) / 0.97)
    assert math.isinf(way(1, 0.9, 1.1).factor)


class OneClass(Sampler[list[int]]):
    """Batches of one class each, drawn at random."""

    def __init__(self) -> None:
        self.y = digits()[1]

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(40):
            rows = (self.y == torch.randint(10, ())).nonzero()[:, 0]
            yield rows[torch.randint(len(rows), (16,))].tolist()


def test_batches_of_one_class_are_independent_and_no_random_draws() -> None:
    data = DataLoader(TensorDataset(*digits()), batch_sampler=OneClass())

    found = measured(data, ways=["half"], batches=80)

    assert judged(found) == {"half": "wrong", "micro_batch": "not contradicted"}
    assert found.order.shuffled.ratio.low > 5
    assert "no random draws" in found.to_text()


def test_ranks_make_one_batch_and_are_judged() -> None:
    def one() -> Any:
        found = measured(loader(16, shuffle=True), devices=2, strategy="ddp")
        return found.noise_scale, found.batch_size, judged(found)

    first, second = on_ranks(2, as_torchrun(one))

    assert first == second
    scale, batch_size, ways = first
    assert (batch_size, ways) == (32, {"rank": "not contradicted"})
    assert scale.low < truth() < scale.high


def test_a_dataset_takes_a_batch_size_and_time_ends_it() -> None:
    found = measured(TensorDataset(*digits()), batch_size=8, ways=[], seconds=1e-9)

    assert found.batch_size == 8
    assert found.noise_scale.steps == 10
    assert "time" in found.stopped


@pytest.mark.parametrize(
    ("name", "options", "got"),
    [
        ("batches", {"batches": 5}, "5"),
        ("width", {"width": 1.0}, "1.0"),
        ("seconds", {"seconds": 0.0}, "0.0"),
        ("ways", {"ways": ["example"]}, "'example'"),
        ("batch_size", {"data": TensorDataset(torch.zeros(1))}, "none"),
        ("target", {"data": None}, "only a network"),
        ("target", {"target": 3}, "int"),
        ("loss", {"loss": None}, "none for Sequential"),
        ("data", {"data": loader(400)}, "5"),
    ],
)
def test_bad_input(name: str, options: dict[str, Any], got: str) -> None:
    arguments = {"target": network(), "data": loader(shuffle=True), "loss": loss_of} | options
    with refused(name, got=got):
        measure(arguments.pop("target"), arguments.pop("data"), **arguments, **ON_CPU)


def test_a_checkpoint_that_is_not_there_is_refused() -> None:
    with refused("checkpoint", error=OSError):
        measured(loader(shuffle=True), checkpoint="no.ckpt")


def test_a_measurement_joins_the_run_of_its_checkpoint(tmp_path: Path) -> None:
    def fitted(folder: Path, net: nn.Module) -> Path:
        module = Module()
        module.net = net
        save = ModelCheckpoint(folder / "checkpoints", filename="a")
        monitor = NoiseScaleMonitor(small_batch="half")
        options = {"max_steps": 60, "callbacks": [monitor, save], "logger": CSVLogger(folder, "")}
        L.Trainer(**options, **ON_CPU, enable_progress_bar=False, enable_model_summary=False).fit(
            module
        )
        return folder / "checkpoints" / "a.ckpt"

    torch.manual_seed(0)
    checkpoint = fitted(tmp_path, network())
    folder = tmp_path / "version_0"
    module = Module()
    module.net = network()

    alone = measure(module, checkpoint=checkpoint, batches=60, ways=[], **ON_CPU)
    found = measure(module, checkpoint=checkpoint, run=folder, batches=60, ways=[], **ON_CPU)

    assert alone.added_to is None
    assert "give the folder of the run: --run FOLDER" in " ".join(alone.document().written)
    assert found.document().written == [
        f"Added to {folder / 'noise_scale.jsonl'} as the look at step 60"
    ]
    (look,) = read_run(folder).looks
    assert (look.step, look.noise_scale) == (60, found.noise_scale.value)
    with refused("run", got="none"):
        measure(module, run=folder, **ON_CPU)
    with refused("run", error=OSError):
        measure(module, checkpoint=checkpoint, run=tmp_path, **ON_CPU)
    record = folder / "noise_scale.jsonl"
    before = record.read_bytes()
    with refused("run"):
        measure(module, checkpoint=checkpoint, run=folder, unit="tokens", **ON_CPU)
    assert record.read_bytes() == before
