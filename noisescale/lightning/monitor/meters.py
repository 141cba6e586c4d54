# SPDX-License-Identifier: Apache-2.0
"""A meter for the gradients of each optimizer of a Trainer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from noisescale.history.metric_names import prefix_of
from noisescale.lightning.averaging_off import callback_that_does_not_average
from noisescale.lightning.supported import accumulates
from noisescale.lightning.trainer_access import engine_steps
from noisescale.meter.choosing import assigned_groups
from noisescale.meter.meter import Meter
from noisescale.meter.options import MeterOptions
from noisescale.meter.run_log import RunLog

if TYPE_CHECKING:
    import pytorch_lightning as pl


def has_several(trainer: pl.Trainer) -> bool:
    """Return whether the module steps several optimizers by hand."""
    return len(trainer.optimizers) > 1 and not trainer.lightning_module.automatic_optimization


def meters_for(
    trainer: pl.Trainer, options: MeterOptions, *, name: str | None = None, together: bool = False
) -> list[RunLog]:
    """Return a meter for each optimizer, or one meter with automatic optimization.

    Args:
        trainer: The Trainer of a fit that is about to start, with its strategy set up.
        options: The monitor's options, from `with_assigned_groups`.
        name: The monitor's name.
        together: Whether all optimizers step on the gradient of one loss, which has one meter.

    Raises:
        ValueError: If the options do not fit it.
    """
    model = trainer.strategy.model
    assert model is not None
    averaged = callback_that_does_not_average(trainer) is None
    several = has_several(trainer) and not together
    meters: list[RunLog] = []
    for index, optimizer in enumerate(trainer.optimizers if several else trainer.optimizers[:1]):
        try:
            meter = Meter.from_options(
                model,
                options,
                optimizer,
                parameters=_parameters([optimizer]) if several else trained_parameters(trainer),
                grad_scaler=getattr(trainer.strategy.precision_plugin, "scaler", None),
                averaged=averaged,
            )
        except ValueError:
            for made in reversed(meters):
                made.meter.close()
            raise
        meters.append(
            RunLog(
                meter,
                optimizer,
                prefix_of(index, name),
                beside=trainer.optimizers[1:] if together else (),
                averaged=averaged,
                loop="lightning",
            )
        )
    return meters


def way_of_measuring(trainer: pl.Trainer, options: MeterOptions) -> list[str]:
    """Return what to say of the way of measuring, once it is known that it works."""
    if trainer.world_size > 1 or not options.leaves_choice or accumulates(trainer):
        return []
    return [
        (
            "NoiseScaleMonitor compares the halves of a batch, because one process trains and does"
            " not accumulate. A measured step needs one more backward pass, so few steps are"
            " measured. With `Trainer(accumulate_grad_batches=2)` no extra pass is needed."
        )
    ]


def with_assigned_groups(options: MeterOptions, trainer: pl.Trainer) -> MeterOptions:
    """Return the options with groups assigned over the parameters of all optimizers.

    A pattern that matches no parameter of any optimizer is an error.
    """
    model = trainer.strategy.model
    assert model is not None
    groups = assigned_groups(model, options.groups, trained_parameters(trainer))
    return replace(options, groups=groups)


def ids_of_trained(trainer: pl.Trainer) -> set[int]:
    """Return the ids of the parameters that are trained now."""
    return {id(p) for p in trained_parameters(trainer) if p.requires_grad}


def trained_parameters(trainer: pl.Trainer) -> list[nn.Parameter]:
    """Return the parameters of all optimizers. DeepSpeed's has others, made of the model's."""
    if engine_steps(trainer):
        return list(trainer.lightning_module.parameters())
    return _parameters(trainer.optimizers)


def _parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [p for group in groups for p in group["params"]]
