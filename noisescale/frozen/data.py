# SPDX-License-Identifier: Apache-2.0
"""The data of a fit at fixed weights: the user's own batches, or those of another size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, Dataset, IterableDataset

from noisescale.lightning.resized_loaders import remade_loaders, whole_epochs
from noisescale.refusal import Refusal


@contextmanager
def data_to_fit(data: Any, batch_size: int | None) -> Iterator[dict[str, Any]]:
    """Give the arguments of `Trainer.fit` that are data.

    Args:
        data: A data module, which is put back afterwards; loaders, or a data set.
        batch_size: Examples in a batch of a device; None: those of the loaders.

    Raises:
        ValueError: If a data set comes without a batch size, or a loader with one that does not
            make batches.
    """

    def remake(loader: DataLoader[Any]) -> DataLoader[Any]:
        return whole_epochs(loader, size)

    size = batch_size or 0
    if hasattr(data, "train_dataloader"):
        trainer = data.trainer
        with nullcontext() if batch_size is None else remade_loaders(data, remake):
            yield {"datamodule": data}
        data.trainer = trainer
    elif isinstance(data, Dataset) or not hasattr(data, "__iter__"):
        if batch_size is None:
            raise Refusal(
                "batch_size", "be given with a data set", "none", "Give it, or a DataLoader."
            )
        shuffle = not isinstance(data, IterableDataset)
        loader: DataLoader[Any] = DataLoader(
            data, batch_size=batch_size, shuffle=shuffle, drop_last=True
        )
        yield {"train_dataloaders": loader}
    else:
        some = data if batch_size is None else apply_to_collection(data, DataLoader, remake)
        yield {"train_dataloaders": some}
