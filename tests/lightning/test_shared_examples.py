# SPDX-License-Identifier: Apache-2.0
"""Ranks that train on the same examples: who is warned, and who is not."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fits import classifier, data, fit_here, fits_on_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from zoo import mlp

from noisescale import NoiseScaleMonitor
from noisescale.batches.shared_examples import row_checksums, share_in_common
from noisescale.lightning import trainer_access

EXAMPLES, BATCH_SIZE = 400, 8


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def permuted(seed: int) -> list[int]:
    return torch.randperm(EXAMPLES, generator=seeded(seed)).tolist()


BATCHES = np.array(permuted(0)).reshape(-1, BATCH_SIZE).tolist()


def in_halves(rank: int) -> list[int]:
    """Half of each batch is that of rank 0, in another place."""
    mine, half = permuted(1 + rank), BATCH_SIZE // 2
    indices = []
    for i, batch in enumerate(BATCHES):
        parts = batch[:half], mine[i * BATCH_SIZE :][:half]
        indices += [*parts[rank], *parts[1 - rank]]
    return indices


def backwards(rank: int) -> list[int]:
    """The same batches, each from its end."""
    return [i for some in BATCHES for i in (some[::-1] if rank else some)]


def swapped(rank: int) -> list[int]:
    """The same windows of two batches, but the second batch comes first."""
    return [i for j in range(len(BATCHES)) for i in BATCHES[j ^ rank]]


def drawn_of_four(rank: int) -> list[int]:
    return torch.randint(4, (EXAMPLES,), generator=seeded(rank)).tolist()


def picked(indices: Callable[[int], Sequence[int]]) -> Callable[[int], Dataset[Any]]:
    return lambda rank: Subset(data(EXAMPLES), indices(rank))


CASES: dict[str, tuple[Callable[[int], Dataset[Any]], str | None]] = {
    "undistributed": (picked(lambda rank: permuted(0)), "100%"),
    "half": (picked(in_halves), "5"),
    "in another order": (picked(backwards), "100%"),
    "windows in another order": (picked(swapped), "100%"),
    "distributed": (lambda rank: data(EXAMPLES), None),
    "small data, independent draws": (picked(drawn_of_four), None),
    "other orders of the same data": (picked(permuted), None),
    "a seed a rank": (lambda rank: data(EXAMPLES, seed=rank), None),
    "one epoch after the other": (picked(lambda rank: range(50)), None),
}
"""What a rank trains on, and the share of examples that is reported."""
OPTIONS = {
    "windows in another order": {"accumulate_grad_batches": 2},
    "distributed": {"use_distributed_sampler": True},
    "one epoch after the other": {"use_distributed_sampler": True},
}


class Listening(NoiseScaleMonitor):
    """Keeps what it says of shared examples, on every rank: the warning is of rank 0 alone."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.said: list[str] = []

        def keep(message: str) -> None:
            if "the data in their order" not in message:
                self.said.append(message)

        trainer_access.rank_zero_warn = keep  # in this forked process
        super().on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        torch.manual_seed(trainer.global_rank)  # for dropout: else gradients are equal, too


class Odd(NoiseScaleMonitor):
    """On rank 1 batches are of no known kind."""

    def _look_for_shared_examples(self, tensors: Any) -> None:
        class Broken(torch.Tensor):
            def detach(self) -> Any:
                raise RuntimeError("not this kind")

        odd = [object(), torch.zeros(8).to_sparse(), torch.zeros(8).as_subclass(Broken)]
        number = self.seen = getattr(self, "seen", -1) + 1
        batch = odd[number % 3]
        super()._look_for_shared_examples((lambda: batch) if dist.get_rank() else tensors)


def said(name: str) -> list[str]:
    """On this rank."""
    fit_case(monitor := Listening(), name)
    return monitor.said


def fit_case(monitor: NoiseScaleMonitor, name: str) -> int:
    options = {"use_distributed_sampler": False, **OPTIONS.get(name, {})}
    batches = DataLoader(CASES[name][0](dist.get_rank()), batch_size=BATCH_SIZE)
    model = classifier(net=mlp(nn.Dropout(0.1)))
    options |= {"ranks": 2, "model": model, "train_loader": batches, "max_steps": 20}
    return int(fit_here(monitor, max_epochs=-1, **options).global_step)


@pytest.fixture(scope="module")
def on_ranks() -> dict[str, tuple[Any, Any]]:
    """What each case says, and the steps of a fit in which rank 1 has odd batches."""
    odd = partial(fit_case, Odd(), "other orders of the same data")
    found = fits_on_ranks(*[partial(said, name) for name in CASES], odd)
    return dict(zip([*CASES, "odd"], found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_shared_examples_are_reported_once_on_all_ranks_and_independent_ones_are_not(
    name: str, on_ranks: dict[str, tuple[Any, Any]]
) -> None:
    _, share = CASES[name]
    first, second = on_ranks[name]

    assert first == second
    assert len(first) == (0 if share is None else 1)
    assert all(re.search(f" 16 batches, {share}.*DistributedSampler", one) for one in first)


def test_a_rank_whose_batches_are_of_no_known_kind_does_not_stop_the_others(
    on_ranks: dict[str, tuple[Any, Any]],
) -> None:
    """It takes part in the exchange, with nothing."""
    assert on_ranks["odd"] == (20, 20)


def test_one_process_compares_nothing() -> None:
    monitor = NoiseScaleMonitor()

    fit_here(monitor, accumulate_grad_batches=2)

    assert monitor._shared is None


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64],
)
def test_checksums_tell_rows_apart_whatever_they_are_made_of(dtype: torch.dtype) -> None:
    """Round numbers have few bits that are not zero, which a checksum must not lose."""
    rows = torch.cartesian_prod(*[torch.tensor([0, 1])] * 10).to(dtype)

    constant = torch.zeros(len(rows)), torch.zeros(3)

    checksums = row_checksums([rows, *constant])

    assert len(checksums.unique()) == 1024
    assert torch.equal(row_checksums([rows.flip(0), *constant]), checksums.flip(0))


def test_equal_labels_are_not_equal_examples() -> None:
    x, y = data(8).tensors
    labels, masks = torch.zeros_like(y), torch.ones(8, 3)

    assert len(row_checksums([x, labels, masks]).unique()) == 8
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

    assert row_checksums([grid, x, y]).tolist() == row_checksums([x, y]).tolist()


def test_batches_that_are_all_alike_tell_nothing() -> None:
    """As constant inputs beside data that `training_step` draws itself."""
    constant = [np.array([7])] * 16

    assert share_in_common(constant, constant) == 0
