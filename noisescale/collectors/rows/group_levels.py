# SPDX-License-Identifier: Apache-2.0
"""The noise between and within the groups of rows of one step: what each rank says of it.

A step's gradient is Σ u·g/Σu over its rows, u the weights of the rows. Given a group, its rows are
independent, each with the noise s² (the level within). Groups are independent, too, and the mean
gradient of a group has the variance v² (the level between). With U the sum of a group's weights,

    Var(g) = v²·ΣU²/(Σu)² + s²·Σu²/(Σu)²

Half the difference between two halves of each group, see `within_groups`, has the expectation
s²·Σu²/(Σu)² over the rows that it is of. As Var(g) is known from halves of whole groups,
micro-batches or ranks, the rest is v². Only ratios of the weights matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import shorten
from typing import NamedTuple

import torch
from torch import Tensor

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.to_device import to_device
from noisescale.collectors.rows.window_layout import Weight


class WithinBatch(NamedTuple):
    """The halves within the groups of one batch."""

    sq_norms: Tensor
    """The squared norms of half the difference of the halves, as captured, shape (entries,)."""
    partition: int
    """The first entries, which make up the whole gradient together."""
    which: int
    """The index of the backward pass in the step."""
    still: Weight
    """The groups without a gradient in the batch: of one reward, for example."""


class RankLevels(NamedTuple):
    """What one rank says of the groups in a step. Ranks sum all numbers."""

    given: Weight
    """1 if the groups of all rows are known, else 0."""
    sq_norm: Weight
    """See `WithinBatch`, up to the factor of the step's gradient."""
    measured: Weight
    """Σu² over the rows that it is of: those with another row of their group in the batch."""
    row_squares: Weight
    """Σu²."""
    group_squares: Weight
    """ΣU²."""
    total: Weight
    """Σu."""
    still: Weight
    """See `WithinBatch`."""
    groups: Weight
    """The groups in the batch that was measured."""


NO_LEVELS = RankLevels(*[0.0] * 8)
"""What is said of a step without groups."""

UNKNOWN_LEVELS = RankLevels(1.0, *[math.nan] * 7)
"""What is said of a step with groups whose levels are not known."""


class StepLevels(NamedTuple):
    """The levels of one step, over all ranks."""

    noise_within: float
    """s², the trace of a row's noise given its group."""
    row_share: float
    """Σu²/(Σu)²: one over the rows of the step, if all weigh the same."""
    group_share: float
    """ΣU²/(Σu)²: one over the groups of the step, if all are equal."""
    still: float
    """The share of groups without a gradient."""

    @classmethod
    def of_ranks(cls, numbers: Sequence[float], ranks: int) -> StepLevels | None:
        """Return the levels from the sums over ranks of a `RankLevels`; None if not known."""
        given, sq_norm, measured, row_squares, group_squares, total, still, groups = numbers
        known = math.isfinite(sum(numbers)) and given == ranks
        if not known or not (measured > 0 and total > 0 and groups > 0):
            return None
        square = total**2
        within = sq_norm / ranks**2 * square / measured
        return cls(within, row_squares / square, group_squares / square, still / groups)


class GroupedPass(NamedTuple):
    """The rows of one backward pass."""

    groups: RowGroups
    row_weights: Tensor | None
    """What each row has in the mean that the loss is; None: all have the same."""
    weight: Weight
    """What the pass has in it, if `row_weights` is None."""

    @property
    def weights(self) -> Tensor:
        """The weights of the rows."""
        if self.row_weights is not None:
            return self.row_weights.detach().float()
        of_rows = torch.ones(len(self.groups.of_rows), device="cpu")
        share: Weight = self.weight / len(of_rows)
        return of_rows.to(share.device) * share if isinstance(share, Tensor) else of_rows * share

    @property
    def squares_in_pairs(self) -> Tensor:
        """Σu² over the rows that have another row of their group in the pass."""
        sizes = torch.bincount(self.groups.of_rows, minlength=self.groups.number)
        own = self.weights
        return own.square().mul(to_device(sizes[self.groups.of_rows] > 1, own.device)).sum()


def levels_of_step(passes: Sequence[GroupedPass], measured: WithinBatch | None) -> RankLevels:
    """Return what this rank says of a step of these passes."""
    if measured is None:
        return UNKNOWN_LEVELS
    sums, one = _Sums.of(passes), passes[measured.which]
    return RankLevels(
        1.0,
        measured.sq_norms[: measured.partition].sum(),
        one.squares_in_pairs,
        sums.row_squares,
        sums.group_squares,
        sums.total,
        measured.still,
        float(one.groups.number),
    )


def variance_of_step(passes: Sequence[GroupedPass], between: Tensor, within: WithinBatch) -> Tensor:
    """Return the variance of a step's gradient from one of its batches, which share groups.

    Both levels of the batch are taken for those of the step. The weights of groups in a batch
    differ little from each other beside their noise.

    Args:
        passes: All of the step.
        between: The squared norms of half the difference of halves of whole groups in the batch,
            shape (entries,).
        within: The halves within groups of the same batch.
    """
    one = passes[within.which]
    own, whole = _Sums.of([one]), _Sums.of(passes)
    of_row = within.sq_norms / one.squares_in_pairs
    of_group = (between - of_row * own.row_squares) / own.group_squares
    return of_group * whole.group_squares + of_row * whole.row_squares


class _Sums(NamedTuple):
    """Sums over the rows of some passes."""

    total: Tensor
    """Σu."""
    row_squares: Tensor
    """Σu²."""
    group_squares: Tensor
    """ΣU²."""

    @classmethod
    def of(cls, passes: Sequence[GroupedPass]) -> _Sums:
        weights = [one.weights for one in passes]
        device = next((x.device for x in weights if not x.is_cpu), weights[0].device)
        of_rows = torch.cat([to_device(x, device) for x in weights])
        of_groups = of_rows.new_zeros(len(_indices(passes)))
        of_groups.index_add_(0, to_device(_group_of_rows(passes), device), of_rows)
        return cls(of_rows.sum(), of_rows.square().sum(), of_groups.square().sum())


def split_group(passes: Sequence[GroupedPass]) -> str | None:
    """Return the name of a group that is in two passes; None if there is none.

    Groups that are numbered from 0 on are taken for others in each pass.
    """
    if len(_indices(passes)) == sum(one.groups.number for one in passes):
        return None
    seen: set[object] = set()
    for one in passes:
        for name in one.groups.names:
            if name in seen:
                return shorten(repr(name), 60, placeholder=" ...")
        seen.update(one.groups.names)
    return None


def _keys(which: int, one: GroupedPass, *, numbered: bool) -> list[object]:
    return [(which, name) if numbered else name for name in one.groups.names]


def _indices(passes: Sequence[GroupedPass]) -> dict[object, int]:
    """Return an index for each group of a step."""
    numbered = any(one.groups.numbered_in_batch for one in passes)
    index: dict[object, int] = {}
    for which, one in enumerate(passes):
        for key in _keys(which, one, numbered=numbered):
            index.setdefault(key, len(index))
    return index


def _group_of_rows(passes: Sequence[GroupedPass]) -> Tensor:
    """Return the index of the group of each row of a step."""
    index, numbered = _indices(passes), any(one.groups.numbered_in_batch for one in passes)
    found = []
    for which, one in enumerate(passes):
        of_groups = [index[key] for key in _keys(which, one, numbered=numbered)]
        found.append(torch.tensor(of_groups, device="cpu")[one.groups.of_rows])
    return torch.cat(found)
