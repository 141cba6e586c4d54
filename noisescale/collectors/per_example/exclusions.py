# SPDX-License-Identifier: Apache-2.0
"""Which parameters have per-example norms, and why others are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

from torch import nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from noisescale.collectors.per_example.layers import ALL, NORMALIZATION, Layer, kind_of
from noisescale.guard import NotMeasured

_NAMES = 4  # named for every reason in a message

# Measured steps that are looked at for a gradient that is not zero. A gate of zeros takes two, a
# warm-up that starts at a learning rate of zero one more.
LOOKS = 8


class Verdict(IntEnum):
    """The result for a parameter. Of several, over passes and ranks, the greatest counts."""

    MEASURED = 0
    NO_GRADIENT = 1
    USED_ELSEWHERE = 2
    NOT_BATCH_FIRST = 3
    USED_TWICE = 4
    TIED = 5
    NO_FORMULA = 6
    NOT_ASKED_FOR = 7
    ZERO_GRADIENT = 8  # found last, of what nothing else is known of; states hold these numbers


REASONS = {
    Verdict.NO_GRADIENT: "without a gradient in the first measured step",
    Verdict.ZERO_GRADIENT: f"whose gradient was zero in the first {LOOKS} measured steps",
    Verdict.USED_ELSEWHERE: "used outside of their module's forward",
    Verdict.NOT_BATCH_FIRST: "in layers whose input does not have the rows of the batch",
    Verdict.USED_TWICE: "in modules called more than once",
    Verdict.TIED: "shared by several modules",
    Verdict.NO_FORMULA: "in layers without a formula for one example's gradient",
}


def find_layers(
    model: nn.Module, parameters: Sequence[Parameter], *, normalization_only: bool
) -> tuple[list[Layer], list[Verdict]]:
    """Return the layers that `parameters` belong to, and the verdict on each parameter so far."""
    kinds = NORMALIZATION if normalization_only else ALL
    index_of = {id(p): index for index, p in enumerate(parameters)}
    uses = Counter(
        index_of[id(p)]
        for module in model.modules()
        for p in module._parameters.values()
        if id(p) in index_of
    )
    unsupported = Verdict.NOT_ASKED_FOR if normalization_only else Verdict.NO_FORMULA
    verdicts = [unsupported] * len(parameters)
    layers = []
    for module in model.modules():
        kind = kind_of(module, kinds)
        if kind is None:
            continue
        own = {
            name: index_of[id(p)]
            for name, p in module.named_parameters(recurse=False)
            if id(p) in index_of and name in ("weight", "bias")
        }
        for index in own.values():
            verdicts[index] = Verdict.TIED if uses[index] > 1 else Verdict.MEASURED
        measured = {name: index for name, index in own.items() if uses[index] == 1}
        if measured:
            layers.append(kind(module, measured))
    return layers, verdicts


def describe_left_out(names: Sequence[str], verdicts: Sequence[Verdict]) -> str:
    """Name the parameters that are left out, a few for every reason; empty if none are."""
    said = []
    for verdict, reason in REASONS.items():
        some = [name for name, v in zip(names, verdicts, strict=True) if v == verdict]
        if some:
            more = f" and {len(some) - _NAMES} more" if len(some) > _NAMES else ""
            said.append(f"{', '.join(some[:_NAMES])}{more} ({reason})")
    return "; ".join(said)


def what_is_left(
    names: Sequence[str], parameters: Sequence[Parameter], verdicts: Sequence[Verdict]
) -> str:
    """Say how much is measured, and what is left out and why; empty if nothing is left out."""
    others = describe_left_out(names, verdicts)
    if not others:
        return ""
    asked = [(p.numel(), v) for p, v in zip(parameters, verdicts, strict=True)
             if v != Verdict.NOT_ASKED_FOR]  # fmt: skip
    measured = [numel for numel, v in asked if v == Verdict.MEASURED]
    return (
        f"The noise scale of single examples covers {len(measured)} parameters with"
        f" {sum(measured) / sum(numel for numel, _ in asked):.0%} of all numbers. Left out:"
        f" {others}."
    )


def refuse_batch_norm(model: nn.Module) -> None:
    """Raise a ValueError if BatchNorm makes the examples of a batch depend on each other.

    With BatchNorm, the input and the gradient of a layer are not those of one example alone: on a
    dense network the measured noise scale was 472 instead of 128.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise NotMeasured(
                "`model` must have no BatchNorm that is trained if examples are the small batches,"
                f" got {name or type(module).__name__}: it makes the examples depend on each other."
                ' Choose small_batch="micro_batch" if two or more are accumulated, or "rank" on'
                " several devices."
            )


def check_some_measured(
    names: Sequence[str], verdicts: Sequence[Verdict], *, normalization_only: bool
) -> None:
    """Raise a ValueError if no parameter is measured."""
    if Verdict.MEASURED in verdicts:
        return
    others = describe_left_out(names, verdicts)
    got = f"got none{others and ': '}{others}"
    if normalization_only:
        raise NotMeasured(
            "`layers` must find LayerNorm, RMSNorm or GroupNorm parameters that are trained,"
            f' {got}. Choose layers="all", or small_batch="micro_batch" if two or more are'
            ' accumulated, or "rank" on several devices.'
        )
    raise NotMeasured(
        "`model` must have parameters with a formula for one example's gradient if examples are the"
        f' small batches, {got}. Choose small_batch="micro_batch" if two or more are accumulated,'
        ' or "rank" on several devices.'
    )


def compiled_part(model: nn.Module) -> str | None:
    """Name a compiled module in the model ("" for the model itself); None if there is none.

    Hooks do not see its layers. Reads the private `_compiled_call_impl`, as of torch 2.13.
    """
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            return str(name)
    return None
