# SPDX-License-Identifier: Apache-2.0
"""Choose the collector for a model, its processes, and the wanted small batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from noisescale.checks import checked_choice
from noisescale.collectors.collector import Collector
from noisescale.collectors.context_parallel import refuse_context_parallel
from noisescale.collectors.ddp import DdpCollector
from noisescale.collectors.fsdp.collector import FsdpCollector, is_sharded
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.groups import Groups, groups_of
from noisescale.collectors.halves.collector import HalvesCollector
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.collectors.momentum import MomentumDirection
from noisescale.collectors.per_example.collector import Layers, PerExampleCollector
from noisescale.collectors.per_example.exclusions import compiled_part
from noisescale.collectors.preconditioner import AdamPreconditioner
from noisescale.collectors.unaveraged import UnaveragedCollector
from noisescale.guard import RefusalError

SmallBatch = Literal["auto", "rank", "micro_batch", "half", "example"]


def choose_collector(
    model: nn.Module,
    *,
    small_batch: SmallBatch = "auto",
    layers: Layers = "all",
    parameters: Iterable[Parameter] | None = None,
    groups: Groups | None = None,
    preconditioner: Optimizer | None = None,
    momentum: Optimizer | None = None,
    cut: Sequence[str] | None = None,
    averaged: bool = True,
) -> Collector:
    """Return the collector for a model, with its hooks installed. Arguments: see `NoiseScaleMeter`.

    `small_batch` and `cut` are as `checked_small_batch` and `checked_cut` return them.

    Raises:
        TypeError: If several processes train and `model` is not wrapped.
        ValueError: If the arguments do not fit the way of training, or nothing is trained.
    """
    compiled = compiled_part(model)
    if small_batch == "example" and compiled is not None:
        raise RefusalError(
            "`model` must not be compiled if examples are the small batches, got torch.compile on"
            f" {compiled or 'all of it'}. Leave it uncompiled, or choose"
            ' small_batch="half", "micro_batch" or "rank".'
        )
    model = unwrapped(model)
    ddp = model if isinstance(model, DistributedDataParallel) else None
    sharded = is_sharded(model)
    if momentum is not None and (sharded or small_batch == "example" or not averaged):
        raise ValueError(
            "`momentum` must be None if gradients are sharded or not averaged, or if examples are"
            f" the small batches, got {_kind(momentum)}. The inner-product and orthogonality tests"
            " need whole gradients: choose another policy for the batch size."
        )
    if not averaged and _processes() > 1:
        _refuse_unaveraged(small_batch, preconditioner, sharded=sharded)
        trained = _trained_or_refuse(model, parameters)
        ranks = dist.distributed_c10d._get_default_group() if ddp is None else ddp.process_group
        return UnaveragedCollector(GradientNorms(trained, groups), ranks)
    if ddp is None and not sharded and _processes() > 1:
        raise TypeError(
            "`model` must be a DistributedDataParallel or FSDP2 module if several processes train,"
            f" got {type(model).__name__}. Wrap it: `DistributedDataParallel(model)`. If each rank"
            " steps on its own gradient, pass `averaged=False`."
        )
    trained = _trained_or_refuse(model, parameters)
    if sharded:
        if small_batch == "example" or preconditioner is not None:
            raise ValueError(
                '`small_batch` must be "auto" or "rank", and `preconditioner` None, if gradients'
                f" are sharded, got {small_batch!r} and {_kind(preconditioner)}. With sharded"
                " gradients, each micro-batch that a rank reduces is a small batch."
            )
        return FsdpCollector(model, trained, groups)
    averaging = ddp is not None and dist.get_world_size(ddp.process_group) > 1
    group = ddp.process_group if ddp is not None and averaging else None
    if averaging:
        refuse_context_parallel()
    if small_batch == "auto":
        small_batch = "rank" if averaging else "half"
    if small_batch == "example":
        return PerExampleCollector(model, trained, groups, group, layers=layers)
    scaling = None if preconditioner is None else AdamPreconditioner(preconditioner)
    direction = None if momentum is None else MomentumDirection(momentum, (p for _, p in trained))
    norms = GradientNorms(trained, groups, scaling, momentum=direction)
    if small_batch == "micro_batch":
        return MicroBatchCollector(norms, group)
    if small_batch == "half":
        if averaging:
            raise ValueError(
                '`small_batch` must be "rank", "micro_batch" or "example" if several processes'
                ' train, got "half": comparing the gradients of the processes needs no extra pass.'
                ' Leave it at "auto".'
            )
        inner = model if ddp is None else ddp.module
        return HalvesCollector(inner, norms, cut, compiled=compiled is not None)
    if ddp is None or not averaging:
        raise ValueError(
            '`small_batch` must be "half", "micro_batch" or "example" in one process, got "rank":'
            ' there is no other rank to compare with. Leave it at "auto".'
        )
    return DdpCollector(ddp, norms)


def assigned_groups(
    model: nn.Module, groups: Groups | None, parameters: Iterable[Parameter] | None = None
) -> Groups | None:
    """Return `groups` as a function that knows the names of all trained parameters.

    Use it to make several meters of a model, or to check `groups` apart from what can be measured.
    For arguments and errors see `NoiseScaleMeter`.
    """
    names = [name for name, _ in _trained_parameters(unwrapped(model), parameters)]
    if groups is None or not names:
        return groups
    return dict(zip(names, groups_of(names, groups), strict=True)).get


def checked_small_batch(
    small_batch: SmallBatch, layers: Layers, preconditioned: bool
) -> SmallBatch:
    """Return the small batch to compare: "example" if only some layers are wanted.

    Raises:
        ValueError: If an argument is unknown, or arguments contradict each other.

    Examples:
        >>> checked_small_batch("auto", "normalization", preconditioned=False)
        'example'
    """
    for name, value, known in (
        ("small_batch", small_batch, get_args(SmallBatch)),
        ("layers", layers, get_args(Layers)),
    ):
        checked_choice(name, value, known, f'Leave it at "{known[0]}".')
    if layers != "all":
        if small_batch not in ("auto", "example"):
            raise ValueError(
                f'`layers` must be "all" with `small_batch="{small_batch}"`, got {layers!r}: only'
                " single examples are measured layer by layer. Leave `small_batch` out."
            )
        small_batch = "example"
    if preconditioned and small_batch == "example":
        raise ValueError(
            "A preconditioner must be left out if examples are the small batches, got both: the"
            ' gradients of single examples are never formed. Pass `small_batch="micro_batch"` or'
            ' "rank".'
        )
    return small_batch


def checked_cut(cut: Sequence[str] | None, small_batch: SmallBatch) -> Sequence[str] | None:
    """Return the names of modules as a list; one name becomes a list of one.

    Raises:
        ValueError: If they are not names, or `small_batch` uses no cut.
    """
    if cut is None:
        return None
    names = [cut] if isinstance(cut, str) else list(cut)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"`cut` must be names of modules, got {cut!r}. Leave it out, or see"
            " `model.named_modules()`."
        )
    if small_batch not in ("auto", "half"):
        raise ValueError(
            f'`cut` must be None with `small_batch="{small_batch}"`, got {cut!r}: only halves of a'
            " batch are separated at a cut. Leave `small_batch` out."
        )
    return names


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that averages gradients, without wrappers of Fabric and torch.compile."""
    for attribute in ("_forward_module", "_orig_mod"):
        if isinstance(inner := getattr(model, attribute, None), nn.Module):
            return unwrapped(inner)
    return model


def _refuse_unaveraged(
    small_batch: SmallBatch, preconditioner: Optimizer | None, *, sharded: bool
) -> None:
    if small_batch not in ("auto", "rank") or preconditioner is not None or sharded:
        raise ValueError(
            '`averaged` must be True with `small_batch` other than "auto" or "rank", with a'
            " preconditioner, and with sharded gradients, got False with small_batch="
            f'"{small_batch}", preconditioner {_kind(preconditioner)} and'
            f" {'sharded' if sharded else 'whole'} gradients. Where ranks step on their own"
            " gradients, only these can be compared."
        )


def _trained_or_refuse(
    model: nn.Module, parameters: Iterable[Parameter] | None
) -> list[tuple[str, Parameter]]:
    trained = _trained_parameters(model, parameters)
    if not trained:
        raise ValueError(
            "`model` must have parameters that require a gradient, got none."
            " Unfreeze some before training starts, or leave the noise scale out."
        )
    if empty := [name for name, p in trained if p.is_meta]:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise ValueError(
            f"`model` must hold the numbers of its parameters, got {empty[0]!r}{more} on the device"
            " meta. Make them first (`to_empty`, or `load_state_dict` with `assign=True`), or leave"
            " them out by `parameters`."
        )
    return trained


def _trained_parameters(
    model: nn.Module, only: Iterable[Parameter] | None
) -> list[tuple[str, Parameter]]:
    """What is averaged over ranks, of that what is in `only`, by the names the user gave it."""
    ignored: Collection[str] = ()
    if isinstance(model, DistributedDataParallel):
        ignored, model = model.parameters_to_ignore, model.module
    among = None if only is None else {id(p) for p in only}
    return [
        (name.replace("_orig_mod.", ""), p)
        for name, p in model.named_parameters()
        if p.requires_grad and name not in ignored and (among is None or id(p) in among)
    ]


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
