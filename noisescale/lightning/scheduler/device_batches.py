# SPDX-License-Identifier: Apache-2.0
"""Change the size of the training batches that the user's loader makes, epoch by epoch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from noisescale.checks import refuse
from noisescale.lightning.resized_loaders import KEPT
from noisescale.lightning.trainer_access import SettingRefusal

if TYPE_CHECKING:
    import pytorch_lightning as pl


def resize_loader(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a loader of the same examples in the same order, in batches of `size`.

    Examples:
        >>> [batch.tolist() for batch in resize_loader(DataLoader(range(5), batch_size=1), size=2)]
        [[0, 1], [2, 3], [4]]
    """
    if loader.batch_size == size:
        return loader
    kept = {name: getattr(loader, name) for name in (*KEPT, "drop_last", "generator")}
    dataset: Any = loader.dataset
    if not isinstance(dataset, IterableDataset):
        kept["sampler"] = loader.sampler
    return DataLoader(dataset, batch_size=size, **kept)


class ResizedLoaders:
    """The source of a Trainer's training loaders, with their batch size replaced.

    Args:
        trainer: About to fit.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._source: Any = trainer.fit_loop._data_source
        self.size: int | None = None
        """Rows of a batch on one device; None: the batch size of the user's loaders."""
        # In place of Lightning's own source, of which it asks no more than is answered below.
        trainer.fit_loop._data_source = self  # type: ignore[assignment]

    def dataloader(self) -> Any:
        """Return the user's loaders, resized. Lightning calls it before an epoch."""
        loaders = self._source.dataloader()
        if self.size is None:
            return loaders
        if hasattr(loaders, "flattened"):  # Lightning's CombinedLoader, which may be the user's
            loaders = copy.copy(loaders)
            loaders.flattened = [self._resize(loader) for loader in loaders.flattened]
            return loaders
        return apply_to_collection(loaders, DataLoader, self._resize)

    def change(self, size: int) -> None:
        """Make batches of `size` rows from the next epoch on."""
        self.size = size
        self._trainer.fit_loop._combined_loader = None  # so that Lightning asks anew

    def close(self) -> None:
        """Give the Trainer the user's loaders back."""
        # Declared as Lightning's own, see above.
        if self._trainer.fit_loop._data_source is self:  # type: ignore[comparison-overlap]
            self._trainer.fit_loop._data_source = self._source

    def __getattr__(self, name: str) -> Any:
        """Pass all other attributes on to the user's source."""
        return getattr(self._source, name)

    def _resize(self, loader: Any) -> Any:
        assert self.size is not None
        check_resizable([loader])
        return resize_loader(loader, self.size)


def check_resizable(loaders: list[Any]) -> None:
    """Raise unless batches of another size can be made from the data of all loaders.

    Raises:
        MisconfigurationException: The message names the setting and the remedy.
    """
    for loader in loaders:
        plain = (
            type(loader) is DataLoader
            and loader.batch_size is not None
            and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
        )
        if not plain:
            data = "data that do not come from a plain torch DataLoader with a `batch_size`"
            _refuse(data, type(loader).__name__)
    if len(sizes := {loader.batch_size for loader in loaders}) > 1:
        _refuse("loaders of different `batch_size`", " and ".join(map(str, sorted(sizes))))


def _refuse(data: str, value: str) -> NoReturn:
    remedy = "Micro-batches then stay as they are, and only their number changes."
    needed, error = f"be left out for {data}", SettingRefusal
    refuse("max_device_batch_size", needed, value, remedy, error=error)
