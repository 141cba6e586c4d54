# SPDX-License-Identifier: Apache-2.0
"""Settings of the Trainer under which the noise scale cannot be measured, and the remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from noisescale.collectors.ddp import spoiling_comm_hook
from noisescale.guard import NotMeasured
from noisescale.meter.choosing import unwrap

if TYPE_CHECKING:
    from transformers import TrainingArguments

_UNSUPPORTED_TYPES = {
    "MEGATRON_LM": "Megatron-LM runs the backward pass inside its own engine",
    "XLA": "XLA traces steps instead of running them",
}

_USE_DDP = "Start one process for each device (`torchrun --nproc-per-node N`)."


def check_supported(args: TrainingArguments, distributed_type: str, model: nn.Module) -> None:
    """Raise if the noise scale would be wrong, or cannot be measured.

    Args:
        args: The arguments of the Trainer.
        distributed_type: The name of accelerate's way of training.
        model: The model that is trained.

    Raises:
        NotMeasured: If a setting does not allow measuring. The message names the setting and the
            remedy.
    """
    if distributed_type in _UNSUPPORTED_TYPES:
        reason = _UNSUPPORTED_TYPES[distributed_type]
        raise NotMeasured.of_setting("distributed_type", distributed_type, reason, _USE_DDP)
    if args.n_gpu > 1:
        reason = "nn.DataParallel adds the gradients of all devices in one backward pass"
        raise NotMeasured.of_setting("n_gpu", str(args.n_gpu), reason, _USE_DDP)
    if (size := tensor_parallel_size(model)) > 1:
        reason = "the Trainer gives the ranks of a model one batch"
        raise NotMeasured.of_setting(
            "tp_plan", f"over {size} ranks", reason, "Load the model without it."
        )
    for name, size in split_examples(args.parallelism_config).items():
        reason = f"{size} ranks have one example together"
        remedy = "Leave it at 1: `dp_shard_size` and `dp_replicate_size` are measured."
        raise NotMeasured.of_setting(name, str(size), reason, remedy)
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        reason = "it steps within the backward pass"
        remedy = "Use an optimizer that steps after the pass, such as `adamw_torch`."
        raise NotMeasured.of_setting("optim", name, reason, remedy)


def split_examples(parallelism_config: Any) -> dict[str, int]:
    """Return the sizes of accelerate's ways to give several ranks one example, by their names."""
    names = [f"{kind}_size" for kind in ("tp", "cp", "sp")]
    sizes = {name: getattr(parallelism_config, name, None) or 1 for name in names}
    return {f"parallelism_config.{name}": size for name, size in sizes.items() if size > 1}


def tensor_parallel_size(model: nn.Module) -> int:
    """Return the ranks that a model of transformers is shared out over."""
    return int(getattr(model, "tp_size", None) or 1)


def check_wrapper(module: nn.Module) -> None:
    """Raise if a DDP hook replaces the mean gradient by something else.

    Raises:
        NotMeasured: If there is such a hook. The message names the hook and the remedy.
    """
    ddp = unwrap(module)
    if isinstance(ddp, DistributedDataParallel) and (found := spoiling_comm_hook(ddp)) is not None:
        raise NotMeasured.of_setting("ddp_comm_hook", *found)
