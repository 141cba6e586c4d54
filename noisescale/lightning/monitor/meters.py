# SPDX-License-Identifier: Apache-2.0
"""What there is to measure of a Trainer: the gradients of each of its optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from noisescale.collectors.choosing import assigned_groups
from noisescale.history.metric_names import prefix_of
from noisescale.lightning.supported import accumulates
from noisescale.lightning.trainer_access import is_compiled, rank_zero_info
from noisescale.meter.logged_meter import LoggedMeter
from noisescale.meter.meter import NoiseScaleMeter
from noisescale.meter.options import MeterOptions

if TYPE_CHECKING:
    import pytorch_lightning as pl


def meters_for(
    trainer: pl.Trainer, options: MeterOptions, *, name: str | None = None
) -> list[LoggedMeter]:
    """Return a meter for each optimizer, for one where gradients are taken together.

    Args:
        trainer: About to fit, its strategy set up.
        options: The monitor's, `with_assigned_groups`.
        name: The monitor's.

    Raises:
        ValueError: If what the options ask for cannot be measured.
    """
    model = trainer.strategy.model
    assert model is not None
    several = len(trainer.optimizers) > 1 and not trainer.lightning_module.automatic_optimization
    meters: list[LoggedMeter] = []
    for index, optimizer in enumerate(trainer.optimizers if several else trainer.optimizers[:1]):
        try:
            if options.small_batch == "example" and is_compiled(trainer.lightning_module):
                raise ValueError(
                    "`model` must not be compiled if single examples are compared, got one that"
                    " torch.compile made. Leave it uncompiled, or choose"
                    ' `small_batch="rank"` or "micro_batch".'
                )
            meter = NoiseScaleMeter.from_options(
                model,
                options,
                optimizer,
                parameters=_parameters([optimizer] if several else trainer.optimizers),
                grad_scaler=getattr(trainer.strategy.precision_plugin, "scaler", None),
            )
        except ValueError:
            for made in reversed(meters):
                made.meter.close()
            raise
        meters.append(LoggedMeter(meter, optimizer, prefix_of(index, name)))
    if trainer.world_size < 2 and options.leaves_choice and not accumulates(trainer):
        rank_zero_info(
            "NoiseScaleMonitor compares the two halves of a batch, because one process trains and"
            " does not accumulate. A measured step has one more backward pass, so few steps are"
            " measured. With `Trainer(accumulate_grad_batches=2)` no step needs that pass."
        )
    return meters


def with_assigned_groups(options: MeterOptions, trainer: pl.Trainer) -> MeterOptions:
    """Have a pattern match parameters of any optimizer; one that matches none is an error."""
    model = trainer.strategy.model
    assert model is not None
    groups = assigned_groups(model, options.groups, _parameters(trainer.optimizers))
    return replace(options, groups=groups)


def ids_of_trained(trainer: pl.Trainer) -> set[int]:
    """What tells the parameters that are trained now from those that were earlier."""
    return {id(p) for p in _parameters(trainer.optimizers) if p.requires_grad}


def _parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [p for group in groups for p in group["params"]]
