# SPDX-License-Identifier: Apache-2.0
"""Trainers of TRL that train on several completions of each prompt: GRPO, RLOO and their kin.

They shuffle completions before they make micro-batches of them, so the prompt of a row is known by
its tokens alone. The model gets labels of -100 for all but the completion.

What is read here is that of TRL 1.16: the arguments of its configurations and of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from noisescale.batches.row_groups import RowGroups, checked_row_groups
from noisescale.guard import NotMeasured

if TYPE_CHECKING:
    from transformers import TrainingArguments

UNIT = "completions"

_OVER_TOKENS = ("cispo", "dapo", "vespo")
"""Losses that are the sum over tokens divided by the tokens of all completions of a generation."""

_GROUP_FN = (
    "Pass `group_fn`: a function from the model's keyword arguments to the prompt of each row."
)


class Rows(NamedTuple):
    """The rows of a micro-batch."""

    groups: RowGroups
    weights: Tensor
    """What each row has in the loss."""
    mean_of_means: bool
    """Whether the step's loss is a mean over micro-batches."""


def has_rollouts(args: TrainingArguments) -> bool:
    """Return whether the configuration is one of TRL's with several generations of a prompt."""
    of_trl = any(kind.__module__.partition(".")[0] == "trl" for kind in type(args).__mro__)
    return of_trl and hasattr(args, "num_generations")


def check_rollouts(args: Any) -> None:
    """Raise if the loss couples prompts.

    Raises:
        NotMeasured: The message names the setting and the remedy.
    """
    coupling = {
        "scale_rewards": ("batch", 'Set it to "group" or "none".'),
        "multi_objective_aggregation": ("normalize_then_sum", 'Set it to "sum_then_normalize".'),
        "normalize_advantages": (True, "Set it to False."),
    }
    for name, (value, remedy) in coupling.items():
        if getattr(args, name, None) == value:
            reason = "advantages are scaled over all prompts, so these are not independent"
            raise NotMeasured.of_setting(name, repr(value), reason, remedy)
    of_rank = args.per_device_train_batch_size * args.steps_per_generation
    if args.world_size > 1 and of_rank % args.num_generations:
        reason = f"the {of_rank} completions of a device are not those of whole prompts"
        remedy = (
            "Let `per_device_train_batch_size` times `steps_per_generation` be a multiple of it."
        )
        got = str(args.num_generations)
        raise NotMeasured.of_setting("num_generations", got, reason, remedy)


def rows_in(inputs: Mapping[str, Any], args: Any) -> Rows:
    """Return the prompt of each row of a micro-batch, and its weight. Copies tokens to the host.

    Args:
        inputs: The keyword arguments of the model's forward pass.
        args: The configuration.

    Raises:
        NotMeasured: If the prompts cannot be told apart.
    """
    found = [inputs.get(name) for name in ("input_ids", "attention_mask", "labels")]
    tables = [x for x in found if isinstance(x, Tensor) and x.dim() == 2]
    if len(tables) < len(found):
        raise NotMeasured(
            "The model must get the tokens of prompts and completions with labels, got"
            f" {', '.join(inputs)}: which completions have one prompt is not known. {_GROUP_FN}"
        )
    if "pixel_values" in inputs:
        raise NotMeasured(
            "Prompts must be told apart by their tokens, got prompts with images, which have the"
            f" same tokens for other images. {_GROUP_FN}"
        )
    ids, mask, labels = tables
    completion = labels != -100
    prompts = torch.where(completion | (mask == 0), -1, ids).tolist()
    named = [tuple(token for token in row if token >= 0) for row in prompts]
    groups = checked_row_groups(named)._replace(apart=True)
    return Rows(groups, *_weights(completion.sum(1).float(), args))


def _weights(tokens: Tensor, args: Any) -> tuple[Tensor, bool]:
    """Return the weight of each row by the number of its tokens; and `Rows.mean_of_means`."""
    loss_type = getattr(args, "loss_type", None)
    over_step = args.steps_per_generation == args.gradient_accumulation_steps
    if loss_type == "bnpo":
        return tokens / tokens.sum(), True
    if loss_type in _OVER_TOKENS and over_step:
        return tokens, False
    return torch.ones_like(tokens), False


def news_of(args: Any) -> list[str]:
    """Return what there is to say when training starts."""
    per_window = args.steps_per_generation / args.gradient_accumulation_steps
    uses = args.num_iterations * max(per_window, 1.0)
    if uses <= 1:
        return []
    return [
        f"  The rollouts of a generation serve {uses:g} steps: the noise scale is that of these"
        " rollouts"
    ]
