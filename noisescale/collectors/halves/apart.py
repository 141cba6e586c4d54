# SPDX-License-Identifier: Apache-2.0
"""Whether rows act on each other: by names of operations, by a class, and by derivatives.

None of these sees all. Halves are refused if one of them says that rows do.

No factor would bound the error. |g|² has no error, and it is the sum of |G|² and tr(Σ)/B, so an
error of tr(Σ) is an error of |G|² too, magnified by their ratio. At 35 batches, 2 % of tr(Σ) made a
noise scale of 1,110 read 3,299 (1,760 to 24,786). With a BatchNorm the noise scale was right within
a factor of 1.5 in 18 settings, and off by a factor of 10 in the next.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from noisescale.batches.row_groups import RowGroups
from noisescale.collectors.halves.coupled import first_coupling
from noisescale.collectors.halves.cut import Cut
from noisescale.collectors.halves.derivatives import (
    LARGEST_SHARE,
    NoDerivativeError,
    share_in_network,
)
from noisescale.collectors.halves.graph import Graph
from noisescale.collectors.halves.loss_derivative import share_in_loss
from noisescale.guard import WarnOnce

_LOSS = "The loss must be a mean over rows that do not act on one another, got one in which they do"

_MOST_KINDS = 16
"""The most kinds of graphs of which derivatives are taken."""


class Derived(NamedTuple):
    """What derivatives show of rows that act on each other."""

    shares: list[Tensor]
    """The shares of a derivative that are on other rows, of network and loss, shape (1,)."""
    meeting: str = ""
    """Where rows act on each other by name, if there is no derivative."""


class RowIndependence:
    """Says whether the rows of a model's batches act on each other, at the proof of a cut.

    Args:
        model: The model.
        tell: Told of losses without a second derivative.
        compiled: Whether a part of the model is compiled, so that its graph does not show it all.
    """

    def __init__(self, model: nn.Module, tell: WarnOnce, *, compiled: bool) -> None:
        self._model = model
        self._tell = tell
        self._compiled = compiled
        self._derived: set[Hashable] = set()

    def by_name(
        self,
        graph: Graph,
        cut: Cut,
        rows: int,
        groups: RowGroups | None,
        *,
        derived: bool = True,
    ) -> str:
        """Say where rows act on each other, by operations; empty if they do not."""
        if meeting := first_coupling(graph, cut, rows, groups, derived=derived):
            return (
                f"{_LOSS} ({meeting}). Such losses are contrastive losses, pairs of rows,"
                " correlations, and products and powers of means over the batch."
            )
        if graph.normalizes_over_batch(rows) or (self._compiled and _normalizes(self._model)):
            return (
                "The rows of a batch must not act on one another in `model`, got a BatchNorm that"
                " normalizes over the batch."
            )
        return ""

    def is_derived(self, kind: Hashable) -> bool:
        """Return whether derivatives have shown that rows stay apart in graphs of this kind."""
        return kind in self._derived

    def by_derivatives(
        self, graph: Graph, cut: Cut, rows: int, groups: RowGroups | None, gradient: Tensor
    ) -> Derived:
        """Take derivatives, for `judge_derivatives`. The host does not wait for them.

        Args:
            graph: The graph of the loss.
            cut: Its cut.
            rows: Rows of the batch.
            groups: Of rows that may act on each other.
            gradient: The gradient that a backward pass starts with.
        """
        in_loss = in_network = torch.zeros(1, device="cpu")
        try:
            if len(self._derived) >= _MOST_KINDS:
                raise NoDerivativeError(f"these were taken of {_MOST_KINDS} other graphs")
            in_network = share_in_network(graph, cut, rows, groups)
            in_loss = share_in_loss(graph, cut, gradient, rows, groups)
        except NoDerivativeError as error:
            if meeting := self.by_name(graph, cut, rows, groups, derived=False):
                return Derived([in_network, in_loss], meeting)
            self._tell(
                "Whether rows act on one another in the loss was looked for in the names of its"
                f" operations alone, without derivatives: {error}."
            )
        return Derived([in_network, in_loss])

    def judge_derivatives(self, in_network: float, in_loss: float, kind: Hashable) -> str:
        """Say that rows act on each other, by derivatives; empty if derivatives do not show it.

        Args:
            in_network: The first of `Derived.shares`.
            in_loss: The second.
            kind: What graphs have in common in which rows act on each other alike.
        """
        if in_loss > LARGEST_SHARE:
            return f"{_LOSS} (by its second derivative: {_percent(in_loss)} is on other rows)."
        if in_network > LARGEST_SHARE:
            return (
                "The rows of a batch must not act on one another in `model`, got a model in which"
                f" they do (by its derivative: {_percent(in_network)} is on other rows). Such"
                " models normalize over the batch, or have another dimension than the batch in"
                " front."
            )
        if not math.isnan(in_loss):
            self._derived.add(kind)
        return ""


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"


def _normalizes(model: nn.Module) -> bool:
    return any(
        isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)
        for m in model.modules()
    )
