# SPDX-License-Identifier: Apache-2.0
"""The data of a module that makes its own data loaders, as a data module."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from noisescale.lightning.trainer_access import DATA_MODULES, HOOKS


def makes_loaders(module: Any, hook: str = "train_dataloader") -> bool:
    """Return whether a module has a hook of its own that makes data loaders.

    Examples:
        >>> makes_loaders(pl.LightningModule())
        False
    """
    made = getattr(module, hook, None)
    own = getattr(made, "__func__", made)
    return own is not None and all(own is not getattr(hooks, hook) for hooks in HOOKS)


def data_of(module: pl.LightningModule) -> pl.LightningDataModule:
    """Return the data of a module with `train_dataloader`, and perhaps `val_dataloader`.

    In a fit the loaders are those of the module that is trained, which may be a copy: Lightning has
    called its `prepare_data` and `setup`.

    Lightning asks which hooks of a data module differ from those of its own package. So the data
    module is of the module's package, and validates only if the module does.
    """
    kind: type = _Validates if makes_loaders(module, "val_dataloader") else _Trains
    of = [
        base for base, hooks in zip(DATA_MODULES, HOOKS, strict=True) if isinstance(module, hooks)
    ]
    made: pl.LightningDataModule = type("DataOfModule", (kind, *of), {})(module)
    return made


class _Trains:
    trainer: pl.Trainer | None

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self._module = module

    @property
    def _fitted_module(self) -> pl.LightningModule | None:
        """The module of the fit under way; a Trainer may be there before its fit."""
        return None if self.trainer is None else self.trainer.lightning_module

    def prepare_data(self) -> None:
        if self._fitted_module is None:
            self._module.prepare_data()

    def setup(self, stage: str) -> None:
        if self._fitted_module is None:
            self._module.setup(stage)

    def train_dataloader(self) -> Any:
        return (self._fitted_module or self._module).train_dataloader()


class _Validates(_Trains):
    def val_dataloader(self) -> Any:
        return (self._fitted_module or self._module).val_dataloader()
