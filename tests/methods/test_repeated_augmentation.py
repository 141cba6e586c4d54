# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest
import torch
from fits import FEATURES, classifier, data, fit, loss_of, network
from ranks import on_ranks
from refused import refused
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from noisescale import NoiseScaleMeter, NoiseScaleMonitor, RepeatedAugmentationSampler

EXAMPLES, REPEATS, RANKS, DISTINCT = 400, 4, 4, 4


class Augmented(TensorDataset):
    """Examples with noise that is drawn anew each time one is read."""

    def __init__(self) -> None:
        super().__init__(*data(EXAMPLES).tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.5 * torch.randn(FEATURES), y


def test_each_example_is_drawn_repeats_times_in_a_row_by_epoch_and_seed() -> None:
    sampler = RepeatedAugmentationSampler(range(50), repeats=3)
    other = RepeatedAugmentationSampler(range(50), repeats=3, seed=7)

    rows = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)

    assert len(rows) == len(sampler) == 150
    assert sorted(rows[::3]) == list(range(50))
    assert rows == [i for i in rows[::3] for _ in range(3)]
    assert rows[::3] != list(range(50))
    assert rows == list(sampler)
    assert second != rows
    assert list(other) != rows


@pytest.mark.parametrize(
    ("drop_last", "each", "examples"), [(False, 4, list(range(10))), (True, 3, list(range(9)))]
)
def test_ranks_have_as_many_examples_each_and_no_copy_of_one_is_elsewhere(
    drop_last: bool, each: int, examples: list[int]
) -> None:
    options: dict[str, Any] = {"shuffle": False, "drop_last": drop_last, "num_replicas": 3}
    samplers = [RepeatedAugmentationSampler(range(10), 2, rank=i, **options) for i in range(3)]

    of_ranks = [list(sampler) for sampler in samplers]

    assert [len(rows) for rows in of_ranks] == [2 * each] * 3 == [len(s) for s in samplers]
    assert sorted({i for rows in of_ranks for i in rows}) == examples
    same_step = list(zip(*of_ranks, strict=True))
    assert all(len(set(rows)) == 3 for rows in same_step)


def test_ranks_are_asked_for_when_an_epoch_begins() -> None:
    sampler = RepeatedAugmentationSampler(range(8), 2)  # no process group yet

    of_ranks = on_ranks(2, lambda: (len(sampler), list(sampler)))

    assert [length for length, _ in of_ranks] == [8, 8]
    assert not set(of_ranks[0][1]) & set(of_ranks[1][1])
    assert len(sampler) == 16


def test_a_batch_sampler_gives_whole_examples() -> None:
    sampler = RepeatedAugmentationSampler(range(5), 2, shuffle=False)
    loader = DataLoader(range(5), batch_sampler=sampler.batches(4))  # type: ignore[arg-type]  # any sequence

    batches = [batch.tolist() for batch in loader]

    assert batches == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4]]
    assert [sampler.distinct_in(torch.tensor(batch)) for batch in batches] == [2, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "name", "got"),
    [
        ((range(4), 0), "repeats", "0"),
        ((range(4), 2, None, 1), "rank", "num_replicas=None, rank=1"),
        ((range(4), 2, 2, 2), "rank", "2"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, name: str, got: str) -> None:
    named = dict(zip(("dataset", "repeats", "num_replicas", "rank"), arguments, strict=False))

    with refused(name, got=got):
        RepeatedAugmentationSampler(**named)


def test_streams_and_batches_that_cut_copies_apart_are_refused() -> None:
    sampler = RepeatedAugmentationSampler(range(4), 4)

    with refused("dataset", error=TypeError, got="list_iterator"):
        RepeatedAugmentationSampler(iter([]), 2)  # type: ignore[arg-type]  # is refused
    with refused("batch_size", got="6", remedy="Pass 8."):
        sampler.batches(6)
    with refused("batch_size", got="a batch of 6 rows", remedy="`batch_size_fn`"):
        sampler.distinct_in(torch.zeros(6))
    with refused("sampler", got="SequentialSampler", remedy="Lightning"):
        type(sampler.batches(4))(SequentialSampler(range(4)), 4)


def true_noise_scale(copies: int = 32) -> float:
    """tr(Cov h)/|G|² by brute force, h the mean gradient over `REPEATS` copies of an example.

    Of a finite data set from which examples are drawn without replacement: see McCandlish.
    """
    net, augmented = network(), Augmented()
    torch.manual_seed(5)
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(net, weights, (x[None],))
        return torch.nn.functional.cross_entropy(out, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    means, within = [], 0.0
    for i in range(EXAMPLES):
        clean, y = (column[i] for column in augmented.tensors)
        noise = 0.5 * torch.randn(copies, FEATURES)
        of_copies = each(weights, clean + noise, y.expand(copies))
        gradients = torch.cat([g.flatten(1) for g in of_copies.values()], 1).double()
        means.append(gradients.mean(0))
        within += float(gradients.var(0).sum()) / EXAMPLES
    of_examples = torch.stack(means)
    between = float(of_examples.var(0).sum()) - within / copies
    trace = between + within / REPEATS
    signal = float(of_examples.mean(0).square().sum()) - within / copies / EXAMPLES
    return trace / (signal - between / EXAMPLES)


def measured(sampler: RepeatedAugmentationSampler, epochs: int) -> Any:
    """Of frozen weights; each `RANKS` batches are the parts of a step."""
    net = network()
    meter = NoiseScaleMeter(net, small_batch="micro_batch", every_n_steps=1, window=2**14)
    loader = DataLoader(Augmented(), batch_size=REPEATS * DISTINCT, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for index, part in enumerate(loader, 1):
            meter.backward(loss_of(net, part) / RANKS, sampler.distinct_in(part))
            if index % RANKS == 0:
                meter.step()
                net.zero_grad()
    return meter.noise_scale


def test_noise_scale_counts_distinct_examples_as_brute_force_does() -> None:
    truth = true_noise_scale()

    torch.manual_seed(1)
    sampler = RepeatedAugmentationSampler(Augmented(), REPEATS)
    found = measured(sampler, epochs=10)

    assert found.low < truth < found.high, (truth, str(found))
    assert found.high / found.low < 1.8


def test_a_monitor_counts_the_distinct_examples_of_the_sampler_on_two_ranks() -> None:
    sampler = RepeatedAugmentationSampler(data(96), 4)
    loader = DataLoader(data(96), batch_size=16, sampler=sampler)
    monitor = NoiseScaleMonitor(every_n_steps=1)

    def results(trainer: Any, module: Any) -> Any:
        sampler, history = trainer.train_dataloader.sampler, monitor.history
        counts = history["batch_size"][-1], history["examples"][-1]
        return monitor.noise_scale.low, (*counts, type(sampler).__name__)

    (low, found), _ = fit(monitor, train_loader=loader, results=results, max_epochs=2)

    assert math.isfinite(low)
    assert found == (8.0, 2 * 96.0, "RepeatedAugmentationSampler")


@pytest.mark.slow
def test_a_batch_sampler_that_lightning_would_replace_is_refused() -> None:
    batches = RepeatedAugmentationSampler(data(96), 4).batches(16)

    with pytest.raises(Exception, match="`sampler` must be a `RepeatedAugmentationSampler`, got"):
        fit(
            train_loader=DataLoader(data(96), batch_sampler=batches),
            results=lambda trainer, module: None,
        )


def test_copies_that_are_cut_apart_are_refused_beside_a_monitor() -> None:
    sampler = RepeatedAugmentationSampler(data(96), 4)
    loader = DataLoader(data(96), batch_size=18, sampler=sampler)

    with pytest.raises(Exception, match="multiple of `repeats`, 4, got a batch of 18 rows"):
        fit(NoiseScaleMonitor(), ranks=1, model=classifier(), train_loader=loader)
