# SPDX-License-Identifier: Apache-2.0
"""Numbers of measured steps that show how alike rows are: see `estimation.row_similarity`.

They stay on the device until measured steps are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.batches.to_device import to_device
from noisescale.estimation.row_similarity import RowSimilarity, Similarity

COORDINATES = 256
"""Coordinates of the gradient that are compared between steps."""

TENSORS = 8
"""Parameters that they are in."""


_WHOLES = 5
"""Measured steps in a row in which a half has the gradient of the whole, so that signs are lost."""

_ROUNDING = 1e-4
"""|g_s ± g|²/|g|² by rounding, in 16 bits."""

_SIGNS_LOST = (
    "A half of the batch has the gradient of the whole batch, up to its sign. A Function uses the"
    " gradient of one row for all rows (`grad_output[0]`), as some fused losses do that expect a"
    " mean. Halves then show no noise, and the noise scale is withheld. Have that Function return"
    " the mean, or accumulate two or more micro-batches, which avoids this."
)

_Places = dict[int, tuple[Tensor, ...]]
"""Coordinates of gradients, by the index of the parameter."""


@dataclass(eq=False)
class _Window:
    """A measured step, until the two steps after it are over."""

    size: float
    half: Tensor
    """g_s"""
    odd: float
    """The factor on |g_s|² with an odd part, which is in neither half."""
    gradients: list[Tensor] = field(default_factory=list)


class SimilarityNumbers:
    """Collects the numbers of halves, and of gradients at some coordinates, in measured steps.

    At a measured step and the two after it, `p.grad` is read at the coordinates when the optimizer
    is about to step.

    Args:
        parameters: The parameters that are measured.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.found = RowSimilarity()
        self._parameters = parameters
        self._places: _Places | None = None
        self._halves: dict[int, Tensor] = {}
        self._windows: list[_Window] = []
        self._rows: list[Tensor] = []
        self._steps: list[Tensor] = []
        self._sent = 0, 0
        self._size = 0.0
        self._wholes = 0
        """Steps in a row whose half had the gradient of the whole, up to its sign."""
        self.withheld = ""
        """Why halves do not show the noise, by what has been read; "" if they do."""

    def take_half(self, index: int, gradient: Tensor) -> None:
        """Receive a gradient of the pass with signs."""
        place = self._coordinates.get(index)
        if place is not None and gradient.layout is torch.strided:
            self._halves[index] = _numbers_at(gradient, place)

    def take_rows(self, sq_norms: Tensor) -> None:
        """Receive |dL/dz_i|² of all rows, shape (rows,). Rows without a loss do not count."""
        some = sq_norms > 0
        logs = torch.where(some, sq_norms, 1.0).log() / 2
        number = some.sum()
        mean = logs.sum() / number
        variance = torch.where(some, (logs - mean).square(), 0.0).sum() / (number - 1)
        self._rows.append(torch.stack([number.to(mean.dtype), mean, variance]))

    def begin_window(self, size: float, parts: int) -> None:
        """Follow a measured step of halves through the next two steps."""
        halves, self._halves = self._halves, {}
        self._size = size
        if len(halves) == len(self._coordinates) and halves:
            odd = parts / (parts - 1) if parts % 2 else 1.0
            self._windows.append(_Window(size, _together(halves, self._coordinates), odd))

    @property
    def follows(self) -> bool:
        """Whether some window is open."""
        return bool(self._windows)

    def end_step(self, size: float) -> None:
        """Read `p.grad` in the open windows: a step of one batch of this size is over."""
        gradients = {i: self._parameters[i].grad for i in self._coordinates}
        if any(g is None or g.layout is not torch.strided for g in gradients.values()):
            self._windows = []
            return
        gathered = {
            i: _numbers_at(g, self._coordinates[i]) for i, g in gradients.items() if g is not None
        }
        now = _together(gathered, self._coordinates)
        for window in [*self._windows]:
            if window.size != size or window.half.device != now.device:
                self._windows.remove(window)
                continue
            window.gradients.append(now)
            if len(window.gradients) == 3:
                self._windows.remove(window)
                half, (first, second, third) = window.half, window.gradients
                within, whole = half.square().sum(), first.square().sum()
                apart = torch.minimum((half - first).square().sum(), (half + first).square().sum())
                successive = ((second - first).square().sum() + (third - second).square().sum()) / 4
                later = (third - first).square().sum() / 2
                self._steps.append(
                    torch.stack([window.odd * within, successive, later, apart / whole])
                )

    def forget(self) -> None:
        """Close the open windows: a step did not go as expected."""
        self._windows = []
        self._halves = {}

    def unread(self) -> Sequence[Tensor]:
        """Return the numbers on the device."""
        self._sent = len(self._rows), len(self._steps)
        return [*self._rows, *self._steps]

    def take(self, numbers: Sequence[Sequence[float]]) -> None:
        """Receive what is in them."""
        rows, steps = self._sent
        for one in numbers[:rows]:
            self.found.add_rows(*one)
        for within, successive, later, apart in numbers[rows : rows + steps]:
            self.found.add_steps(within, successive, later)
            self._wholes = self._wholes + 1 if apart < _ROUNDING else 0
        del self._rows[:rows], self._steps[:steps]
        if self._wholes >= _WHOLES:
            self.withheld = _SIGNS_LOST
        if self.found.is_due and (similarity := self.found.look()).shown:
            self.withheld = _reason(similarity, self._size)

    @property
    def _coordinates(self) -> _Places:
        """Coordinates drawn over all parameters, gathered from few of them."""
        if self._places is None:
            rng = np.random.default_rng(0)
            on: dict[torch.device, int] = {}
            for p in self._parameters:
                on[p.device] = on.get(p.device, 0) + p.numel()
            most = max(on, key=on.__getitem__)  # nothing is copied between devices
            wanted = [p.requires_grad and p.device == most for p in self._parameters]
            sizes = np.array(
                [float(p.numel() * w) for p, w in zip(self._parameters, wanted, strict=True)]
            )
            drawn = rng.choice(len(sizes), TENSORS, p=sizes / sizes.sum())
            chosen: dict[int, list[np.ndarray[Any, Any]]] = {}
            for index in sorted(set(drawn.tolist())):
                parameter = self._parameters[index]
                each = COORDINATES // TENSORS * int((drawn == index).sum())
                flat = rng.integers(parameter.numel(), size=min(each, parameter.numel()))
                chosen[index] = [*np.unravel_index(flat, parameter.shape or (1,))]
            packed = torch.from_numpy(np.concatenate([x for at in chosen.values() for x in at]))
            pieces = iter(
                to_device(packed, most).split([len(x) for at in chosen.values() for x in at])
            )
            self._places = {index: tuple(next(pieces) for _ in at) for index, at in chosen.items()}
        return self._places


def _reason(similarity: Similarity, size: float) -> str:
    """Say what shows that rows are alike, what follows, and what to do."""
    found = "gradients at the cut differ more between steps than within (an intraclass correlation"
    found += f" of {similarity.correlation:.2g}, at least {similarity.correlation_low:.2g})"
    count = ""
    if similarity.by_steps:
        count = f": {size:g} count as about {size / similarity.ratio:.2g}"
        found = f"successive gradients differ {similarity.ratio:.2g} times as much as halves do"
        found += f" (|Δg|², at least {similarity.ratio_low:.2g} times)"
    return (
        f"The rows of a batch are alike{count}, as {found}. They share a draw (a time, a mask, a"
        " class, negatives, layers that are dropped), or are neighbours in the data. The noise"
        " scale of halves is too low then, and is withheld. Draw for each row, or shuffle the data"
        " further. Say which rows belong together by `group_fn` (`row_groups` of the meter). If"
        " each micro-batch has a draw of its own, accumulate two or more. Else run `noisescale"
        " measure`, which compares whole batches."
    )


def _numbers_at(gradient: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    whole = gradient.detach()
    here = tuple(to_device(x, whole.device) for x in place)  # the model may have been moved
    numbers = (whole if whole.dim() else whole.view(1))[here]
    return (torch.view_as_real(numbers).flatten() if numbers.is_complex() else numbers).float()


def _together(gathered: dict[int, Tensor], order: _Places) -> Tensor:
    parts = [gathered[index] for index in order]
    device = parts[0].device
    return torch.cat([to_device(part, device) for part in parts])
