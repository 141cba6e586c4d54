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

_KNOWN = ("GRPOConfig", "RLOOConfig")
"""The configurations whose trainers were read."""


class Rows(NamedTuple):
    """The rows of a micro-batch."""

    groups: RowGroups
    weights: Tensor
    """What each row has in the loss."""
    mean_of_means: bool
    """Whether the step's loss is a mean over micro-batches."""


def has_rollouts(args: TrainingArguments) -> bool:
    """Return whether the configuration is that of a known trainer, or derived from it by users."""
    of_trl = (kind for kind in type(args).__mro__ if kind.__module__.partition(".")[0] == "trl")
    return getattr(next(of_trl, None), "__name__", "") in _KNOWN


def check_rollouts(args: Any, small_batch: str = "auto") -> None:
    """Raise if the loss couples prompts, or hides from halves what it is made of.

    Raises:
        NotMeasured: The message names the setting and the remedy.
    """
    scaled = "advantages are scaled over all prompts, so these are not independent"
    beside = "the loss has a part that halves of a batch do not see"
    coupling: dict[str, tuple[object, str, str]] = {
        "scale_rewards": ("batch", scaled, 'Set it to "group" or "none".'),
        "multi_objective_aggregation": (
            *("normalize_then_sum", scaled),
            'Set it to "sum_then_normalize".',
        ),
        "normalize_advantages": (True, scaled, "Set it to False."),
        "use_adaptive_entropy": (True, beside, "Set it to False."),
    }
    for name, (value, reason, remedy) in coupling.items():
        if getattr(args, name, None) == value:
            raise NotMeasured.of_setting(name, repr(value), reason, remedy)
    if coefficient := getattr(args, "entropy_coef", 0.0):
        raise NotMeasured.of_setting("entropy_coef", f"{coefficient:g}", beside, "Set it to 0.")
    if (quantile := getattr(args, "top_entropy_quantile", 1.0)) < 1:
        reason = "which tokens count is decided over all prompts, so these are not independent"
        raise NotMeasured.of_setting(
            "top_entropy_quantile", f"{quantile:g}", reason, "Set it to 1."
        )
    if small_batch == "micro_batch":
        reason = "completions are shuffled, so that micro-batches share prompts"
        raise NotMeasured.of_setting("small_batch", small_batch, reason, "Leave it out.")
    of_rank = args.per_device_train_batch_size * args.steps_per_generation
    if args.world_size > 1 and of_rank % args.num_generations:
        reason = f"the {of_rank} completions of a device are not those of whole prompts"
        remedy = (
            "Let `per_device_train_batch_size` times `steps_per_generation` be a multiple of it."
        )
        got = str(args.num_generations)
        raise NotMeasured.of_setting("num_generations", got, reason, remedy)


def rows_in(inputs: Mapping[str, Any], args: Any, prompts: Any = None) -> Rows:
    """Return the prompt of each row of a micro-batch, and its weight. Copies tokens to the host.

    Args:
        inputs: The keyword arguments of the model's forward pass.
        args: The configuration.
        prompts: The prompt of each row, as `group_fn` returned it; None: by its tokens.

    Raises:
        NotMeasured: If the prompts cannot be told apart.
    """
    found = [inputs.get(name) for name in ("input_ids", "attention_mask", "labels")]
    tables = [x for x in found if isinstance(x, Tensor) and x.dim() == 2]
    if len(tables) < len(found):
        raise NotMeasured(
            "The model must get the tokens of prompts and completions with labels, got"
            f" {', '.join(inputs)}: which completions have one prompt, and what they weigh, is not"
            " known."
        )
    ids, mask, labels = tables
    completion = labels != -100
    if prompts is None and "pixel_values" in inputs:
        raise NotMeasured(
            "Prompts must be told apart by their tokens, got prompts with images, which have the"
            " same tokens for other images. Pass `group_fn`: a function from the model's keyword"
            " arguments to the prompt of each row."
        )
    if prompts is None:
        tokens = torch.where(completion | (mask == 0), -1, ids).tolist()
        prompts = [tuple(token for token in row if token >= 0) for row in tokens]
    groups = checked_row_groups(prompts, "group_fn")._replace(apart=True)
    return Rows(groups, *_weights(completion.sum(1).float(), args))


def _weights(tokens: Tensor, args: Any) -> tuple[Tensor, bool]:
    """Return the weight of each row by the number of its tokens; and `Rows.mean_of_means`."""
    loss_type = getattr(args, "loss_type", None)
    over_step = args.steps_per_generation == args.gradient_accumulation_steps
    if loss_type == "bnpo":
        return tokens / tokens.sum().clamp(min=1), True
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
