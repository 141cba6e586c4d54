# SPDX-License-Identifier: Apache-2.0
"""Sums of squares of gradients, by groups of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.collectors.groups import Groups, groups_of
from noisescale.collectors.preconditioner import AdamPreconditioner
from noisescale.collectors.squared_norms import Norm, norms_of, norms_of_one, sums_of_squares

Norms = list[list[Norm]]
"""For each entry of a row, the norms from which `sums_of_squares` computes the entry."""


_ALL_ROWS = slice(None)


class Piece(NamedTuple):
    """A parameter's gradient, or some rows of it."""

    which: int
    """Index of the parameter in `GradientNorms.parameters`."""
    gradient: Tensor
    rows: slice = _ALL_ROWS


class GradientNorms:
    """The entries in which squared gradient norms are summed, the same on all ranks.

    There is one entry for each group of parameters, and one for parameters in no group. Together
    these entries are the squared norm of the whole gradient. With a preconditioner, a last entry
    holds the whole preconditioned gradient. Each gradient is read once, whatever the number of
    groups.

    Args:
        named_parameters: The parameters that are trained, in an order that all ranks share.
        groups: See `Groups`; None: all parameters are one entry.
        preconditioner: The preconditioner for the last entry; None: there is no such entry.
        device: Where norms are summed up; None: where the first parameter is.

    Raises:
        ValueError: If `groups` does not fit the parameters.
        TypeError: If `groups` has a wrong type.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        groups: Groups | None = None,
        preconditioner: AdamPreconditioner | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [p for _, p in named_parameters]
        self.device = self.parameters[0].device if device is None else device
        self.preconditioner = preconditioner
        group_of = [None] * len(self.names) if groups is None else groups_of(self.names, groups)
        self.group_names = tuple(dict.fromkeys(g for g in group_of if g is not None))
        self.partition = len(self.group_names) + 1
        """Number of entries that together are the whole gradient: the groups and the rest."""
        self.entries = self.partition + (preconditioner is not None)
        entry_of_group = {name: entry for entry, name in enumerate(self.group_names)}
        self.entry_of = [len(entry_of_group) if g is None else entry_of_group[g] for g in group_of]
        self._left_out: frozenset[int] = frozenset()

    def restricted_to(self, indices: Sequence[int]) -> GradientNorms:
        """Return the norms of only these parameters, in the same entries; before `leave_out`."""
        some = copy.copy(self)
        some.names = [self.names[i] for i in indices]
        some.parameters = [self.parameters[i] for i in indices]
        some.entry_of = [self.entry_of[i] for i in indices]
        return some

    def leave_out(self, indices: Iterable[int]) -> None:
        """Leave the gradients of these parameters out from now on."""
        self._left_out = frozenset(indices)

    def none(self) -> Norms:
        """Return empty norms, to add to."""
        return [[] for _ in range(self.entries)]

    def of(self, pieces: Iterable[Piece]) -> Norms:
        """Return the norms of gradients, with one fused call for each entry."""
        return self.add(self.none(), pieces)

    def add(self, norms: Norms, pieces: Iterable[Piece]) -> Norms:
        """Add the norms of gradients to `norms`, and return it."""
        of_entry: list[list[Tensor]] = [[] for _ in range(self.partition)]
        with torch.no_grad():
            for piece in pieces:
                if piece.which in self._left_out:
                    continue
                of_entry[self.entry_of[piece.which]].append(piece.gradient)
                if self.preconditioner is not None:
                    parameter = self.parameters[piece.which]
                    norms[-1].extend(
                        self.preconditioner.norms(parameter, piece.gradient, piece.rows)
                    )
            for entry, gradients in enumerate(of_entry):
                norms[entry].extend(norms_of(gradients))
        return norms

    def add_one(self, norms: Norms, which: int, gradient: Tensor) -> None:
        """Add the norms of a whole parameter's gradient: the quick way, for hooks."""
        if which in self._left_out:
            return
        if gradient.requires_grad:  # the pass is being recorded (`create_graph`)
            gradient = gradient.detach()
        norms[self.entry_of[which]] += norms_of_one(gradient)
        if self.preconditioner is not None:
            norms[-1] += self.preconditioner.norms(self.parameters[which], gradient, _ALL_ROWS)

    def sums(self, norms: Norms) -> Tensor:
        """Return the sums of squares, shape (entries,), on the device."""
        with torch.no_grad():
            return sums_of_squares(norms, device=self.device)

    def any_gradient(self) -> bool:
        """Whether any parameter has a gradient; none has after `zero_grad`."""
        return any(p.grad is not None for p in self.parameters)

    def any_trained(self) -> bool:
        """Whether a backward pass can reach any parameter; not while all are toggled off."""
        return any(p.requires_grad for p in self.parameters)
