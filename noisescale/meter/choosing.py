# SPDX-License-Identifier: Apache-2.0
"""Choose the collector for a model, its processes, and the wanted small batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from noisescale.collectives import world_size
from noisescale.collectors.collector import Collector
from noisescale.collectors.context_parallel import refuse_context_parallel
from noisescale.collectors.coordinates import Coordinates
from noisescale.collectors.ddp import DdpCollector
from noisescale.collectors.deepspeed import (
    DeepSpeedCollector,
    check_engine,
    is_deepspeed,
    stepped_parameters,
)
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.groups import Groups, groups_of
from noisescale.collectors.halves.collector import HalvesCollector
from noisescale.collectors.halves.proved_cuts import ProvedCuts
from noisescale.collectors.halves.within_groups import WithinGroups
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.collectors.sharded import fsdp1
from noisescale.collectors.sharded.fsdp1 import Fsdp1Collector, is_fsdp1
from noisescale.collectors.sharded.fsdp2 import Fsdp2Collector
from noisescale.collectors.sharded.fsdp2_units import is_fsdp2
from noisescale.collectors.tensor_parallel import (
    DdpOfPartsCollector,
    TensorParallelCollector,
    is_whole,
    ranks_of_local_parts,
    tensor_parallel_group,
)
from noisescale.collectors.unaveraged import UnaveragedCollector
from noisescale.guard import NotMeasured
from noisescale.meter.extra import ExtraMeasurement
from noisescale.meter.options import MeterOptions
from noisescale.refusal import Refusal, TypeRefusal


def choose_collector(
    model: nn.Module,
    options: MeterOptions,
    *,
    parameters: Iterable[Parameter] | None = None,
    averaged: bool = True,
    extra: Iterable[ExtraMeasurement] = (),
) -> Collector:
    """Return the collector for a model, with its hooks installed. Arguments: see `NoiseScaleMeter`.

    Raises:
        NotMeasured: If the model's gradients cannot be measured, or nothing is trained.
        TypeError: If several processes train and `model` is not wrapped.
        ValueError: If the arguments do not fit the way of training.
    """
    compiled = _has_compiled_part(model)
    model = unwrap(model)
    if is_deepspeed(model):
        _refuse_for_engine(options, averaged=averaged)
        check_engine(model)
        trained = _trained_or_refuse(model, parameters)
        return DeepSpeedCollector(model, GradientNorms(trained, options.groups))
    if not averaged and world_size() > 1:
        return _collector_of_own_gradients(model, options, parameters)
    if (found := _collector_of_local_parts(model, options, parameters)) is not None:
        return found
    sharded = is_sharded(model)
    if not sharded and not isinstance(model, DistributedDataParallel) and world_size() > 1:
        raise TypeRefusal(
            "model",
            "be a DistributedDataParallel, FSDP1 or FSDP2 module, or DeepSpeed's engine, if several"
            " processes train",
            type(model).__name__,
            "Wrap it: `DistributedDataParallel(model)`. If the optimizer averages gradients in its"
            " step, or each rank steps on its own gradient, pass `averaged=False`.",
        )
    trained = _trained_or_refuse(model, parameters)
    if not sharded:
        return _collector_of_whole_gradients(model, options, trained, extra, compiled=compiled)
    if options.small_batch == "half" or options.extra:
        raise Refusal(
            "small_batch",
            'be "auto", "rank" or "micro_batch", and `extra` empty, if gradients are sharded',
            f"{options.small_batch!r} and {options.names_of_extra}",
            "Each rank's gradient in each pass that reduces is compared there.",
        )
    collector = Fsdp1Collector if is_fsdp1(model) else Fsdp2Collector
    return collector(model, trained, options.groups)


def _collector_of_own_gradients(
    model: nn.Module, options: MeterOptions, parameters: Iterable[Parameter] | None
) -> Collector:
    """Return the collector where each rank of several steps on its own gradient."""
    _refuse_unaveraged(options, sharded=is_sharded(model))
    refuse_context_parallel()
    trained = _trained_or_refuse(model, parameters)
    if parts := [name for name, p in trained if not is_whole(p)]:
        raise NotMeasured(
            "`model` must hold whole parameters if each rank steps on its own gradient, got"
            f" {parts[0]!r}: a rank has only a part of its gradient. Use `fully_shard` or"
            " `replicate` over tensor parallelism."
        )
    ranks = dist.distributed_c10d._get_default_group()
    if isinstance(model, DistributedDataParallel):
        ranks = model.process_group
    return UnaveragedCollector(GradientNorms(trained, options.groups), ranks)


def _collector_of_local_parts(
    model: nn.Module, options: MeterOptions, parameters: Iterable[Parameter] | None
) -> Collector | None:
    """Return the collector with tensor parallelism, under DDP or alone; None without it."""
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None and (sharing := ranks_of_local_parts(ddp)) > 1:
        _refuse_for_parts(options)
        trained = _trained_or_refuse(model, parameters)
        return DdpOfPartsCollector(ddp, GradientNorms(trained, options.groups), sharing)
    group = None if is_sharded(model) else tensor_parallel_group(model.parameters())
    if group is None:
        return None
    _refuse_tensor_parallel(options, ddp, group)
    trained = _trained_or_refuse(model, parameters)
    return TensorParallelCollector(GradientNorms(trained, options.groups), group)


def _collector_of_whole_gradients(
    model: nn.Module,
    options: MeterOptions,
    trained: list[tuple[str, Parameter]],
    extra: Iterable[ExtraMeasurement],
    *,
    compiled: bool,
) -> Collector:
    """Return the collector in one process, or under DDP, by what is to be compared."""
    ddp = model if isinstance(model, DistributedDataParallel) else None
    averaging = ddp is not None and dist.get_world_size(ddp.process_group) > 1
    if averaging:
        refuse_context_parallel()
    small_batch = options.small_batch
    if small_batch == "auto":
        small_batch = "rank" if averaging else "half"
    measured = [p for _, p in trained]
    entries = [one.entry(measured) for one in extra]
    norms = GradientNorms(trained, options.groups, entries, coordinates=Coordinates(measured))
    if small_batch == "micro_batch":
        return MicroBatchCollector(norms, ddp.process_group if ddp and averaging else None)
    if small_batch == "half":
        if averaging:
            raise Refusal(
                "small_batch",
                'be "rank" or "micro_batch" if several processes train',
                '"half": comparing the gradients of the processes needs no extra pass',
                'Leave it at "auto".',
            )
        return HalvesCollector(
            model if ddp is None else ddp.module,
            norms,
            options.cut,
            compiled=compiled,
            backward_twice=options.backward_twice,
        )
    if ddp is None or not averaging:
        raise Refusal(
            "small_batch",
            'be "half" or "micro_batch" in one process',
            '"rank": there is no other rank to compare with',
            'Leave it at "auto".',
        )

    def make_within() -> WithinGroups:
        own = GradientNorms(trained)
        bears = options.backward_twice
        cuts = ProvedCuts(
            *(ddp.module, own, options.cut), compiled=compiled, backward_twice=bears, alone=False
        )
        return WithinGroups(cuts, own)

    return DdpCollector(ddp, norms, make_within)


def nothing_to_capture() -> Collector:
    """Return a collector without parameters of a model, for a training that is not measured."""
    return MicroBatchCollector(GradientNorms([("", Parameter(torch.empty(0, device="cpu")))]), None)


def several_gradients_a_step(optimizer: Optimizer) -> NotMeasured:
    """Return the reason why an optimizer that calls its closure more than once is not measured."""
    return NotMeasured(
        f"{type(optimizer).__name__} takes several gradients a step, at different weights. Use a"
        " first-order optimizer such as SGD or AdamW."
    )


def assigned_groups(
    model: nn.Module, groups: Groups | None, parameters: Iterable[Parameter] | None = None
) -> Groups | None:
    """Return `groups` as a function that knows the names of all trained parameters.

    Use it to make several meters of a model, or to check `groups` apart from what can be measured.
    For arguments and errors see `NoiseScaleMeter`.
    """
    names = [name for name, _ in _trained_parameters(unwrap(model), parameters)]
    if groups is None or not names:
        return groups
    return dict(zip(names, groups_of(names, groups), strict=True)).get


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank keeps a shard of the parameters: FSDP1 or FSDP2."""
    return is_fsdp1(model) or is_fsdp2(model)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module that averages gradients, without wrappers of Fabric and torch.compile."""
    if is_deepspeed(model):  # it has all attributes of the module in it
        return model
    for attribute in ("_forward_module", "_orig_mod"):
        if isinstance(inner := getattr(model, attribute, None), nn.Module):
            return unwrap(inner)
    return model


def module_in(model: nn.Module) -> nn.Module:
    """Return the user's module in what `unwrap` returned: in DDP, in DeepSpeed's engine."""
    wraps = isinstance(model, DistributedDataParallel) or is_deepspeed(model)
    return cast(nn.Module, model.module) if wraps else model


def _refuse_unaveraged(options: MeterOptions, *, sharded: bool) -> None:
    if options.small_batch not in ("auto", "rank") or options.extra or sharded:
        kind = "sharded" if sharded else "whole"
        raise Refusal(
            "averaged",
            'be True with `small_batch` other than "auto" or "rank", with `extra` measurements, and'
            " with sharded gradients",
            f'False with small_batch="{options.small_batch}", extra {options.names_of_extra} and'
            f" {kind} gradients",
            "Where gradients are not averaged before the step, only the ranks' can be compared.",
        )


def _refuse_for_engine(options: MeterOptions, *, averaged: bool) -> None:
    if options.small_batch not in ("auto", "micro_batch") or options.extra or not averaged:
        raise Refusal(
            "small_batch",
            'be "auto" or "micro_batch", `extra` empty and `averaged` True under DeepSpeed',
            f"{options.small_batch!r}, {options.names_of_extra} and {averaged}",
            "Each micro-batch of a rank is a small batch there.",
        )


def _refuse_for_parts(options: MeterOptions) -> None:
    if options.small_batch not in ("auto", "rank") or options.extra:
        raise Refusal(
            "small_batch",
            'be "auto" or "rank", and `extra` empty, if the model is DistributedDataParallel over'
            " tensor parallelism",
            f"{options.small_batch!r} and {options.names_of_extra}",
            "A rank has only a part of each gradient there.",
        )


def _refuse_tensor_parallel(
    options: MeterOptions, ddp: nn.Module | None, group: dist.ProcessGroup
) -> None:
    if options.small_batch not in ("auto", "micro_batch") or options.extra:
        raise Refusal(
            "small_batch",
            'be "auto" or "micro_batch", and `extra` empty, if the model is tensor parallel alone',
            f"{options.small_batch!r} and {options.names_of_extra}",
            "The ranks have one batch: its micro-batches are compared.",
        )
    if ddp is not None or dist.get_world_size(group) < world_size():
        raise NotMeasured(
            "`model` must be data parallel by `fully_shard` or `replicate` over tensor parallelism,"
            f" got {'DistributedDataParallel of DTensors' if ddp else 'neither'} in"
            f" {world_size()} processes with {dist.get_world_size(group)} of tensor parallelism."
            " Apply one of them."
        )


def _trained_or_refuse(
    model: nn.Module, parameters: Iterable[Parameter] | None
) -> list[tuple[str, Parameter]]:
    trained = _trained_parameters(model, parameters)
    if not trained:
        raise NotMeasured(
            "`model` must have parameters that require a gradient, got none. Unfreeze some before"
            " training starts."
        )
    if empty := [name for name, p in trained if p.is_meta]:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise Refusal(
            "model",
            "hold the numbers of its parameters",
            f"{empty[0]!r}{more} on the device meta",
            "Make them first (`to_empty`, or `load_state_dict` with `assign=True`), or"
            " leave them out by `parameters`.",
        )
    return trained


def _trained_parameters(
    model: nn.Module, only: Iterable[Parameter] | None
) -> list[tuple[str, Parameter]]:
    """Return parameters that are averaged over ranks and are in `only`, by the user's names."""
    ignored: Collection[str] = ()
    among = None if only is None else {id(p) for p in only}
    if isinstance(model, DistributedDataParallel):
        ignored = model.parameters_to_ignore
    elif is_deepspeed(model):
        stepped = stepped_parameters(model)
        among = stepped if among is None else stepped & among
    model = module_in(model)
    named = fsdp1.named_parameters if is_fsdp1(model) else nn.Module.named_parameters
    return [
        (name.replace("_orig_mod.", ""), p)
        for name, p in named(model)
        if p.requires_grad and name not in ignored and (among is None or id(p) in among)
    ]


def _has_compiled_part(model: nn.Module) -> bool:
    """Return whether a module in the model is compiled: hooks do not see its layers.

    Reads the private `_compiled_call_impl`, as of torch 2.13.
    """
    return any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )
