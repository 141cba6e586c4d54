# SPDX-License-Identifier: Apache-2.0
"""A Trainer that does nothing but train, and a copy to train, for the short fits of commands."""

from __future__ import annotations

import copy
import importlib
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pytorch_lightning.utilities.memory import is_oom_error

if TYPE_CHECKING:
    import pytorch_lightning as pl


def plain_trainer(module: pl.LightningModule, options: dict[str, Any]) -> pl.Trainer:
    """Return a Trainer from the same package as a module, `lightning` or `pytorch_lightning`.

    Args:
        module: The module to be trained.
        options: Arguments of the Trainer. They override the defaults, which turn everything off.
    """
    bases = [kind.__module__ for kind in type(module).__mro__]
    ours = any(base.startswith("lightning.pytorch") for base in bases)
    package = "lightning.pytorch" if ours else "pytorch_lightning"
    logger = importlib.import_module(f"{package}.loggers.logger").DummyLogger()
    defaults: dict[str, Any] = {
        "devices": 1,
        "max_epochs": 1,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "logger": logger,  # takes everything and keeps nothing
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer: pl.Trainer = importlib.import_module(package).Trainer(**{**defaults, **options})
    return trainer


def copy_to_train(module: pl.LightningModule) -> pl.LightningModule:
    """Return a copy of a module, without callbacks of its own."""
    # A trainer it was in before is no part of it, and may be large.
    made = copy.deepcopy(module, {id(module._trainer): None} if module._trainer else None)
    made.configure_callbacks = list  # type: ignore[method-assign]  # of this copy alone
    return made


def seed_all(seed: int) -> None:
    """Seed the random numbers of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's lines about each Trainer, and its advice on loaders."""
    packages = "lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"
    loggers = [logging.getLogger(name) for name in packages]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(pytorch_)?lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device or the host ran out of memory."""
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or is_oom_error(error)
        or (isinstance(error, RuntimeError) and "out of memory" in str(error))
    )
