# SPDX-License-Identifier: Apache-2.0
"""All access to private parts of Lightning, in one place.

Read in Lightning 2.6.6. `pytorch_lightning` and `lightning.pytorch` are the same code in two
packages with classes of their own, so a callback for both has both base classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core import rank_zero
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info as rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn as rank_zero_warn

from noisescale.batches import batch_counter
from noisescale.batches.batch_size import Count, examples_in, examples_of_loaders
from noisescale.guard import NotMeasured
from noisescale.refusal import Refusal

# Whichever package is imported last takes over the logger of both. Ours is not to decide that if
# one has been imported. If none has, `rank_zero.log` is its own logger, which shows no information.
_logger = getattr(rank_zero, "log", None)

import pytorch_lightning as pl  # noqa: E402 - after the look at the logger, as all below
from pytorch_lightning.loggers.logger import DummyLogger as DummyLogger  # noqa: E402
from pytorch_lightning.utilities.seed import isolate_rng as isolate_rng  # noqa: E402
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402

if TYPE_CHECKING:
    from lightning_fabric.utilities.exceptions import (
        MisconfigurationException as MisconfigurationException,
    )
    from pytorch_lightning import Callback as Callback
    from pytorch_lightning import LightningDataModule
    from pytorch_lightning.core.hooks import DataHooks
    from pytorch_lightning.loggers import MLFlowLogger, WandbLogger
    from torch.utils.tensorboard import SummaryWriter

    HOOKS, DATA_MODULES = (DataHooks,), (LightningDataModule,)
    WANDB_LOGGERS = (WandbLogger,)
    MLFLOW_LOGGERS = (MLFlowLogger,)
    DUMMY_LOGGERS = (DummyLogger,)
else:
    _PACKAGES = [
        name
        for name in ("lightning.pytorch", "pytorch_lightning")
        if importlib.util.find_spec(name.split(".")[0]) is not None
    ]

    def _in_all_packages(module: str, name: str) -> tuple[type, ...]:
        modules = [importlib.import_module(f"{package}{module}") for package in _PACKAGES]
        return tuple(dict.fromkeys(getattr(m, name) for m in modules))

    def _base_for_all_packages(module: str, name: str) -> type:
        bases = _in_all_packages(module, name)
        return type(name, bases, {"__module__": __name__, "__doc__": bases[0].__doc__})

    Callback = _base_for_all_packages("", "Callback")
    HOOKS = _in_all_packages(".core.hooks", "DataHooks")
    DATA_MODULES = _in_all_packages("", "LightningDataModule")
    MisconfigurationException = _base_for_all_packages(
        ".utilities.exceptions", "MisconfigurationException"
    )
    WANDB_LOGGERS = _in_all_packages(".loggers", "WandbLogger")
    MLFLOW_LOGGERS = _in_all_packages(".loggers", "MLFlowLogger")
    DUMMY_LOGGERS = _in_all_packages(".loggers.logger", "DummyLogger")

if _logger is not None and _logger.name != rank_zero.__name__:
    rank_zero.log = _logger


class SettingRefusal(Refusal, MisconfigurationException):
    """A setting of the Trainer cannot be used."""


class BatchCounter(batch_counter.BatchCounter):
    """Count the examples in the batches of one fit.

    Args:
        trainer: The Trainer of the fit; it knows how many data loaders a step draws from.
        name: Name of the callback that counts, for the warning.
    """

    def __init__(self, trainer: pl.Trainer | None = None, name: str = "NoiseScaleMonitor") -> None:
        super().__init__(name)
        self._trainer = trainer

    def count(self, batch: Any) -> Count:
        """Count the examples of a batch, also of one from several loaders."""
        return count_examples(self._trainer, batch)

    def sequence_first_module(self) -> str:
        """Name a module of the fit's model that takes sequences first."""
        return (
            ""
            if self._trainer is None
            else batch_counter.sequence_first_in(self._trainer.lightning_module)
        )

    def uncountable(self, batch: Any) -> Exception:
        """Return the error for a batch whose size is not known."""
        return NotMeasured(
            "`batch_size_fn` must be given for batches whose size cannot be inferred, got a batch"
            f" of type {type(batch).__name__}{self.unequal}. Pass a function from a batch to the"
            " number of this rank's examples in it."
        )

    def warn(self, message: str) -> None:
        """Warn on one rank."""
        rank_zero_warn(message)


def count_examples(trainer: pl.Trainer | None, batch: Any) -> Count:
    """Count the examples in a batch, which may be made up of batches of several loaders."""
    loaders = None if trainer is None else trainer.fit_loop._combined_loader
    if loaders is None or len(loaders.flattened) < 2:
        return examples_in(batch)
    return examples_of_loaders(loaders.iterables, batch)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch, in one order on all ranks; none if it cannot be searched."""
    tensors: list[torch.Tensor] = []
    try:
        apply_to_collection(batch, torch.Tensor, tensors.append)
    except Exception:  # frozen data classes, and what users make themselves
        return []
    return tensors


def is_compiled(module: pl.LightningModule) -> bool:
    """Return whether a module was made by `torch.compile`, which Lightning unwraps."""
    return getattr(module, "_compiler_ctx", None) is not None


def should_log(trainer: pl.Trainer) -> bool:
    """Return whether Lightning logs at the current step."""
    return bool(trainer._logger_connector.should_update_logs)


def has_log_steps(trainer: pl.Trainer) -> bool:
    """Return whether Lightning logs at any step: `log_every_n_steps=0` means never."""
    # Set on the Trainer by its logger connector, where type checkers do not see it.
    return bool(trainer.log_every_n_steps)  # type: ignore[attr-defined]


def log_step(trainer: pl.Trainer) -> int:
    """Return the step in Lightning's logs: batches after which an optimizer stepped."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def show_in_progress_bar(trainer: pl.Trainer, name: str, value: str) -> None:
    """Show a value in the progress bar alone. `self.log` would also send it to every logger."""
    # Declared for floats; the progress bars show strings as they are.
    trainer._logger_connector._progress_bar_metrics[name] = value  # type: ignore[assignment]


def callbacks_of(trainer: pl.Trainer) -> list[Any]:
    """Return the callbacks, in the order they are called."""
    # Set on the Trainer by its callback connector, where type checkers do not see it.
    return list(getattr(trainer, "callbacks", []))


_BETWEEN_PASSES = ("on_after_backward", "on_before_zero_grad", "backward", "optimizer_zero_grad")
"""Hooks that run between the backward passes of a step."""


def hooks_between_passes(trainer: pl.Trainer) -> list[str]:
    """Name the user's hooks that run between the backward passes of a step."""
    ours = __name__.partition(".")[0]
    kinds = [type(one) for one in (trainer.lightning_module, *callbacks_of(trainer))]
    own = ("lightning.", "pytorch_lightning.", f"{ours}.")
    return [
        f"`{kind.__name__}.{name}`"
        for kind in dict.fromkeys(kinds)
        for name in _BETWEEN_PASSES
        if (hook := getattr(kind, name, None)) is not None
        if not getattr(hook, "__module__", "").startswith(own)
    ]


def set_callbacks(trainer: pl.Trainer, callbacks: list[Any]) -> None:
    """Replace the callbacks. A loop over the old list is not affected."""
    trainer.callbacks = callbacks  # type: ignore[attr-defined]  # see `callbacks_of`


def takes_batch_idx(module: pl.LightningModule) -> bool:
    """Return whether `training_step` of the module takes the index of the batch."""
    return bool(is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2))


def last_step_of(trainer: pl.Trainer) -> float | None:
    """Return the last optimizer step of the fit by its limits of steps and epochs, once it began.

    None if it has none, or if the module steps by hand, where Lightning counts all optimizers.
    """
    if not trainer.lightning_module.automatic_optimization:
        return None
    try:
        steps = float(trainer.estimated_stepping_batches)
    except MisconfigurationException:  # the accumulation changes with the epochs
        return None
    return steps if 0 < steps < math.inf else None


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether the current batch is the last one of its epoch, as far as is known."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def steps_now(trainer: pl.Trainer) -> bool:
    """Return whether the optimizer steps after the current batch."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def metrics_of(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the Trainer's metrics for callbacks, loggers and progress bar, to restore them."""
    connector: Any = trainer._logger_connector
    return [
        connector._callback_metrics,
        connector._logged_metrics,
        connector._progress_bar_metrics,
    ]


def engine_steps(trainer: pl.Trainer) -> bool:
    """Return whether an engine (DeepSpeed's) accumulates: its step is called at each batch."""
    return bool(trainer.strategy.handles_gradient_accumulation)


def is_fitting(trainer: pl.Trainer) -> bool:
    """Return whether the Trainer trains, or validates in training; False in the sanity check."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def was_interrupted(trainer: pl.Trainer) -> bool:
    """Return whether an error or a signal ended the fit, so that other ranks may be elsewhere."""
    return trainer.state.status == "interrupted"


def looks_after_batch(trainer: pl.Trainer, root: str) -> bool:
    """Return whether Lightning looks up a metric after the current batch, which ends a step.

    Checkpoints every n steps do, and learning-rate schedules that step by a metric every n steps.
    Checkpoints that save after some time decide later: they find the last metrics.

    Args:
        trainer: In `on_train_batch_end`.
        root: Prefix of the names of the metrics.
    """
    for checkpoint in trainer.checkpoint_callbacks:
        every = getattr(checkpoint, "_every_n_train_steps", 0)
        if every and _begins(checkpoint, root) and trainer.global_step % every == 0:
            return True
    batches = trainer.fit_loop.epoch_loop.batch_idx + 1
    return any(
        schedule.reduce_on_plateau
        and schedule.interval == "step"
        and batches % schedule.frequency == 0
        and _begins(schedule, root)
        for schedule in trainer.lr_scheduler_configs
    )


def _begins(watcher: Any, root: str) -> bool:
    return (getattr(watcher, "monitor", None) or "").startswith(root)


def schedules_of(trainer: pl.Trainer) -> list[Any]:
    """Return the learning-rate schedules of the fit."""
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def has_plateau(trainer: pl.Trainer) -> bool:
    """Return whether a schedule steps by a metric (ReduceLROnPlateau)."""
    return any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)


def has_validation(trainer: pl.Trainer) -> bool:
    """Return whether the Trainer validates during this fit."""
    return bool(trainer.enable_validation)


VALIDATES_NEVER = {"val_check_interval": 2**62, "check_val_every_n_epoch": None}
"""Arguments of a Trainer that validates only after `validate_next`."""


def validate_next(trainer: pl.Trainer) -> None:
    """Have the Trainer validate after the current batch, once. Call in `on_train_batch_end`."""
    trainer.val_check_batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1


def validate_no_more(trainer: pl.Trainer) -> None:
    """Take `validate_next` back, after the validation."""
    trainer.val_check_batch = VALIDATES_NEVER["val_check_interval"]


def skip_batches(trainer: pl.Trainer, number: int, until: float) -> int:
    """Read on in the training data, without training. Call in `on_train_batch_end`.

    Args:
        trainer: The Trainer.
        number: Most batches.
        until: When to stop, by `time.monotonic`.

    Returns:
        How many batches were read; fewer if time was up, or the data had no more.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    with suppress(StopIteration):  # which the loop meets, too
        for read in range(number):
            if time.monotonic() >= until:
                return read
            next(fetcher)
        return number
    return read


def first_loader(trainer: pl.Trainer) -> Any:
    """Return the first data loader that the Trainer trains on."""
    combined = trainer.fit_loop._combined_loader
    return None if combined is None else combined.flattened[0]


def summary_writer_of(logger: Any) -> SummaryWriter | None:
    """Return a logger's SummaryWriter of torch, or None. TensorBoard need not be installed."""
    # Whoever has made one has imported it.
    tensorboard = sys.modules.get("torch.utils.tensorboard")
    writer = getattr(logger, "experiment", None)
    made = tensorboard is not None and isinstance(writer, tensorboard.SummaryWriter)
    return writer if made else None


def publish(trainer: pl.Trainer, metrics: dict[str, float]) -> None:
    """Put metrics into `callback_metrics`, for early stopping, checkpoints and tuners."""
    trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})


def tensor_parallel_size(trainer: pl.Trainer) -> int:
    """Return the ranks that have one batch, as they hold one model together."""
    mesh: Any = getattr(trainer.strategy, "_device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return int(mesh["tensor_parallel"].size()) if "tensor_parallel" in names else 1
