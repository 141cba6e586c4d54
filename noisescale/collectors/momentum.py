# SPDX-License-Identifier: Apache-2.0
"""Gradients along one direction: the optimizer's mean of the gradients before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from noisescale.collectors.squared_norms import LONGEST_DOT, as_real

_KEPT = ("momentum_buffer", "exp_avg")
"""Names of the running mean of gradients in an optimizer's state: SGD's and Adam's."""


class MomentumDirection:
    """The direction of an optimizer's running mean of gradients, m, from the steps before.

    While a step is measured m holds earlier gradients only. So m is the same for all parts of the
    step, and independent of their noise given the weights. See `AlongGradient` for what the dot
    products say.

    Args:
        optimizer: One that keeps `momentum_buffer` or `exp_avg`: SGD with momentum, Adam and their
            like.

    Raises:
        ValueError: If it keeps no mean of gradients in one of its parameter groups.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if not _beta(group):
                raise ValueError(
                    "`momentum` must be an optimizer with momentum in all parameter groups, got"
                    f" {type(optimizer).__name__} without. The inner-product and orthogonality"
                    " tests need it: use momentum, or another policy for the batch size."
                )
        self._optimizer = optimizer

    @property
    def persistence(self) -> float:
        """The largest β: the weight of the momentum before a step in the one after it."""
        return max(_beta(group) for group in self._optimizer.param_groups)

    def of(self, parameter: Parameter) -> Tensor | None:
        """Return a parameter's part of m; None before the first step."""
        state = self._optimizer.state.get(parameter, {})
        return next((state[name] for name in _KEPT if state.get(name) is not None), None)

    def dots(self, parameter: Parameter, gradient: Tensor) -> list[Tensor | float]:
        """Return numbers that sum to g·m over a whole parameter; NaN before the first step.

        On CPU they are on the host, as norms are.
        """
        mean = self.of(parameter)
        if mean is None or gradient.is_sparse or mean.is_sparse:
            return [torch.full((), float("nan"), device=gradient.device)]
        if gradient.is_complex():
            gradient, mean = as_real(gradient), as_real(mean)
        if gradient.is_contiguous() and mean.is_contiguous():
            pairs = gradient.view(-1), mean.view(-1)
        else:
            pairs = gradient.reshape(-1), mean.reshape(-1)
        # A long float32 dot product on CPU is not exact, and a 16-bit one nowhere.
        dots = [
            torch.dot(g.to(m.dtype) if g.dtype != m.dtype else g, m)
            if m.element_size() >= 4
            else torch.dot(g.float(), m.float())
            for g, m in zip(*(flat.split(LONGEST_DOT) for flat in pairs), strict=True)
        ]
        return [float(dot) for dot in dots] if gradient.is_cpu else list(dots)


def _beta(group: Mapping[str, Any]) -> float:
    return float(group.get("momentum") or (group.get("betas") or (0.0,))[0])
