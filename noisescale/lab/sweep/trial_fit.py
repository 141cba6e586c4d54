# SPDX-License-Identifier: Apache-2.0
"""One training of a sweep: until the goal, a divergence, a limit, or its last step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, Dataset

from noisescale.history.metrics import Goal
from noisescale.lab.branch.planning import look_after
from noisescale.lab.jobs.jobs import Record, Training
from noisescale.lab.jobs.trial_process import LIMIT, write_result
from noisescale.lab.sweep.hyperparameters import (
    last_as_long,
    own_values,
    refuse_unsearchable,
)
from noisescale.lab.sweep.results import DIVERGED, OUT_OF_STEPS, PRUNED, REACHED
from noisescale.lab.sweep.settings import ModuleDefaults
from noisescale.lab.sweep.timed_run import TimedRun, metric_of
from noisescale.lightning.resized_loaders import (
    examples_of_epoch,
    refuse_own_batches,
    whole_epochs,
)
from noisescale.lightning.trainer_access import (
    VALIDATES_NEVER,
    Callback,
    first_loader,
    has_validation,
    schedules_of,
    validate_next,
)
from noisescale.lightning.training import copy_to_train, plain_trainer, quiet
from noisescale.refusal import Refusal
from noisescale.user_code.targets import train_and_val

if TYPE_CHECKING:
    import pytorch_lightning as pl


HELD = 256
"""Examples in a batch of a Dataset to validate on, whatever batch size is swept.

A metric that is no mean, such as F1, depends on it.
"""


@dataclass(frozen=True)
class MadeModule:
    """A module and its data, as the user's function returned them."""

    module: pl.LightningModule
    data: Any
    """A LightningDataModule, a DataLoader or a Dataset to train on; or a pair of these, the second
    to validate on."""


def describe(
    made: MadeModule,
    training: Training,
    goal: Goal,
    batch_size: int,
    searched: Sequence[str] = (),
) -> ModuleDefaults:
    """Train one step and validate on one batch, and return what the module and data bring along.

    Args:
        made: Module and data. A copy of the module is trained.
        training: How it is trained. Only one device is used here.
        goal: Its metric has to be there.
        batch_size: For data without a loader.
        searched: Names of hyperparameters that are searched.

    Raises:
        ValueError: If the metric is not logged, a hyperparameter cannot be searched, or the module
            or data do not fit.
    """
    look = _Describe(goal, searched)
    module = copy_to_train(made.module)
    options = {**training.trainer_options, "devices": 1, "strategy": "auto"}
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = plain_trainer(
            module,
            {
                **options,
                **VALIDATES_NEVER,
                "limit_val_batches": 1,
                # One step is trained. Schedules may divide by a tenth of all steps.
                # Numbers that nobody writes into a schedule show whether it is sized for the run.
                "max_steps": 1009,
                "max_epochs": 1013,
                "callbacks": [look],
            },
        )
        with loaders_of(made.data, None, batch_size, 1) as loaders:
            trainer.fit(module, **loaders)
    own = look.own
    if own is None:
        raise Refusal("data", "have at least one batch", "none", "Give more data.")
    size = None if own.batch_size is None else own.batch_size * training.devices
    return replace(own, batch_size=size)


def train_task(made: MadeModule, spec: Record, folder: Path) -> None:
    """Train a task of a sweep, and write its result into its folder.

    Args:
        made: Module and data, newly made after the seed of the task was set.
        spec: From `SweepJob.task`.
        folder: A file `limit` there has the step after which the training cannot win.
    """
    train_by_spec(made, spec, _Run(spec, folder), folder)


def train_by_spec(made: MadeModule, spec: Record, run: TimedRun, folder: Path) -> None:
    """Train a copy of the module as its task says, and write what the run has seen.

    Args:
        made: See `train_task`.
        spec: Of the task.
        run: What looks on, and stops the training.
        folder: Of the training.
    """
    training = Training(**spec["training"])
    module = copy_to_train(made.module)
    with quiet():
        trainer = plain_trainer(
            module,
            {
                **training.trainer_options,
                **VALIDATES_NEVER,
                "limit_val_batches": 1.0,
                "use_distributed_sampler": True,
                "max_epochs": spec["most_epochs"],
                "max_steps": spec["most_steps"],
                "limit_train_batches": spec["batches_of_epoch"] or 1.0,
                "accumulate_grad_batches": spec["accumulation"],
                "callbacks": [run],
            },
        )
        size = spec["device_batch_size"]
        with loaders_of(made.data, size, size, training.devices) as loaders:
            trainer.fit(module, **loaders)
    if trainer.is_global_zero:
        write_result(run.result(), folder)


class _Describe(Callback):
    def __init__(self, goal: Goal, searched: Sequence[str]) -> None:
        self._goal, self._searched, self.own = goal, searched, None
        self._looked = False
        self._of_batch: torch.Tensor | None = None

    own: ModuleDefaults | None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise Refusal(
                "module",
                "use automatic optimization for a sweep",
                "manual optimization",
                "Train the batch sizes yourself, and use `noisescale compare` on the runs.",
            )
        refuse_unsearchable(trainer.optimizers, schedules_of(trainer), self._searched)
        loader, configs = first_loader(trainer), trainer.lr_scheduler_configs
        self.own = ModuleDefaults(
            float(examples_of_epoch(loader)),
            _batch_size_of(loader),
            schedules=tuple(type(each.scheduler).__name__ for each in configs),
            schedules_fit=last_as_long(
                [each.scheduler for each in configs if not each.reduce_on_plateau],
                trainer.estimated_stepping_batches,
            )
            and all(each.interval == "step" or each.reduce_on_plateau for each in configs),
            fixed_batch_size=_number(pl_module.hparams.get("batch_size")),
            **own_values(trainer.optimizers),
        )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        trainer.should_stop = True
        self._of_batch = trainer.callback_metrics.get(self._goal.metric)
        self._look(trainer)
        if has_validation(trainer):
            validate_next(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        found = trainer.callback_metrics.get(self._goal.metric)
        self._looked = found is not None
        # A validation may log its own metric by the same name: its value then replaces the batch's.
        same = found is not None and self._of_batch is not None and bool(found == self._of_batch)
        if self.own is not None and found is not None:
            met = bool(self._goal.is_reached_by(np.array([float(found)]))[0])
            self.own = replace(self.own, of_a_batch=same, met=met)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metric_of(trainer, self._goal.metric)
        if not self._looked:
            raise Refusal(
                "goal",
                "be about a metric of the validation, or of each training step",
                f"{self._goal.metric!r}, which is logged when an epoch ends",
                "Log it in `validation_step`.",
            )


class _Run(TimedRun):
    """Evaluate at rarer and rarer steps, and stop in time."""

    def __init__(self, spec: Record, folder: Path) -> None:
        super().__init__(spec, Goal(**spec["goal"]).metric)
        self._folder, self._goal = folder, Goal(**spec["goal"])
        self._next = 1

    def _is_due(self, step: int) -> bool:
        return step >= min(self._next, int(self._spec["most_steps"]))

    def _ending_at(self, trainer: pl.Trainer, value: float, step: int) -> str:
        limit = trainer.strategy.broadcast(read_limit(self._folder))
        self._next = look_after(step)
        if self._goal.is_reached_by(np.array([value]))[0]:
            return REACHED
        if not math.isfinite(value) or self._has_nan_loss(trainer):
            return DIVERGED
        return PRUNED if step >= limit else OUT_OF_STEPS


def read_limit(folder: Path) -> float:
    """Return the step after which a training has lost; infinite if there is none."""
    try:
        return float((folder / LIMIT).read_text())
    except (OSError, ValueError):
        return math.inf


@contextmanager
def loaders_of(data: Any, size: int | None, usual: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `Trainer.fit`, with training batches of `size` examples.

    Args:
        data: See `MadeModule`.
        size: Examples in a batch, on one rank; None to leave the loaders as they are.
        usual: For data without a loader.
        ranks: Number of ranks.
    """
    data, held = train_and_val(data)
    held = DataLoader(held, batch_size=HELD) if isinstance(held, Dataset) else held
    if not hasattr(data, "train_dataloader"):
        if not (isinstance(data, (Dataset, DataLoader)) or hasattr(data, "__getitem__")):
            raise Refusal(
                "data",
                "be a Dataset, a DataLoader or a LightningDataModule, or a pair to train and"
                " to validate on",
                type(data).__name__,
                "Give what the module trains on.",
            )
        made = data if isinstance(data, DataLoader) else DataLoader(data, usual, shuffle=True)
        yield {"train_dataloaders": _resize_loader(made, size, ranks), "val_dataloaders": held}
        return
    own = data.train_dataloader
    data.train_dataloader = lambda: _resize_loaders(own(), size, ranks)
    try:
        yield {"datamodule": data}
    finally:
        del data.train_dataloader


def _resize_loaders(loaders: Any, size: int | None, ranks: int) -> Any:
    """Return the loaders of a data module with batches of `size` examples.

    Raises:
        ValueError: If there is one that is no DataLoader: its batches would stay as they are.
    """
    if hasattr(loaders, "flattened"):  # Lightning's CombinedLoader
        loaders.flattened = [_resize_loaders(each, size, ranks) for each in loaders.flattened]
        return loaders
    others: list[Any] = []
    grouped = (DataLoader, Mapping, list, tuple)
    apply_to_collection(loaders, object, others.append, wrong_dtype=grouped)
    if others:
        raise Refusal(
            "train_dataloader",
            "return a DataLoader, or a list or dict of DataLoaders",
            type(others[0]).__name__,
            "The batches of the data module cannot be made larger otherwise.",
        )
    return apply_to_collection(loaders, DataLoader, _resize_loader, size, ranks)


def _resize_loader(loader: DataLoader[Any], size: int | None, ranks: int) -> DataLoader[Any]:
    if size is None:
        refuse_own_batches(loader)
        return loader
    return whole_epochs(loader, size, ranks)


def _batch_size_of(loader: Any) -> int | None:
    """Return the batch size of a loader, also if a batch sampler of the user's own says it."""
    size = _number(getattr(loader, "batch_size", None))
    sampler = getattr(loader, "batch_sampler", None)
    return size or _number(getattr(sampler, "batch_size", None))


def _number(value: Any) -> int | None:
    """Return a positive whole number as it is, and None for everything else."""
    return value if type(value) is int and value > 0 else None
