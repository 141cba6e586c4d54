# SPDX-License-Identifier: Apache-2.0
"""What the monitor takes for the number of examples in the batches of data loaders."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fits import CLASSES, FEATURES, classifier, fit_here, heard
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from noisescale import NoiseScaleMonitor
from noisescale.guard import NotMeasured
from noisescale.lightning import trainer_access


class Mean(type(classifier(lr=0.01))):
    """Takes a batch of any structure: the loss is of the mean of each of its tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        means = torch.stack([x.float().mean() for x in tensors_in(batch)])
        return (self.net(means[:, None].expand(-1, FEATURES)) - 1).square().mean()


def tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for one in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_in(one)


def loader(size: int, batches: int = 4, width: int = 5) -> DataLoader[Any]:
    torch.manual_seed(size)
    data = TensorDataset(torch.randn(size * batches, width), torch.randn(size * batches))
    return DataLoader(data, batch_size=size)


def counted(loaders: Any, **options: Any) -> tuple[list[float], list[str]]:
    """Examples in each step of one process with two micro-batches a step, and what is warned of."""
    monitor = NoiseScaleMonitor(**options)
    every = {"accumulate_grad_batches": 2, "log_every_n_steps": 1}
    with heard() as told:
        fit_here(monitor, model=Mean(), train_loader=loaders, **every)
    return monitor.history["batch_size"].tolist(), [one for one in told if "batch_size_fn" in one]


@dataclass
class Molecules:
    """As chemprop's: their atoms and bonds, and which molecule each atom is of."""

    atoms: Tensor
    bonds: Tensor
    reverse: Tensor
    molecule: Tensor
    number: int

    def __len__(self) -> int:
        return self.number


class Properties(type(classifier())):
    """Predicts a number for each molecule, by a mean over what its atoms give."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *of, target = batch
        atoms, molecule = (of[0].atoms, of[0].molecule) if len(of) == 1 else of
        sums = torch.zeros(len(target), CLASSES).index_add(0, molecule, self.net(atoms))
        return (sums.mean(1) / molecule.bincount() - target).square().mean()


def molecules(*, one_object: bool) -> Any:
    generator = torch.Generator().manual_seed(0)

    def collate(numbers: list[int]) -> Any:
        molecule = torch.tensor(numbers).remainder(5).add(2)
        molecule = torch.arange(len(numbers)).repeat_interleave(molecule)
        atoms = torch.randn(len(molecule), FEATURES, generator=generator)
        target = torch.randn(len(numbers), generator=generator)
        if one_object:
            bonds = torch.zeros(2, 2 * len(atoms) + 1)
            return Molecules(atoms, *bonds, molecule, len(numbers)), target
        return atoms, molecule, target

    return DataLoader(range(64), batch_size=16, collate_fn=collate)  # type: ignore[arg-type]  # will do


@pytest.mark.parametrize("one_object", [True, False])
def test_halves_have_molecules_and_not_their_atoms(one_object: bool) -> None:
    """Without the object a function counts them."""
    monitor = NoiseScaleMonitor(
        every_n_steps=1, batch_size_fn=None if one_object else lambda batch: len(batch[-1])
    )

    with heard() as told:
        fit_here(
            monitor,
            model=Properties(),
            train_loader=molecules(one_object=one_object),
            log_every_n_steps=1,
        )

    assert monitor.history["batch_size"].tolist() == [16] * 4
    assert monitor.history["increment_weight"][-1] > 0
    assert not [one for one in told if "batch_size_fn" in one or "measure" in one]


def test_images_with_boxes_are_not_measured_until_a_function_counts_them() -> None:
    batch = {"images": torch.ones(16, 3, 8, 8), "boxes": torch.ones(37, 4), "kinds": torch.ones(37)}
    loaders = DataLoader([batch] * 4, batch_size=None)  # type: ignore[arg-type]  # a list will do

    assert counted(loaders, batch_size_fn=lambda batch: len(batch["images"])) == ([32, 32], [])
    sizes, (message,) = counted(loaders)
    assert sizes == []
    assert "first dimensions 16, 37, 37. Pass a function" in message


def test_a_count_in_doubt_is_told_of_once_a_fit() -> None:
    """The length of a list may be wrong: labelled and unlabelled images, say."""
    sequences: Any = [torch.randn(20 + i) for i in range(16)]
    loaders = DataLoader(sequences, batch_size=4, collate_fn=list)

    for _ in range(2):
        sizes, (message,) = counted(loaders)
        assert sizes == [8, 8]
        assert "counts 4 examples" in message


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_loaders_of_one_batch_size_are_counted_once(mode: Any, kind: type) -> None:
    """The second one is shorter: cycled, left out (None) or waited for."""
    both = {"a": loader(16, 4), "b": loader(16, 2, width=3)}
    batches = 2 if mode == "min_size" else 4

    loaders = CombinedLoader(both if kind is dict else list(both.values()), mode)

    assert counted(loaders) == ([32] * (batches // 2), [])


@pytest.mark.parametrize("kind", [dict, list])
def test_loaders_of_several_batch_sizes_are_told_of_once(kind: type) -> None:
    both = {"a": loader(16), "b": loader(32)}

    sizes, (message,) = counted(both if kind is dict else list(both.values()))

    assert sizes == [32, 32]
    assert "(16, 32)" in message
    assert "counts 16 examples" in message


def test_what_cannot_be_gone_through_is_named_with_the_remedy() -> None:
    batch: dict[str, Any] = {}
    batch["itself"] = batch

    with pytest.raises(NotMeasured, match="`batch_size_fn`") as error:
        trainer_access.BatchCounter()(batch)

    assert isinstance(error.value.__cause__, RecursionError)


def test_one_example_in_doubt_is_told_of_in_the_singular() -> None:
    with pytest.warns(UserWarning, match=r" 1 example\."):
        trainer_access.BatchCounter()({"a": torch.zeros(1), "b": torch.zeros(2)})
