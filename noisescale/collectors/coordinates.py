# SPDX-License-Identifier: Apache-2.0
"""Some coordinates of the gradient, the same in all steps, so that steps can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.batches.to_device import to_device
from noisescale.collectors.gradient_norms import ExtraEntry
from noisescale.collectors.squared_norms import Norm, norms_of

COORDINATES = 256
"""Coordinates of the gradient that are compared between steps."""

TENSORS = 8
"""Parameters that they are in."""

_Places = dict[int, tuple[Tensor, ...]]
"""Coordinates, by the identity of the parameter."""


class Coordinates(ExtraEntry):
    """The squared norm of each small batch's gradient at some coordinates.

    They are drawn over all parameters and gathered from few of them. Sparse gradients are left out.

    Args:
        parameters: The parameters that are measured.
    """

    needs_whole = True  # they are few: each rank reads them all

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._drawn: _Places | None = None

    def compute(self, gradients: Iterable[tuple[Parameter, Tensor, slice]]) -> list[Norm]:
        """Return norms of gradients at the coordinates."""
        places = self._places
        return norms_of(
            [
                _numbers_at(gradient, places[id(parameter)])
                for parameter, gradient, _ in gradients
                if id(parameter) in places and gradient.layout is torch.strided
            ]
        )

    def gradient(self, left_out: frozenset[int]) -> Tensor | None:
        """Return `p.grad` at the coordinates, a vector; None if there is none.

        Args:
            left_out: Parameters that are not measured, by their index.
        """
        places = self._places
        parts = []
        for index, p in enumerate(self._parameters):
            if (place := places.get(id(p))) is None or index in left_out or not p.requires_grad:
                continue
            if p.grad is not None and p.grad.layout is torch.strided:
                parts.append(_numbers_at(p.grad, place))
        return torch.cat([to_device(x, parts[0].device) for x in parts]) if parts else None

    @property
    def _places(self) -> _Places:
        if self._drawn is None:
            rng = np.random.default_rng(0)
            on: dict[torch.device, int] = {}
            for p in self._parameters:
                on[p.device] = on.get(p.device, 0) + p.numel()
            most = max(on, key=on.__getitem__)  # nothing is copied between devices
            wanted = [p.requires_grad and p.device == most for p in self._parameters]
            sizes = np.array(
                [float(p.numel() * w) for p, w in zip(self._parameters, wanted, strict=True)]
            )
            if not sizes.sum():  # nothing is trained yet
                return {}
            drawn = rng.choice(len(sizes), TENSORS, p=sizes / sizes.sum())
            chosen: dict[int, list[np.ndarray[Any, Any]]] = {}
            for index in sorted(set(drawn.tolist())):
                parameter = self._parameters[index]
                each = COORDINATES // TENSORS * int((drawn == index).sum())
                flat = rng.integers(parameter.numel(), size=min(each, parameter.numel()))
                chosen[index] = [*np.unravel_index(flat, parameter.shape or (1,))]
            packed = torch.from_numpy(np.concatenate([x for at in chosen.values() for x in at]))
            lengths = [len(x) for at in chosen.values() for x in at]
            pieces = iter(to_device(packed, most).split(lengths))
            self._drawn = {
                id(self._parameters[index]): tuple(next(pieces) for _ in at)
                for index, at in chosen.items()
            }
        return self._drawn


def _numbers_at(gradient: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    whole = gradient.detach()
    here = tuple(to_device(x, whole.device) for x in place)  # the model may have been moved
    numbers = (whole if whole.dim() else whole.view(1))[here]
    return (torch.view_as_real(numbers).flatten() if numbers.is_complex() else numbers).float()
