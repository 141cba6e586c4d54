# SPDX-License-Identifier: Apache-2.0
"""The kind of an optimizer whose class is not known, from what one of its first steps changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from noisescale.history.optimizers import OptimizerKind

WATCHED = (5, 50)
"""The steps that are watched. In its very first steps Adam moves by the sign of the gradient, and
in a warm-up the first changes may be too small to tell anything: then the next one is watched."""

MOST_ELEMENTS = 65_536
"""The largest parameter that is copied, to be compared after a step."""

SMALLEST_SIDE = 4
"""The least rows and columns of that parameter."""

NEAR_SQUARE = 2
"""Most columns a row, or rows a column, for a matrix whose singular values tell anything: those of
wide matrices of random numbers are nearly equal, too."""

NEARLY_ZERO, NEARLY_EQUAL = 0.02, 0.65
"""Singular values as shares of the largest. In the changes of torch's Muon in small perceptrons it
was 0.68 or more, in those of its other optimizers hardly ever above 0.65 where the gradient's was
half of it."""

ALIKE = 0.999
"""The least cosine of changes that are proportional."""

EQUAL = 0.01
"""Magnitudes are equal if they differ by less, as a share of the largest."""

ROUNDING = 0.05
"""A change tells nothing if the rounding of parameters is a larger share of it."""

_SECOND_MOMENTS = ("exp_avg_sq", "second_moment", "nu", "v")
"""The names that a mean of squared gradients has in the states of optimizers."""


class WatchedSteps:
    """Compares one small matrix before and after a step, without a hook on the optimizer.

    It calls nothing of the optimizer, but waits for the device in each step that it compares.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._calls = 0
        self._before: _Watched | None = None

    def before_step(self) -> OptimizerKind | None:
        """Return the kind once it is known; OTHER if it shows in no step. Call it before each step.

        Gradients may be scaled and not clipped yet: only their direction counts.
        """
        self._calls += 1
        was, self._before = self._before, None
        if was is not None:
            state = self._optimizer.state.get(was.parameter, {})
            now = was.parameter.detach()
            if (kind := kind_of_step(was.value, was.gradient, now, was.group, state)) is not None:
                return kind
        if self._calls in WATCHED:
            smallest = min(_candidates(self._optimizer), default=None, key=_cost)
            if smallest is not None:
                value, gradient = smallest.value.clone(), smallest.gradient.clone()
                self._before = smallest._replace(value=value, gradient=gradient)
        return OptimizerKind.OTHER if self._calls > WATCHED[-1] else None


class _Watched(NamedTuple):
    """A parameter before a step."""

    parameter: Tensor
    group: Mapping[str, Any]
    value: Tensor
    gradient: Tensor


def _candidates(optimizer: Optimizer) -> Iterator[_Watched]:
    """Yield the small dense matrices that this process has in one piece."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            value, gradient = parameter.detach(), parameter.grad
            if (
                value.ndim >= 2
                and value.numel() <= MOST_ELEMENTS
                and value.is_floating_point()
                # Neither DTensors nor sparse ones, and no gradient that is missing.
                and all(type(x) is Tensor and x.layout is torch.strided for x in (value, gradient))
                and min(value.flatten(1).shape) >= SMALLEST_SIDE
            ):
                yield _Watched(parameter, group, value, gradient)


def _cost(watched: _Watched) -> tuple[bool, int]:
    return not _is_near_square(watched.value), watched.value.numel()


def kind_of_step(
    before: Tensor,
    gradient: Tensor,
    after: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
) -> OptimizerKind | None:
    """Return the kind of optimizer that changes a parameter like this; None if it hardly did.

    Args:
        before: The parameter before the step.
        gradient: Its gradient in the step, up to a factor.
        after: The parameter after the step.
        group: The settings of its group.
        state: Its state in the optimizer, after the step.

    Examples:
        >>> before, gradient = torch.zeros(4, 4), torch.randn(4, 4)
        >>> kind_of_step(before, gradient, -0.1 * gradient, {"lr": 0.1}, {}).name
        'SGD'
        >>> kind_of_step(before, gradient, -0.1 * gradient.sign(), {"lr": 0.1}, {}).name
        'SIGN'
    """
    rounding = torch.finfo(before.dtype).eps * float(before.abs().max())
    tensors = {
        name: value.cpu().double().flatten(1)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == before.shape
    }
    before, gradient, after = (x.cpu().double().flatten(1) for x in (before, gradient, after))
    change = after - before
    if not ROUNDING * change.abs().max() > rounding:
        return None
    # Weight decay is in the change, if it is not in the gradient.
    decay = float(group.get("lr") or 0) * float(group.get("weight_decay") or 0)
    kinds = (
        _kind_of_change(change + share * before, gradient, tensors, rounding)
        for share in (decay, 0.0)
    )
    return next((kind for kind in kinds if kind is not OptimizerKind.OTHER), OptimizerKind.OTHER)


def _kind_of_change(
    change: Tensor, gradient: Tensor, tensors: Mapping[str, Tensor], rounding: float
) -> OptimizerKind:
    if any(name in _SECOND_MOMENTS and (x >= 0).all() for name, x in tensors.items()):
        return OptimizerKind.ADAM  # before others: where gradients hardly change, it moves by signs
    size, largest = change.abs(), change.abs().max()
    moved = size[size > largest / 2]
    equal = torch.minimum(size, largest - size) <= EQUAL * largest + 2 * rounding
    if len(moved) >= SMALLEST_SIDE**2 / 2 and equal.all():
        return OptimizerKind.SIGN
    if _is_near_square(change) and _is_orthogonalized(change, gradient):
        return OptimizerKind.SPECTRAL
    by_gradient = _cosine(change, gradient)
    if by_gradient > ALIKE and all(_cosine(change, x) <= by_gradient for x in tensors.values()):
        return OptimizerKind.SGD
    if any(_cosine(change, gradient, x) > ALIKE for x in tensors.values()):  # also Nesterov's
        return OptimizerKind.MOMENTUM
    return OptimizerKind.OTHER


def _cosine(change: Tensor, *directions: Tensor) -> float:
    """Return the cosine between a change and its projection on what some directions span."""
    basis, _ = torch.linalg.qr(torch.stack([x.flatten() for x in directions], dim=1))
    return float((basis.T @ change.flatten()).norm() / change.norm())


def _is_orthogonalized(change: Tensor, gradient: Tensor) -> bool:
    """Return whether singular values are nearly equal in the change, and not in the gradient.

    Those of Muon's change are 0.7 to 1.2. Only as many are compared as the gradient has that are
    not nearly zero: the gradient of few examples, or of few classes, is of low rank.
    """
    moved, own = (values / values[0] for values in map(torch.linalg.svdvals, (change, gradient)))
    last = int(0.8 * int((own > NEARLY_ZERO).sum())) - 1
    return last > 1 and bool(moved[last] >= NEARLY_EQUAL and own[last] <= moved[last] / 2)


def _is_near_square(value: Tensor) -> bool:
    rows, columns = value.flatten(1).shape
    return max(rows, columns) <= NEAR_SQUARE * min(rows, columns)
