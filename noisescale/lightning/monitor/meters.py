# SPDX-License-Identifier: Apache-2.0
"""What there is to measure of a Trainer: the gradients of each of its optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from noisescale.collectors.choosing import assigned_groups
from noisescale.history.metric_names import prefix_of
from noisescale.lightning.supported import accumulates
from noisescale.lightning.trainer_access import is_compiled, rank_zero_info, rank_zero_warn
from noisescale.meter.logged_meter import LoggedMeter
from noisescale.meter.meter import NoiseScaleMeter
from noisescale.meter.options import MeterOptions
from noisescale.meter.refusals import nothing_to_measure

if TYPE_CHECKING:
    import pytorch_lightning as pl


def meters_for(
    trainer: pl.Trainer, options: MeterOptions, *, name: str | None = None
) -> list[LoggedMeter]:
    """Return a meter for each optimizer, for one where gradients are taken together.

    Args:
        trainer: About to fit, its strategy set up.
        options: The monitor's.
        name: The monitor's.

    Returns:
        None at all, after one warning, where there is nothing to measure.
    """
    model = trainer.strategy.model
    assert model is not None
    if not ids_of_trained(trainer):
        rank_zero_warn(
            "NoiseScaleMonitor has nothing to measure: no parameter that an optimizer has requires"
            " a gradient. Training goes on without it. Unfreeze some before training starts, or"
            " leave it out."
        )
        return []
    our_choice = trainer.world_size < 2 and options.leaves_choice
    several = len(trainer.optimizers) > 1 and not trainer.lightning_module.automatic_optimization
    # A pattern may match parameters of one optimizer only; none at all is an error, and no reason
    # to go on without measuring.
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group["params"]]
    options = replace(options, groups=assigned_groups(model, options.groups, parameters))
    meters: list[LoggedMeter] = []
    for index, optimizer in enumerate(trainer.optimizers if several else trainer.optimizers[:1]):
        of_one = [optimizer] if several else trainer.optimizers
        try:
            if options.small_batch == "example" and is_compiled(trainer.lightning_module):
                raise ValueError(
                    "`model` must not be compiled where examples are the small batches, got one"
                    ' made by torch.compile. Leave it uncompiled, or choose `small_batch="rank"`'
                    ' or "micro_batch".'
                )
            meter = NoiseScaleMeter.from_options(
                model,
                options,
                optimizer,
                parameters=[p for o in of_one for g in o.param_groups for p in g["params"]],
                grad_scaler=getattr(trainer.strategy.precision_plugin, "scaler", None),
            )
        except ValueError as reason:
            for made in reversed(meters):
                made.meter.close()
            if not our_choice:
                raise
            warn_that_nothing_is_measured(reason)
            return []
        meters.append(LoggedMeter(meter, prefix_of(index, name)))
    if our_choice and not accumulates(trainer):
        rank_zero_info(
            "NoiseScaleMonitor compares the halves of a batch: one process trains and does not"
            " accumulate. A measured step has one backward pass more; unless you set"
            " `every_n_steps`, that is one step in ten."
            " `Trainer(accumulate_grad_batches=2)` needs none."
        )
    return meters


def ids_of_trained(trainer: pl.Trainer) -> set[int]:
    """What tells the parameters that are trained now from those that were earlier."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {id(p) for group in groups for p in group["params"] if p.requires_grad}


def warn_that_one_is_not_measured(which: int, reason: Exception) -> None:
    """Say so once: the gradients of an optimizer, by its index, cannot be measured."""
    rank_zero_warn(
        f"NoiseScaleMonitor does not measure the gradients of optimizer {which}: {reason} The"
        " others are measured on."
    )


def warn_that_nothing_is_measured(reason: Exception) -> None:
    """Say so once, and what to do. `reason`: why halves of a batch cannot be compared."""
    remedy = (
        "(`Trainer(accumulate_grad_batches=2)`), or use more devices"
        ' (`Trainer(devices=2, strategy="ddp")`, also with `accelerator="cpu"`).'
    )
    rank_zero_warn(nothing_to_measure("NoiseScaleMonitor", reason, remedy))
