# SPDX-License-Identifier: Apache-2.0
"""What the callback needs of transformers and accelerate that they do not offer in public.

Read in transformers 5.23.0 and accelerate 1.15.0, with torch 2.13.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import DefaultFlowCallback, TrainerCallback, TrainerState
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.utils.logging import get_logger

from noisescale.batches import batch_counter
from noisescale.collectors.choosing import unwrapped


def on_first_training_pass(
    model: nn.Module, callback: Callable[[nn.Module], None]
) -> RemovableHandle:
    """Call back once, with the module that the Trainer calls, when it trains `model` first.

    That is DistributedDataParallel or what torch.compile made of it. The Trainer gives its
    callbacks the model inside only, so all modules are watched until the outermost is called.
    """

    def on_forward(module: nn.Module, _: Any) -> None:
        inner = unwrapped(module)
        if isinstance(inner, DistributedDataParallel):
            inner = unwrapped(inner.module)
        if inner is unwrapped(model) and trains(module):
            handle.remove()
            callback(module)

    handle: RemovableHandle = register_module_forward_pre_hook(on_forward)
    return handle


def trains(module: nn.Module) -> bool:
    """Whether a forward pass under way is one to learn from."""
    return module.training and torch.is_grad_enabled()


def is_last_micro_batch() -> bool:
    """Whether the optimizer steps after the micro-batch under way."""
    return bool(GradientState().sync_gradients)


def distributed_type() -> str:
    """The name of accelerate's way of training."""
    return str(AcceleratorState().distributed_type.value)


def saved_state(callback: TrainerCallback, state: TrainerState) -> dict[str, Any]:
    """What a callback's `state` was when the checkpoint that training goes on from was saved.

    The Trainer reads it with the rest of its own state, and makes new callbacks of it only where
    `restore_callback_states_from_checkpoint` is set, which it is not by default.
    """
    saved: Any = state.stateful_callbacks
    found = saved.get(type(callback).__name__) if state.global_step else None
    # Several callbacks of one class leave a list, of which nobody knows whose is whose.
    return found if isinstance(found, dict) else {}


def loss_share(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """What the Trainer multiplies the mean loss of a micro-batch by, up to a common factor.

    Models that take `num_items_in_batch` divide the sum of their losses by the number of labels
    in the whole step, so that each micro-batch counts by its share of them.

    Args:
        model: Not wrapped.
        inputs: Keyword arguments of its forward pass.

    Returns:
        None where all micro-batches count alike. A tensor on the device: reading it would wait.
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
    share: Tensor = labels.ne(-100).sum() / items
    return share


def _shifts_labels(model: nn.Module) -> bool:
    """Whether a model's loss takes no account of each sequence's first label."""
    get_base_model: Any = getattr(model, "get_base_model", lambda: model)  # that of PEFT's
    inner = get_base_model()
    encodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return not encodes and LOSS_MAPPING.get(getattr(inner, "loss_type", "")) is ForCausalLMLoss


class BatchCounter(batch_counter.BatchCounter):
    """Count the examples in the keyword arguments of a model's forward pass."""

    def __init__(self) -> None:
        super().__init__("NoiseScaleCallback")

    def uncountable(self, batch: Mapping[str, Any]) -> ValueError:
        """Return an error that names the arguments."""
        return ValueError(
            "`batch_size_fn` must be given for batches whose size cannot be inferred, got one"
            f" of {', '.join(batch) or 'no keyword arguments'}. Pass a function from the"
            " model's keyword arguments to the number of examples this rank has in them."
        )

    def warn(self, message: str) -> None:
        """Warn on one rank."""
        warn(message)


def go_first(callback: TrainerCallback) -> None:
    """Move a callback before those that report, which the Trainer puts before the user's.

    Logs reach all callbacks as one dict, in their order: what is added to it is seen by those
    that come later.
    """
    for callbacks in lists_with(callback):
        callbacks.remove(callback)
        callbacks.insert(0, callback)


def lists_with(callback: TrainerCallback) -> list[list[TrainerCallback]]:
    """The Trainers' own lists of callbacks that a callback is in: they hand out no reference."""
    return [
        holder
        for holder in gc.get_referrers(callback)
        if isinstance(holder, list) and any(isinstance(c, DefaultFlowCallback) for c in holder)
    ]


def takes_token_ids(model: nn.Module) -> bool:
    """Whether the examples of a model of transformers are sequences of tokens, and nothing else."""
    config = getattr(model, "config", None)
    return getattr(model, "main_input_name", None) == "input_ids" and not hasattr(
        config, "vision_config"
    )


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
        "The loss is computed outside the model, from labels that NoiseScaleCallback does not see."
        " The callback assumes that all micro-batches have the same number of labels. If they do"
        " not, B_simple reads too high: by the relative variance of that number, times the size of"
        " a micro-batch."
    )
