# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients as Adam scales them: g/(√v̂ + ε), element by element."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adamax, Optimizer

from noisescale.collectors.squared_norms import Norm, as_real, norms_of

# A gradient is scaled in blocks of so many elements: no copy of a large one is ever whole.
_BLOCK = 2**20


class AdamPreconditioner:
    """The preconditioner of an optimizer of Adam's family, from the steps before.

    v̂ is the optimizer's own running mean of squared gradients. It holds earlier gradients only
    while a step is measured, so it is the same for every part of that step and independent of its
    noise given the weights. Before the first step there is no v̂, and norms are NaN.

    Args:
        optimizer: One that keeps `exp_avg_sq`: Adam, AdamW, NAdam, RAdam and their like.

    Raises:
        ValueError: If its parameter groups lack Adam's settings.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if not {"betas", "eps"} <= group.keys() or isinstance(optimizer, Adamax):
                raise ValueError(
                    "`preconditioner` must be an optimizer of Adam's family, got"
                    f" {type(optimizer).__name__}, which keeps no mean of squared gradients."
                    " Leave it out: the simple noise scale needs none."
                )
        self._optimizer = optimizer
        self._settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def norms(self, parameter: Parameter, gradient: Tensor, rows: slice) -> list[Norm]:
        """Return norms whose squares sum to |g/(√v̂ + ε)|² over some rows of a parameter."""
        state = self._optimizer.state.get(parameter, {})
        settings = self._settings.get(id(parameter))
        second_moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
        if settings is None or second_moment is None or gradient.is_sparse:
            return [torch.full((1,), float("nan"), device=gradient.device)]
        bias_correction = 1 - settings["betas"][1] ** torch.as_tensor(state["step"])
        if parameter.dim():
            second_moment = second_moment[rows]
        else:
            second_moment, gradient = second_moment.reshape(1), gradient.reshape(1)
        if second_moment.is_complex():  # its two parts are the means of the gradient's, squared
            second_moment, gradient = as_real(second_moment), as_real(gradient)
        rows_a_block = max(1, _BLOCK * len(gradient) // max(gradient.numel(), 1))
        norms: list[Norm] = []
        for g, v in zip(
            gradient.split(rows_a_block), second_moment.split(rows_a_block), strict=True
        ):
            norms.extend(norms_of([g / (v / bias_correction).sqrt().add(settings["eps"])]))
        return norms
