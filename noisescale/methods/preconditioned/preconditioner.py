# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients as Adam scales them: g/(√v̂ + ε), element by element."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adamax, Optimizer

from noisescale.collectors.devices import MOST_ELEMENTS, together
from noisescale.collectors.gradient_norms import ExtraEntry
from noisescale.collectors.squared_norms import Norm, as_real, norms_of
from noisescale.refusal import Refusal

# A gradient is scaled in blocks of this number of elements: no large gradient is copied whole.
_BLOCK = 2**20

# Blocks on other devices than the CPU are larger (see `together`), and those of small gradients are
# scaled together. Two float32 copies of these take 64 MB.


class _Block(NamedTuple):
    """Some rows of a gradient."""

    gradient: Tensor
    second_moment: Tensor
    step: Tensor
    """The number of steps behind v, a scalar."""
    settings: Mapping[str, Any]

    @property
    def kind(self) -> Hashable:
        """What blocks have in common that are scaled together. On the CPU each is alone."""
        g, v = self.gradient, self.second_moment
        if g.is_cpu:
            return id(g)
        return g.device, g.dtype, v.dtype, self.step.device, id(self.settings)


class AdamPreconditioner(ExtraEntry):
    """The squared norm of a gradient as an optimizer of Adam's family scales it.

    v̂ is the optimizer's own running mean of squared gradients. It holds earlier gradients only
    while a step is measured, so it is the same for every part of that step and independent of its
    noise given the weights. Before the first step there is no v̂, and norms are NaN.

    Args:
        optimizer: One that keeps `exp_avg_sq`: Adam, AdamW, NAdam, RAdam and their like.

    Raises:
        ValueError: If its parameter groups lack Adam's settings.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        scales = all({"betas", "eps"} <= group.keys() for group in groups)
        if optimizer is None or not scales or isinstance(optimizer, Adamax):
            raise Refusal(
                "optimizer",
                "be an optimizer of Adam's family",
                f"{type(optimizer).__name__}, which keeps no mean of squared gradients",
                "Leave the preconditioned noise scale out: the simple one needs none.",
            )
        self._optimizer = optimizer
        self._settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def compute(self, gradients: Iterable[tuple[Parameter, Tensor, slice]]) -> list[Norm]:
        """Return norms whose squares sum to |g/(√v̂ + ε)|² over all gradients.

        Args:
            gradients: Of some rows of a parameter each.
        """
        blocks: list[_Block] = []
        for parameter, gradient, rows in gradients:
            state = self._optimizer.state.get(parameter, {})
            settings = self._settings.get(id(parameter))
            second_moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            if settings is None or second_moment is None or gradient.is_sparse:
                return [torch.full((1,), float("nan"), device=gradient.device)]
            if parameter.dim():
                second_moment = second_moment[rows]
            else:
                second_moment, gradient = second_moment.reshape(1), gradient.reshape(1)
            if second_moment.is_complex():  # its two parts are the means of the gradient's, squared
                second_moment, gradient = as_real(second_moment), as_real(gradient)
            most = _BLOCK if gradient.is_cpu else MOST_ELEMENTS
            rows_a_block = max(1, most * len(gradient) // max(gradient.numel(), 1))
            cut = zip(gradient.split(rows_a_block), second_moment.split(rows_a_block), strict=True)
            step = torch.as_tensor(state["step"])
            blocks += [_Block(g, v, step, settings) for g, v in cut]
        counted = ((block, block.kind, block.gradient.numel()) for block in blocks)
        return [norm for some in together(counted) for norm in norms_of(_scale(some))]


def _scale(blocks: Sequence[_Block]) -> Sequence[Tensor]:
    """Return g/(√(v/(1 - βᵗ)) + ε) of blocks of one kind, in four kernels.

    In one more for each parameter if only the device knows t.
    """
    settings = blocks[0].settings
    steps = torch.stack([block.step for block in blocks])
    corrections = 1 - settings["betas"][1] ** steps
    roots = torch._foreach_div(
        [block.second_moment for block in blocks],
        corrections.tolist() if corrections.is_cpu else corrections.unbind(),
    )
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, settings["eps"])
    return torch._foreach_div([block.gradient for block in blocks], roots)
