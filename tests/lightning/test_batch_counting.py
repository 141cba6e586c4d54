# SPDX-License-Identifier: Apache-2.0
"""What the monitor takes for the number of examples in the batches of data loaders."""

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from fits import trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from noisescale import NoiseScaleMonitor
from noisescale.guard import NotMeasured
from noisescale.lightning import trainer_access


class Mean(L.LightningModule):
    """Takes a batch of any structure: the loss is of the mean of each of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        means = torch.stack([x.float().mean() for x in tensors_in(batch)])
        return (self.linear(means[:, None]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


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


def images(count: int, equal: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 8, 8 if equal else 8 + i % 5) for i in range(count)]


def counted(loaders: Any) -> tuple[list[float], list[str]]:
    """Examples in each step of one process with two micro-batches a step, and what is warned of."""
    monitor = NoiseScaleMonitor()
    fitting = trainer(
        1,
        strategy="auto",
        callbacks=[monitor],
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitting.fit(Mean(), loaders)
    told = [str(w.message) for w in caught if "pass `batch_size_fn`" in str(w.message)]
    return monitor.history["batch_size"].tolist(), told


def test_detection_batches_count_their_images() -> None:
    """`tuple(zip(*batch))`, as torchvision's detection references collate."""
    data = [(x, {"boxes": torch.rand(2, 4), "labels": torch.ones(2)}) for x in images(64)]

    def collate(batch: Any) -> Any:
        return tuple(zip(*batch, strict=True))

    assert counted(DataLoader(data, batch_size=16, collate_fn=collate)) == ([32, 32], [])


def test_a_list_of_sequences_counts_them() -> None:
    sequences: Any = [torch.randn(200 + i) for i in range(64)]

    assert counted(DataLoader(sequences, batch_size=16, collate_fn=list)) == ([32, 32], [])


def test_a_list_of_equal_images_is_told_of_once_a_fit() -> None:
    data: Any = images(64, equal=True)
    loaders = DataLoader(data, batch_size=16, collate_fn=list)
    message = (
        "A batch is a list of 16 tensors with the same first dimension, 3. Each tensor may be one"
        " field of the batch, or one example. NoiseScaleMonitor counts 3 examples. If this number"
        " is wrong, pass `batch_size_fn`."
    )

    assert [counted(loaders) for _ in range(2)] == 2 * [([6, 6], [message])]


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

    sizes, told = counted(both if kind is dict else list(both.values()))

    assert sizes == [32, 32]
    assert told == [
        "The data loaders of a step give batches of different sizes (16, 32). NoiseScaleMonitor"
        " counts 16 examples. If this number is wrong, pass `batch_size_fn`."
    ]


def test_few_sequences_are_told_of_once_a_fit() -> None:
    """Their length may be wrong: labelled and unlabelled images, say."""
    sequences: Any = [torch.randn(20 + i) for i in range(16)]

    sizes, told = counted(DataLoader(sequences, batch_size=4, collate_fn=list))

    assert sizes == [8, 8]
    assert [message.split(". ")[2] for message in told] == ["NoiseScaleMonitor counts 4 examples"]


def test_what_cannot_be_gone_through_is_named_with_the_remedy() -> None:
    batch: dict[str, Any] = {}
    batch["itself"] = batch

    with pytest.raises(NotMeasured, match="`batch_size_fn` must be") as error:
        trainer_access.BatchCounter()(batch)

    assert isinstance(error.value.__cause__, RecursionError)


def test_one_example_in_doubt_is_told_of_in_the_singular() -> None:
    with pytest.warns(UserWarning, match=r" counts 1 example\. If"):
        trainer_access.BatchCounter()({"a": torch.zeros(1), "b": torch.zeros(2)})
