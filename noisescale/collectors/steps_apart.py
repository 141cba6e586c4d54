# SPDX-License-Identifier: Apache-2.0
"""Gradients of successive steps, which show how alike small batches are.

At a measured step and the two after it `p.grad` is read at some coordinates, when the optimizer is
about to step. Their differences go over ranks in the row of a later measured step, and meet there
with the noise that the small batches showed: see `estimation.row_similarity`. All ranks send and
compare at the same steps, whatever came of them on each.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisescale.collectors.coordinates import Coordinates
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import Beside, MeasuredStep
from noisescale.estimation.row_similarity import (
    LEAST_CORRELATION,
    LOOKS,
    RowSimilarity,
    Similarity,
)

_STEPS = 3
"""A measured step and those after it."""

_MOST_COMPARED = LOOKS[-1] + 2 * _STEPS
"""Measured steps that are compared, of the first ones: some more than the last look needs."""

_WHOLES = 5
"""Measured steps in a row in which a half has the gradient of the whole, so that signs are lost."""

_ROUNDING = 1e-4
"""| |g_s|²/|g|² - 1 | by rounding, in 16 bits."""

_SIGNS_LOST = (
    "A half of the batch has the gradient of the whole batch, up to its sign. A Function uses the"
    " gradient of one row for all rows (`grad_output[0]`), as some fused losses do that expect a"
    " mean. Halves then show no noise, and the noise scale is withheld. Have that Function return"
    " the mean, or accumulate two or more micro-batches, which avoids this."
)
_NEIGHBOURS = "They share a draw ({}), or are neighbours in the data."
_MEASURE = "Else run `noisescale measure`, which compares whole batches."
_SAME_DRAWS = (
    "All ranks draw the same random numbers, as they have one seed (`seed_everything`).",
    "Call `torch.manual_seed(seed + rank)` when training starts (in `on_fit_start` of a"
    " LightningModule): the first weights and the sampler stay the same on all ranks.",
)
_ABOUT = {
    "halves": (
        "rows of a batch",
        _NEIGHBOURS.format("a time, a mask, a class, negatives, layers that are dropped"),
        "Draw for each row, or shuffle the data further. Say which rows belong together by"
        " `group_fn` (`row_groups` of the meter). If each micro-batch has a draw of its own,"
        f" accumulate two or more. {_MEASURE}",
    ),
    "micro-batches": (
        "micro-batches of a step",
        _NEIGHBOURS.format("one for the whole step"),
        f"Draw for each micro-batch, or shuffle the data further. {_MEASURE}",
    ),
    "ranks": (
        "batches of the ranks",
        _NEIGHBOURS.format("one for all ranks"),
        f"Draw for each rank, or shuffle the data further. {_MEASURE}",
    ),
}
"""What is compared, why it may be alike, and what to do."""


@dataclass(eq=False)
class _Window:
    """A measured step and those after it."""

    sizes: tuple[float, ...]
    """Examples of its passes."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """Gradients at the coordinates; None in a step that cannot be compared."""

    def numbers(self, ranks: int) -> Tensor | None:
        """Return this rank's share of |g|² and of half of |Δg|² over one step and over two."""
        first, second, third = self.gradients
        if first is None or second is None or third is None:
            return None
        if len({(x.shape, x.device) for x in (first, second, third)}) > 1:
            return None
        one = ((second - first).square().sum() + (third - second).square().sum()) / 4
        return torch.stack([first.square().sum(), one, (third - first).square().sum() / 2]) / ranks


class StepsApart:
    """Compares the gradients of successive steps with the noise between small batches.

    Args:
        norms: The measured parameters.
        coordinates: Where their gradients are compared.
        ranks: How many train together.
        kind: What is compared within a step: a key of `_ABOUT`.
    """

    def __init__(
        self, norms: GradientNorms, coordinates: Coordinates, ranks: int, kind: str
    ) -> None:
        self.kind = kind
        self.found = RowSimilarity()
        self.suspects_rows = False
        """Whether only successive steps can tell if rows are alike, or if weights move."""
        self.withheld = ""
        """Why small batches do not show the noise, by what has been read; "" if they do."""
        self._norms, self._coordinates, self._ranks = norms, coordinates, ranks
        self._windows: deque[_Window] = deque()
        self._ended: deque[Tensor | None] = deque()
        """The numbers of windows that were followed to their end."""
        self._shares: deque[float] = deque()
        """The share of the noise in |g|² at the coordinates, of measured steps to be compared."""
        self._opened = self._received = 0
        """Measured steps that are compared, as they end and as they are read."""
        self._wholes = 0
        """Steps in a row whose half had the gradient of the whole, up to its sign."""
        self._random: list[int] | None = None
        """Checksums of random states at the first measured step; empty once they are compared."""
        self._draws = self._sent_draws = math.nan
        self._same_draws = False

    @property
    def is_over(self) -> bool:
        """Whether no further measured step is compared."""
        return self._opened == _MOST_COMPARED

    @property
    def follows(self) -> bool:
        """Whether some measured step is compared with those after it."""
        return bool(self._windows)

    def end_step(self, sizes: Sequence[float], *, measured: bool) -> None:
        """Read `p.grad`: a step of passes of these sizes is over."""
        if measured and self._opened < _MOST_COMPARED:
            self._opened += 1
            self._windows.append(_Window(tuple(sizes)))
        self._draws = math.nan
        if not self._windows:
            return
        now: Tensor | None = None
        try:
            now = self._coordinates.gradient(self._norms.indices_left_out)
            if measured:
                self._look_at_draws()
        finally:
            for window in self._windows:
                comparable = now is not None and window.sizes == tuple(sizes)
                window.gradients.append(now if comparable else None)
            if self._windows and len(self._windows[0].gradients) == _STEPS:
                self._ended.append(None)
                self._ended[-1] = self._windows.popleft().numbers(self._ranks)

    def next_word(self) -> Beside:
        """Return what goes into the row of a measured step. It needs no device."""
        ends = bool(self._ended)
        return Beside(ends, self._ended.popleft() if ends else None, self._draws)

    def take(self, step: MeasuredStep) -> None:
        """Receive a measured step, in the order of the rows."""
        norms, beside = step.at_coordinates, step.beside
        if norms is None:
            return
        if self._received == _MOST_COMPARED and not self._shares:
            return
        known = norms.comparable and norms.big_sq_norm > 0
        signal = norms.moments().grad_sq_norm / norms.big_sq_norm if known else math.nan
        if self._received < _MOST_COMPARED:
            self._received += 1
            self._shares.append(1 - signal)
        self._same_draws |= abs(beside.draws / self._ranks - self._sent_draws) < 1e-6
        if beside.ends and beside.numbers is not None:
            sq_norm, one_step, two_steps = beside.numbers
            self.found.add_steps(self._shares.popleft() * sq_norm, one_step, two_steps)
            # By the rows that have come, not by those that are read: all ranks decide alike.
            if self.found.is_due and not self.withheld:
                now = self.found.look()
                self.suspects_rows |= now.suspected
                if now.shown:
                    self.withheld = self._reason(now, norms.examples)

    def take_halves(self, norms: StepNorms) -> None:
        """Receive the norms of a step that may be of halves: |g|² + |g_s|² and |g|²."""
        ratio = norms.small_sq_norm / (norms.big_sq_norm or math.nan)
        self._wholes = self._wholes + 1 if abs(ratio - 2) < _ROUNDING else 0
        if self._wholes >= _WHOLES:
            self.withheld = self.withheld or _SIGNS_LOST

    def _look_at_draws(self) -> None:
        """Take a checksum, once: of the random states that were used since the first call."""
        if self._ranks == 1 or self._random == []:
            return
        before, now = self._random, _random_states(self._norms.device)
        if before is None:
            self._random = now
            return
        used = [x for x, y in zip(now, before, strict=True) if x != y]
        self._random = []
        if used:
            self._draws = self._sent_draws = zlib.crc32(repr(used).encode()) / 2**32

    def _reason(self, similarity: Similarity, size: float) -> str:
        """Say what shows that small batches are alike, what follows, and what to do."""
        what, why, remedy = _ABOUT[self.kind]
        if similarity.by_steps:
            count, other = f": {size:g} count as about {size / similarity.ratio:.2g}", ""
            found = f"gradients of successive steps differ {similarity.ratio:.2g} times as much as"
            found += f" those within a step (|Δg|², at least {similarity.ratio_low:.2g} times)"
        else:
            count, by = "", similarity
            if not by.correlation_low > LEAST_CORRELATION:
                by = by._replace(correlation=by.apart, correlation_low=by.apart_low)
            found = "gradients at the cut differ more between steps than within a step (an"
            found += f" intraclass correlation of {by.correlation:.2g}, at least"
            found += f" {by.correlation_low:.2g})"
            other = " Or the loss is divided by a number that differs between batches (positives,"
            other += " tokens): pass `weight_fn` (`weight` to the meter)."
        if self._same_draws:
            (why, remedy), other = _SAME_DRAWS, ""
        return (
            f"The {what} are alike{count}, as {found}. The noise scale is too low then, and is"
            f" withheld. {why} {remedy}{other}"
        )


def _random_states(device: torch.device) -> list[int]:
    """Return checksums of the random states of the CPU, NumPy and a device."""
    of_numpy: Any = np.random.get_state()
    states = [
        torch.get_rng_state().numpy().tobytes(),
        of_numpy[1].tobytes() + repr(of_numpy[2]).encode(),
    ]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device).numpy().tobytes())
    return [zlib.crc32(state) for state in states]
