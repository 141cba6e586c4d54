# SPDX-License-Identifier: Apache-2.0
"""What can be measured at fixed weights, as a LightningModule and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from noisescale.frozen.wrapped_network import WrappedNetwork
from noisescale.lightning.resized_loaders import remade_loaders, whole_epochs
from noisescale.refusal import Refusal
from noisescale.user_code.targets import (
    call_if_callable,
    is_trainer_of_transformers,
    load,
    module_and_data,
    train_and_val,
)


def module_and_train_data(
    target: Any, data: Any, loss: Callable[[Any, Any], Tensor] | None
) -> tuple[pl.LightningModule, Any]:
    """Return a LightningModule and what it trains on.

    Args:
        target: A LightningModule, a network with a `loss`, the Trainer of transformers, or a
            function that returns one of these, alone or with its data; or a text that names one.
        data: The data, or a function or a text as for `target`. Default: what the target returns,
            or has.
        loss: A function from the network and a batch to the mean loss of the batch.

    Raises:
        ValueError: If the target is something else, or there are no data.
    """
    name = target if isinstance(target, str) else "target"
    made = call_if_callable(name, load(target) if isinstance(target, str) else target)
    examples = None
    if isinstance(made, tuple) and len(made) == 2:
        made, examples = made
    if isinstance(data, str):
        data = load(data)
    if data is not None and not isinstance(data, str):
        examples = call_if_callable("data", data)
    if is_trainer_of_transformers(made):
        from noisescale.frozen.transformers_trainer import as_module

        module, own = as_module(made)
        return module, own if examples is None else examples
    if loss is not None:
        if not isinstance(made, nn.Module):
            raise Refusal(
                name, "be a module of torch with a `loss`", type(made).__name__, "Name a network."
            )
        if examples is None:
            raise Refusal(name, "come with data", "only a network", "Give the `data`.")
        return _WithLoss(made, loss), train_and_val(examples)[0]
    if isinstance(made, nn.Module) and not hasattr(made, "training_step"):
        raise Refusal(
            "loss",
            "be given for a network that is no LightningModule",
            f"none for {type(made).__name__}",
            "Give a function from the network and a batch to the mean loss of the batch.",
        )
    module, found = module_and_data(made, examples)
    return module, train_and_val(found)[0]


class _WithLoss(WrappedNetwork):
    """A network and its loss."""

    def __init__(self, network: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(network)
        self._loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(self.network, batch)


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
