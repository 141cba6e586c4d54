# SPDX-License-Identifier: Apache-2.0
"""Gradients along one direction: the optimizer's mean of the gradients before."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, RMSprop

from noisescale.collectors.devices import MOST_ELEMENTS, together
from noisescale.collectors.gradient_norms import ExtraEntry, GradientNorms
from noisescale.collectors.squared_norms import LONGEST_DOT, Norm, squared_norm, sums_of
from noisescale.guard import NotMeasured
from noisescale.refusal import Refusal, TypeRefusal

_KEPT = ("momentum_buffer", "exp_avg")
"""Names of the running mean of gradients in an optimizer's state: SGD's and Adam's."""

# Other devices than the CPU have thousands of partial sums. In p of them n products of float32 are
# off by about √n/p·2⁻²⁴ of what they sum to, if roundings are random: 2e-7 for 2**30 in 2**13.
# (BLAS counts them in 32 bits.) Smaller gradients than a MB are joined for one dot product.
_LONGEST_ON_DEVICE = 2**30
_SMALL_BYTES = 2**20

_TESTS = "The inner-product and orthogonality tests"


class MomentumDirection(ExtraEntry):
    """The square of a gradient's dot product with m/|m|, m the optimizer's mean of gradients.

    While a step is measured m holds earlier gradients only. So m is the same for all parts of the
    step, and independent of their noise given the weights. `NoiseAlongGradient` says what the dot
    products show.

    Args:
        optimizer: One that keeps `momentum_buffer` or `exp_avg`: SGD with momentum, Adam and their
            like.
        parameters: What is measured.

    Raises:
        TypeError: If it is no optimizer.
        ValueError: If it keeps no mean of gradients, or not of all these parameters.
    """

    cost = 2.0  # a dot product reads the gradient and the momentum
    needs_whole = True

    def __init__(self, optimizer: Optimizer | None, parameters: Iterable[Parameter]) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if optimizer is None or groups is None:
            raise TypeRefusal(
                "optimizer", "be an optimizer", repr(optimizer), "Pass that of the run."
            )
        kind = type(optimizer).__name__
        # RMSprop's buffer is a mean of scaled gradients.
        if isinstance(optimizer, RMSprop) or not all(map(_beta, groups)):
            raise Refusal(
                "optimizer",
                "be one with momentum in all parameter groups",
                f"{kind} without",
                f"{_TESTS} need it: use momentum, or another policy for the batch size.",
            )
        known = {id(p) for group in groups for p in group["params"]}
        if not all(id(p) in known for p in parameters):
            raise Refusal(
                "optimizer",
                "be that of all measured parameters",
                f"{kind} without some",
                f"{_TESTS} need one optimizer: choose another policy for the batch size.",
            )
        self._optimizer = optimizer
        self._sq_norm: Tensor | None = None
        """|m|² in the step under way."""

    @property
    def persistence(self) -> float:
        """The largest β: the weight of the momentum before a step in the one after it."""
        return max(_beta(group) for group in self._optimizer.param_groups)

    def mean_of(self, parameter: Parameter) -> Tensor | None:
        """Return a parameter's part of m; None before its first step.

        Raises:
            NotMeasured: If the optimizer has stepped, and keeps no mean of gradients.
        """
        state = self._optimizer.state.get(parameter)
        if not state:
            return None
        kept = [state[name] for name in _KEPT if name in state]
        mean: Tensor | None = next((each for each in kept if each is not None), None)
        if mean is None and kept:
            return None
        if mean is None or mean.is_sparse:
            raise NotMeasured(
                "`optimizer` must be one that keeps a dense `momentum_buffer` or `exp_avg`,"
                f" got {type(self._optimizer).__name__} without. {_TESTS} need it: choose another"
                " policy for the batch size."
            )
        return mean

    def compute(self, gradients: Iterable[tuple[Parameter, Tensor, slice]]) -> list[Norm]:
        """Return numbers that sum to g·m over whole parameters; NaN before the first step.

        On CPU they are on the host, as norms are.
        """
        dots: list[Norm] = []
        small: list[tuple[tuple[Tensor, Tensor], Hashable, int]] = []
        for parameter, gradient, _ in gradients:
            if gradient.is_sparse:
                raise NotMeasured(
                    f"Gradients must be dense for the noise along them, got a sparse one. {_TESTS}"
                    " need it: choose another policy for the batch size."
                )
            mean = self.mean_of(parameter)
            if mean is None:
                return [torch.full((), float("nan"), device=gradient.device)]
            if gradient.is_complex():  # a lazy conjugate is no view
                gradient, mean = (torch.view_as_real(x.resolve_conj()) for x in (gradient, mean))
            g, m = gradient.reshape(-1), mean.reshape(-1)
            if g.is_cpu:
                dots += [float(dot) for dot in _dots(g, m, longest=LONGEST_DOT)]
            elif g.numel() * g.element_size() < _SMALL_BYTES:
                small.append(((g, m), (g.device, g.dtype, m.dtype), g.numel()))
            else:
                dots += _dots(g, m, longest=_LONGEST_ON_DEVICE)
        for pairs in together(small):
            joined = [torch.cat(each) for each in zip(*pairs, strict=True)]
            dots += _dots(*joined, longest=MOST_ELEMENTS)
        return dots

    def end_part(self, numbers: list[Norm], norms: GradientNorms) -> list[Norm]:
        """Return the dot product of a part, which is whole now: on CPU with m/|m|, else with m."""
        on_device = [dot for dot in numbers if isinstance(dot, Tensor)]
        on_host = sum(dot for dot in numbers if not isinstance(dot, Tensor))
        if norms.device.type == "cpu" and not on_device:  # see `Norm`
            return [on_host**2 / (float(self.divisor(norms)) or math.nan)]
        norms.keep(on_device)
        alone = len(on_device) == 1 and not on_host
        whole = on_device[0] if alone else sums_of([on_device], device=norms.device) + on_host
        return [whole.view(1)]

    def divisor(self, norms: GradientNorms) -> Tensor:
        """Return |m|², which stands still within a step: what is left is comparable to |g|²."""
        if self._sq_norm is None:
            means = (self.mean_of(p) for p in norms.parameters if p.requires_grad)
            parts = [mean for mean in means if mean is not None]
            self._sq_norm = squared_norm(parts, device=norms.device)
        return self._sq_norm

    def begin_step(self) -> None:
        """Forget |m|²."""
        self._sq_norm = None


def _dots(gradient: Tensor, mean: Tensor, *, longest: int) -> list[Tensor]:
    """Return dot products of pieces of two vectors. Vectors of 16 bits are widened, to be exact."""
    if gradient.dtype != mean.dtype or mean.element_size() < 4:
        longest = min(longest, MOST_ELEMENTS)
    return [
        torch.dot(g.to(m.dtype) if g.dtype != m.dtype else g, m)
        if m.element_size() >= 4
        else torch.dot(g.float(), m.float())
        for g, m in zip(gradient.split(longest), mean.split(longest), strict=True)
    ]


def _beta(group: Mapping[str, Any]) -> float:
    return float(group.get("momentum") or (group.get("betas") or (0.0,))[0])
