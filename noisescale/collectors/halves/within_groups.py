# SPDX-License-Identifier: Apache-2.0
"""Halves within groups of rows: the noise that the rows of one group have, given the group.

In each group the rows of one half count positive and those of the other negative, whatever they
have in common (an advantage that is centred over the group, for example) stays as it was computed.
The pass is that of `row_pass`, at the cut that halves of the batch have. Of n rows of a group, with
the shares C of the gradient, it has the expectation Σ|C|² - Σ C·C'/(n - 1) over pairs of different
rows. With an odd n one row is in neither half, and the others count as √(n/(n - 1)).

It needs rows of one group that do not act on each other: the cut is proved for rows, and not for
groups.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.to_device import to_device
from noisescale.collectors.captured import Captured
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.halves.cut import CutEdge
from noisescale.collectors.halves.proved_cuts import ProvedCuts
from noisescale.collectors.halves.row_pass import row_pass
from noisescale.collectors.halves.side_effects import unwatch, watch
from noisescale.collectors.rows.group_levels import WithinBatch
from noisescale.guard import HookErrors, NotMeasured, WarnOnce, keeps_errors

STILL = 1e-4
"""The gradient at the cut, over that of the row with the largest, below which a row has none."""


def signs_within(groups: RowGroups, draw: int) -> Tensor:
    """Return the factor of each row: halves of each group at random. The same `draw` is the same.

    Examples:
        >>> from noisescale.batches.row_groups import checked_row_groups
        >>> signs_within(checked_row_groups("aabbbc"), 0).abs().sort().values
        tensor([0.0000, 0.0000, 1.0000, 1.0000, 1.2247, 1.2247])
    """
    of_rows = groups.of_rows.numpy()
    ordered = np.lexsort((np.random.default_rng(draw).random(len(of_rows)), of_rows))
    sizes = np.bincount(of_rows, minlength=groups.number)
    first = np.cumsum(sizes) - sizes
    size = sizes[of_rows[ordered]]
    place = np.arange(len(ordered)) - first[of_rows[ordered]]
    half = size // 2
    sign = np.where(place < half, 1.0, np.where(place < 2 * half, -1.0, 0.0))
    factors = np.empty(len(ordered), dtype=np.float32)
    factors[ordered] = sign * np.sqrt(np.where(size % 2, size / np.maximum(size - 1, 1), 1.0))
    return torch.from_numpy(factors)


def has_pairs(groups: RowGroups) -> bool:
    """Return whether some group has two rows."""
    return groups.number < len(groups.of_rows)


def halves_within(
    loss: GradientEdge,
    gradient: Tensor,
    edges: list[CutEdge],
    groups: RowGroups,
    draw: int,
    norms: GradientNorms,
    which: int,
) -> WithinBatch:
    """Run a pass with halves of each group.

    Args:
        loss: See `row_pass`, as for the next three.
        gradient: What the pass starts with.
        edges: A cut that is proved, or being proved, for rows.
        groups: At least one has two rows.
        draw: See `signs_within`.
        norms: What is measured.
        which: The index of the backward pass in the step.
    """
    captured, sizes = Captured(norms), list[Tensor]()
    factors = signs_within(groups, draw)
    row_pass(loss, gradient, edges, factors, norms.parameters, captured.add, sizes)
    captured.norm_kept()
    sq_norms = norms.sums(captured.found)
    of_rows = torch.stack([to_device(one, norms.device) for one in sizes]).sum(0)
    live = of_rows > STILL * of_rows.max()  # equal rewards less their mean may round
    return WithinBatch(
        sq_norms, norms.partition, which, groups.number - groups.sums(live).gt(0).sum()
    )


class WithinGroups(HookErrors):
    """Halves within groups of the first batch of a step, beside what else measures the step.

    Args:
        cuts: Of the model, with norms of its own: what a cut leaves out is left out here alone.
        norms: These norms.
    """

    def __init__(self, cuts: ProvedCuts, norms: GradientNorms) -> None:
        self._cuts, self._norms = cuts, norms
        self._found: WithinBatch | None = None
        self._hooks: list[RemovableHandle] = []
        self._warn = WarnOnce()
        watch()
        self._unwatch = weakref.finalize(self, unwatch)

    def watch(self, watching: bool) -> None:
        """Look at forward passes of the model, or do not."""
        self._cuts.watch(watching)

    def measure(self, loss: Any, groups: RowGroups, draw: int) -> None:
        """Measure a batch before its backward pass, which the training goes on with.

        Args:
            loss: The loss, or what is hooked where a pass begins at one of several tensors.
            groups: The groups of its rows.
            draw: See `signs_within`.
        """
        if not (has_pairs(groups) and loss.requires_grad):
            return
        if isinstance(loss, Tensor):
            self._measure(get_gradient_edge(loss), groups, draw, torch.ones_like(loss))
        else:
            loss.register_hook(partial(self._measure_from, loss, groups, draw))

    def result(self) -> WithinBatch | None:
        """Return what was found since the last reset. Reads the device while a cut is proved."""
        self.end_pass()
        try:
            self.raise_error_of_hook()
            proved = self._cuts.settle()
        except NotMeasured as reason:
            proved = False
            self._warn(f"The noise within groups of rows is not measured. {reason}")
        self._cuts.tell.drop()
        return self._found if proved else None

    def reset(self) -> None:
        """Begin another step."""
        self.end_pass()
        self._found, self._error = None, None
        self._cuts.forget()

    def close(self) -> None:
        """Remove all hooks."""
        self.reset()
        self._unwatch()
        self._cuts.watch(False)

    def end_pass(self) -> None:
        """Compare no further pass with the measured one, while a cut is proved."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @keeps_errors
    def _measure_from(self, start: Any, groups: RowGroups, draw: int, gradient: Tensor) -> None:
        if start.edge is not None and (not gradient.dim() or groups.apart):
            self._measure(start.edge, groups, draw, gradient)

    @keeps_errors
    def _measure(self, loss: GradientEdge, groups: RowGroups, draw: int, gradient: Tensor) -> None:
        edges = self._cuts.find(loss, gradient, len(groups.of_rows))
        if edges is None:
            return
        if self._norms.indices_left_out:
            raise NotMeasured("Some parameters are used where rows cannot be separated.")
        with self._cuts.bearing.leave_no_trace():
            self._found = halves_within(loss, gradient, edges, groups, draw, self._norms, 0)
        if self._cuts.proving:
            self._hooks = [
                parameter.register_hook(partial(self._cuts.compare, index))
                for index, parameter in enumerate(self._norms.parameters)
                if parameter.requires_grad
            ]
