# SPDX-License-Identifier: Apache-2.0
"""All uses of private parts of transformers and accelerate.

They were read in transformers 5.23.0 and accelerate 1.15.0, with torch 2.13.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.hooks import RemovableHandle
from transformers import (
    DefaultFlowCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import (
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy
from transformers.utils.logging import get_logger

from noisescale.batches import batch_counter
from noisescale.collectors.deepspeed import innermost
from noisescale.guard import Guard, NotMeasured
from noisescale.meter.choosing import module_in, unwrap

_Found = TypeVar("_Found")


def has_one_batch(loader: Any) -> bool:
    """Return whether an epoch has one batch. The length of a stream is not known."""
    try:
        return len(loader) == 1
    except TypeError:
        return False


def on_first_training_pass(
    model: nn.Module, callback: Callable[[nn.Module], None]
) -> RemovableHandle:
    """Call `callback` once, at the first forward pass that trains `model`.

    The callback receives the module that the Trainer calls. It may be DistributedDataParallel, or
    the result of torch.compile. The Trainer only gives the model inside to callbacks, so all
    modules are watched until the outermost one is called.
    """

    def on_forward(module: nn.Module, _: Any) -> None:
        if unwrap(module_in(unwrap(module))) is unwrap(model) and trains(module):
            handle.remove()
            callback(module)

    handle: RemovableHandle = register_module_forward_pre_hook(on_forward)
    return handle


def trains(module: nn.Module) -> bool:
    """Return whether the present forward pass is part of training."""
    return module.training and torch.is_grad_enabled()


def is_last_micro_batch() -> bool:
    """Return whether the optimizer steps after the present micro-batch."""
    return bool(GradientState().sync_gradients)


def distributed_type() -> str:
    """Return the name of accelerate's way of training."""
    return str(AcceleratorState().distributed_type.value)


def saved_state(callback: TrainerCallback, state: TrainerState) -> dict[str, Any]:
    """Return a callback's `state` from the checkpoint with which training continues.

    The Trainer reads this state with its own. It only restores callbacks from it if
    `restore_callback_states_from_checkpoint` is set, which is not the default.
    """
    saved: Any = state.stateful_callbacks
    found = saved.get(type(callback).__name__) if state.global_step else None
    # Several callbacks of one class leave a list, of which nobody knows whose is whose.
    return found if isinstance(found, dict) else {}


def loss_share(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the weights of a micro-batch's rows in the step's loss, up to a common factor.

    Models that take `num_items_in_batch` divide the sum of their losses by the number of labels in
    the whole step. So the weight of a micro-batch is its share of these labels.

    Args:
        model: The model without wrappers.
        inputs: The keyword arguments of the model's forward pass.

    Returns:
        A weight for each row, as a tensor on the device: reading it would wait for the device.
        None if all micro-batches have the same weight.
    """
    items = inputs.get("num_items_in_batch")
    if items is None:
        return None
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif "labels" in inputs:
        labels = inputs["labels"][..., 1:] if _shifts_labels(model) else inputs["labels"]
    else:
        _warn_that_labels_are_hidden()
        return None
    counted: Tensor = labels.ne(-100)
    share: Tensor = (counted.flatten(1).sum(1) if counted.dim() > 1 else counted.sum()) / items
    return share


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether a model's loss ignores the first label of each sequence."""
    get_base_model: Any = getattr(model, "get_base_model", lambda: model)  # that of PEFT's
    inner = get_base_model()
    encodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return not encodes and LOSS_MAPPING.get(getattr(inner, "loss_type", "")) is ForCausalLMLoss


class BatchCounter(batch_counter.BatchCounter):
    """Count the examples in the keyword arguments of a model's forward pass."""

    def __init__(self) -> None:
        super().__init__("NoiseScaleCallback")

    def uncountable(self, batch: Mapping[str, Any]) -> NotMeasured:
        """Return an error that names the arguments."""
        return NotMeasured(
            "`batch_size_fn` must be given for batches whose size cannot be inferred, got a batch"
            f" of {', '.join(batch) or 'no keyword arguments'}{self.unequal}. Pass a function from"
            " the model's keyword arguments to the number of this rank's examples."
        )

    def warn(self, message: str) -> None:
        """Warn on one rank."""
        warn(message)


def go_first(callback: TrainerCallback) -> None:
    """Move a callback before the callbacks that report. The Trainer puts these first.

    All callbacks receive the logs as one dict, in order. So later callbacks see the keys that an
    earlier one adds.
    """
    for callbacks in lists_with(callback):
        callbacks.remove(callback)
        callbacks.insert(0, callback)


def lists_with(callback: TrainerCallback) -> list[list[TrainerCallback]]:
    """Return the Trainers' own lists that contain a callback. Trainers do not expose them."""
    return [
        holder
        for holder in gc.get_referrers(callback)
        if isinstance(holder, list) and any(isinstance(c, DefaultFlowCallback) for c in holder)
    ]


def folders_of_logs(callback: TrainerCallback, args: TrainingArguments) -> list[Path]:
    """Return the folders for the record of a run: TensorBoard's, or else `output_dir`."""
    folders = {writer.log_dir for writer in tensorboard_writers(callback)}
    return [Path(folder) for folder in folders or {args.output_dir}]


def tensorboard_writers(callback: TrainerCallback) -> list[Any]:
    """Return the writers of TensorBoard beside a callback."""
    beside = callbacks_beside(callback, TensorBoardCallback)
    return [one.tb_writer for one in beside if one.tb_writer is not None]


def hand_over_records(callback: TrainerCallback, records: Iterable[Path], guard: Guard) -> None:
    """Give the record of a run to W&B, MLflow and trackio, as far as there is any by now."""
    for record in records:
        if not record.exists():
            continue
        with guard(f"Trackers did not get {record.name}"):
            for of_mlflow in callbacks_beside(callback, MLflowCallback):
                if of_mlflow._initialized:
                    of_mlflow._ml_flow.log_artifact(str(record))
            for of_wandb in callbacks_beside(callback, WandbCallback):
                if (run := of_wandb._wandb.run) is not None:
                    run.save(str(record), base_path=str(record.parent), policy="now")
            for of_trackio in callbacks_beside(callback, TrackioCallback):
                trackio: Any = of_trackio._trackio
                if (run := trackio.context_vars.current_run.get()) is not None:
                    name = f"run-{run.id}-{record.name}"
                    trackio.log_artifact(str(record), name=name, overwrite=True)


def makes_its_own_loader(trainer: Trainer) -> bool:
    """Return whether a class of the user's makes the batches."""
    return type(trainer).get_train_dataloader is not Trainer.get_train_dataloader


def copy_to_time(
    trainer: Trainer,
    callback: TrainerCallback,
    data: Any,
    change_loader: Callable[[DataLoader[Any]], DataLoader[Any]],
    counts: dict[str, int],
) -> Trainer:
    """Return a copy of a Trainer, with a copy of its model, that does nothing but train.

    Its optimizer is of the same kind and has the same settings, and begins anew. Examples are drawn
    at random with replacement, unless a sampler groups them by length.

    Args:
        trainer: The Trainer, which stays as it is.
        callback: Its only callback.
        data: Its data set.
        change_loader: What to train on instead of its loader.
        counts: Arguments of the training.
    """
    made: Any = copy.copy(trainer)
    args = copy.copy(trainer.args)
    nothing = {f"{what}_strategy": IntervalStrategy.NO for what in ("eval", "logging", "save")}
    off = [
        *("eval_on_start", "load_best_model_at_end", "logging_first_step", "push_to_hub"),
        "auto_find_batch_size",  # a size that does not fit would be timed as a smaller one
    ]
    on = {"dataloader_drop_last": True}
    for name, value in {**nothing, **dict.fromkeys(off, False), **on, **counts}.items():
        setattr(args, name, value)
    config: Any = copy.deepcopy(args.accelerator_config)
    (config.gradient_accumulation_kwargs or {}).pop("num_steps", None)  # of the Trainer's own
    args.accelerator_config = config
    memo: dict[int, Any] = {}
    model = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model), memo)
    for name, value in vars(trainer).items():
        if _is_state(name, value):
            with suppress(TypeError, RuntimeError):  # what cannot be copied is shared
                setattr(made, name, copy.deepcopy(value, memo))
    made.args, made.model, made.model_wrapped, made.model_init = args, model, model, None
    made.optimizer = made.lr_scheduler = None
    if trainer.optimizer is not None:
        own = innermost(trainer.optimizer)
        groups = [
            {**group, "params": [memo[id(p)] for p in group["params"]]}
            for group in own.param_groups
        ]
        made.optimizer = type(own)(groups)
    made.train_dataset, made.control = data, TrainerControl()
    made._train_batch_size = args.train_batch_size
    made.create_accelerator_and_postprocess()
    handler: Any = CallbackHandler
    callbacks = [DefaultFlowCallback(), callback]
    made.callback_handler = handler(callbacks, model, trainer.processing_class, None, None)
    examples = args.train_batch_size * args.gradient_accumulation_steps * args.max_steps

    def sampler_of(dataset: Any = None) -> Any:
        own = type(made)._get_train_sampler(made, dataset)
        if type(own) not in (RandomSampler, SequentialSampler):
            return own
        count = examples * args.world_size
        return RandomSampler(own.data_source, replacement=True, num_samples=count)

    made.log = lambda *_, **__: None  # the end of a training is logged whatever the strategy
    made._get_train_sampler = sampler_of
    made.get_train_dataloader = lambda: change_loader(type(made).get_train_dataloader(made))
    return cast(Trainer, made)


def _is_state(name: str, value: Any) -> bool:
    """Return whether a training may change what a Trainer has beside its model."""
    if isinstance(value, nn.Module):  # a model to compare with stays as it is
        return value.training and name not in ("model", "model_wrapped")
    if isinstance(value, dict | list | set | deque):
        inside = value.values() if isinstance(value, dict) else value
        return not (name.endswith("dataset") or any(isinstance(one, nn.Module) for one in inside))
    return name == "data_collator" or isinstance(value, Tensor | torch.Generator)


def callbacks_beside(callback: TrainerCallback, kind: type[_Found]) -> list[_Found]:
    """Return the callbacks of a kind in the lists that contain a callback."""
    found = [one for callbacks in lists_with(callback) for one in callbacks]
    return [one for one in found if isinstance(one, kind)]


def add_beside(
    callback: TrainerCallback, added: TrainerCallback, state: TrainerState, saved: dict[str, Any]
) -> None:
    """Add a callback that has a state, when a training begins. It is called after all others.

    Args:
        callback: The callback that adds it, in `on_train_begin`.
        added: A callback of a class that is not among the callbacks yet.
        state: The state of the Trainer, which keeps a place for each callback that has a state.
        saved: What the place holds before a checkpoint.
    """
    places: Any = state.stateful_callbacks
    places.setdefault(type(added).__name__, saved)
    for callbacks in lists_with(callback):
        callbacks.append(added)


def go_on_from_step(state: TrainerState, step: int) -> None:
    """Count the optimizer steps of a training that continues from `step`.

    The Trainer has worked out from the number in the checkpoint where the data go on. It also
    keeps the number to average what it logs.
    """
    state.global_step = step
    for one in gc.get_objects():
        if issubclass(type(one), Trainer) and one.state is state:
            one._initial_global_step = one._globalstep_last_logged = step


def add_to_logs(known: Mapping[str, float], logs: dict[str, Any], state: TrainerState) -> None:
    """Add keys to what the Trainer logs now, and to the copy that it has put into its history."""
    logs.update(known)
    if state.log_history:
        state.log_history[-1].update(known)


def takes_token_ids(model: nn.Module) -> bool:
    """Return whether the examples of a model of transformers are sequences of tokens alone."""
    modalities = getattr(model, "input_modalities", ())
    is_text = modalities == "text" or list(modalities) == ["text"]
    return is_text and getattr(model, "main_input_name", None) == "input_ids"


def how_to_shuffle(args: TrainingArguments) -> str:
    """Return how to have the Trainer shuffle the data, with its argument of this version."""
    if not hasattr(args, "train_sampling_strategy"):
        return "Shuffle them (`group_by_length=False`), unless their order is random."
    return 'Shuffle them (`train_sampling_strategy="random"`), unless their order is random.'


def inform(message: str) -> None:
    """Say something where the Trainer says how it trains: shown from verbosity "info" on."""
    if PartialState().is_main_process:
        get_logger("transformers.noisescale").info(message)


def warn(message: str) -> None:
    """Warn on one rank."""
    if PartialState().is_main_process:
        warnings.warn(message, stacklevel=2)


@cache
def _warn_that_labels_are_hidden() -> None:
    warn(
        "The loss is computed outside the model, from labels that NoiseScaleCallback cannot see."
        " The callback assumes that all micro-batches have equally many labels. If they do not,"
        " B_simple reads too high, by the size of a micro-batch times the relative variance of the"
        " number of labels. Let the model compute the loss to avoid this."
    )
