# SPDX-License-Identifier: Apache-2.0
"""The data of a fit at fixed weights: the user's own batches, or those of another size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, Dataset, IterableDataset

from noisescale.lightning.resized_loaders import whole_epochs
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

    def remake(loaders: Any) -> Any:
        if batch_size is None:
            return loaders
        return apply_to_collection(
            loaders, DataLoader, lambda loader: whole_epochs(loader, batch_size)
        )

    if hasattr(data, "train_dataloader"):
        trainer, made = data.trainer, data.train_dataloader
        if batch_size is not None:
            data.train_dataloader = lambda: remake(made())
        try:
            yield {"datamodule": data}
        finally:
            data.trainer = trainer
            if batch_size is not None:
                del data.train_dataloader
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
        yield {"train_dataloaders": remake(data)}
