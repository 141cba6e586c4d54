# SPDX-License-Identifier: Apache-2.0
"""Ranks that train on the same examples: who is warned, and who is not."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fits import CLASSES, FEATURES, classifier, data, fit
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

from noisescale import NoiseScaleMonitor
from noisescale.batches.shared_examples import row_checksums, share_in_common
from noisescale.lightning import trainer_access

EXAMPLES, BATCH_SIZE = 400, 8


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, CLASSES)
    )


class OfRank(Sampler[int]):
    """What `indices(rank)` gives once the ranks are there."""

    def __init__(self, indices: Callable[[int], list[int]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices(dist.get_rank()))

    def __len__(self) -> int:
        return len(self._indices(0))


class Numbers(IterableDataset[Any]):
    """A stream of random examples."""

    def __init__(self, by_rank: bool) -> None:
        self._by_rank = by_rank

    def __iter__(self) -> Iterator[Any]:
        seed = dist.get_rank() if self._by_rank else 0
        generator = torch.Generator().manual_seed(seed)
        for _ in range(EXAMPLES):
            x = torch.randn(FEATURES, generator=generator)
            yield x, int(x[:CLASSES].argmax())


def permuted(seed: int, examples: int = EXAMPLES) -> list[int]:
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    return [int(i) for i in order]


def in_halves(rank: int) -> list[int]:
    """Half of each batch is that of rank 0, in another place."""
    mine, first = permuted(1 + rank), permuted(9)
    indices = []
    for i in range(0, EXAMPLES, BATCH_SIZE):
        half = i + BATCH_SIZE // 2
        parts = first[i:half], mine[i:half]
        indices += [*parts[rank], *parts[1 - rank]]
    return indices


def backwards(rank: int) -> list[int]:
    """The same batches, each from its end."""
    batches = [permuted(0)[i : i + BATCH_SIZE] for i in range(0, EXAMPLES, BATCH_SIZE)]
    return [i for some in batches for i in (some[::-1] if rank else some)]


def swapped(rank: int) -> list[int]:
    """The same windows of two batches, but the second batch comes first."""
    batches = [permuted(0)[i : i + BATCH_SIZE] for i in range(0, EXAMPLES, BATCH_SIZE)]
    return [i for j in range(len(batches)) for i in batches[j ^ rank]]


def xor() -> TensorDataset:
    x = torch.zeros(4, FEATURES)
    x[:, :2] = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]])
    return TensorDataset(x, torch.tensor([0, 1, 1, 0]))


def loader(dataset: Any, sampler: Any = None) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def undistributed() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return loader(data(EXAMPLES), RandomSampler(data(EXAMPLES), generator=generator))


def drawn_with_replacement(rank: int) -> list[int]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(4, (EXAMPLES,), generator=generator).tolist()


SHARED: dict[str, tuple[Callable[[], DataLoader[Any]], int, str]] = {
    "undistributed": (undistributed, 1, "100%"),
    "half": (lambda: loader(data(EXAMPLES), OfRank(in_halves)), 1, "5"),
    "in another order": (lambda: loader(data(EXAMPLES), OfRank(backwards)), 1, "100%"),
    "windows in another order": (lambda: loader(data(EXAMPLES), OfRank(swapped)), 2, "100%"),
    "stream of one seed": (lambda: loader(Numbers(by_rank=False)), 1, "100%"),
}
APART: dict[str, Callable[[], DataLoader[Any]]] = {
    "distributed": lambda: DataLoader(data(EXAMPLES), batch_size=BATCH_SIZE, shuffle=True),
    "small data, independent draws": lambda: loader(xor(), OfRank(drawn_with_replacement)),
    "other orders of the same data": lambda: loader(data(EXAMPLES), OfRank(permuted)),
    "stream of a seed a rank": lambda: loader(Numbers(by_rank=True)),
    "one epoch after the other": lambda: loader(Subset(data(EXAMPLES), range(50))),
}


def warned(train_loader: DataLoader[Any], **options: Any) -> list[list[str]]:
    """What each rank says of shared examples."""

    class Listening(NoiseScaleMonitor):
        """On every rank, as the warning is of rank 0 alone."""

        said: list[str]

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.said = []
            trainer_access.rank_zero_warn = self.said.append  # in this forked process
            super().on_fit_start(trainer, pl_module)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            torch.manual_seed(trainer.global_rank)  # for dropout: else gradients are equal, too

    monitor = Listening()
    return fit(
        monitor,
        model=classifier(net=with_dropout()),
        train_loader=train_loader,
        results=lambda trainer, _: next(
            c.said for c in trainer.callbacks if isinstance(c, Listening)
        ),
        **options,
    )


@pytest.mark.parametrize("case", SHARED)
def test_shared_examples_are_reported_once_on_all_ranks(case: str) -> None:
    make_loader, accumulate, share = SHARED[case]

    on_ranks = warned(
        make_loader(),
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        max_epochs=2,
    )

    assert on_ranks[0] == on_ranks[1]
    (message,) = on_ranks[0]
    assert message.startswith(f"Ranks train on the same examples: in the first 16 batches, {share}")
    assert "The noise scale reads too low" in message
    assert message.endswith(
        " Give each rank its own examples. Use a `DistributedSampler` (Lightning adds one with"
        " `Trainer(use_distributed_sampler=True)`), or seed each rank's stream with the rank."
    )


@pytest.mark.parametrize("case", APART)
def test_independent_batches_are_not_reported(case: str) -> None:
    distributed = case in ("distributed", "one epoch after the other")

    on_ranks = warned(
        APART[case](), use_distributed_sampler=distributed, max_epochs=8, max_steps=40
    )

    assert on_ranks == [[], []]


def test_a_rank_whose_batches_are_of_no_known_kind_does_not_stop_the_others() -> None:
    """It takes part in the exchange, with nothing."""

    class Broken(torch.Tensor):
        def detach(self) -> Any:
            raise RuntimeError("not this kind")

    class Odd(NoiseScaleMonitor):
        def _look_for_shared_examples(self, tensors: Any) -> None:
            odd = [object(), torch.zeros(8).to_sparse(), torch.zeros(8).as_subclass(Broken)]
            number = self.seen = getattr(self, "seen", -1) + 1
            batch = odd[number % 3]
            super()._look_for_shared_examples((lambda: batch) if dist.get_rank() else tensors)

    steps = fit(
        Odd(),
        model=classifier(net=with_dropout()),
        train_loader=loader(data(EXAMPLES), OfRank(permuted)),
        use_distributed_sampler=False,
        results=lambda trainer, _: trainer.global_step,
    )

    assert steps == [50, 50]


def test_one_process_compares_nothing() -> None:
    monitor = NoiseScaleMonitor()

    fit(monitor, ranks=1, strategy="auto", accumulate_grad_batches=2)

    assert monitor._shared is None


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64],
)
def test_checksums_tell_rows_apart_whatever_they_are_made_of(dtype: torch.dtype) -> None:
    """Round numbers have few bits that are not zero, which a checksum must not lose."""
    rows = torch.cartesian_prod(*[torch.tensor([0, 1])] * 10).to(dtype)

    checksums = row_checksums([rows, torch.zeros(len(rows)), torch.zeros(3)])

    assert checksums is not None
    assert len(checksums.unique()) == 1024
    again = row_checksums([rows.flip(0), torch.zeros(len(rows)), torch.zeros(3)])
    assert again is not None
    assert torch.equal(again, checksums.flip(0))


def test_equal_labels_are_not_equal_examples() -> None:
    x, y = data(8).tensors
    labels, masks = torch.zeros_like(y), torch.ones(8, 3)

    checksums = row_checksums([x, labels, masks])

    assert checksums is not None
    assert len(checksums.unique()) == 8
    assert row_checksums([]) is None
    assert row_checksums([torch.zeros(())]) is None


@pytest.mark.parametrize("distinct", [3, 5, 20, 1000])
@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_chance_is_not_reported(distinct: int, batch_size: int) -> None:
    """Two ranks that draw with replacement, some examples more often than others."""
    rng = np.random.default_rng(0)
    often = 1 / np.arange(1, distinct + 1)

    def batches() -> list[Any]:
        shape = 16, batch_size
        return list(np.sort(rng.choice(distinct, shape, p=often / often.sum()), axis=1))

    reported = [share_in_common(batches(), batches()) for _ in range(50)]

    assert reported == [0.0] * 50


def test_examples_are_the_rows_that_most_tensors_have() -> None:
    """A grid that all examples share comes first in many a batch."""
    grid, x, y = torch.linspace(0, 1, 16)[:, None], torch.randn(4, 3), torch.randn(4)

    with_grid, without = row_checksums([grid, x, y]), row_checksums([x, y])

    assert with_grid is not None
    assert without is not None
    assert with_grid.tolist() == without.tolist()


def test_batches_that_are_all_alike_tell_nothing() -> None:
    """As constant inputs beside data that `training_step` draws itself."""
    constant = [np.array([7])] * 16

    assert share_in_common(constant, constant) == 0
