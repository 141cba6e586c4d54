# SPDX-License-Identifier: Apache-2.0
"""Which gradient counts where in a row: groups of parameters, and their sums of squares."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.collectors.preconditioner import AdamPreconditioner
from noisescale.collectors.squared_norms import Norm, norms_of, norms_of_one, sums_of_squares

Groups = Callable[[str], str | None] | Mapping[str, str]
"""From a parameter's name to its group's: a function, or regular expressions and group names."""

Norms = list[list[Norm]]
"""For each entry of a row what `sums_of_squares` makes the entry of."""


_ALL_ROWS = slice(None)


class Piece(NamedTuple):
    """A parameter's gradient, or some rows of it."""

    which: int
    """Index of the parameter in `GradientNorms.parameters`."""
    gradient: Tensor
    rows: slice = _ALL_ROWS


class GradientNorms:
    """The entries that squared gradient norms are summed up in, the same on all ranks.

    One entry for each group of parameters and one more for those in none, so that these entries
    together are the squared norm of the whole gradient. With a preconditioner a last entry is
    that of the whole preconditioned gradient. Each gradient is read once whatever the number of
    groups.

    Args:
        named_parameters: The parameters that are trained, in an order that all ranks share.
        groups: See `Groups`; None: all parameters are one entry.
        preconditioner: What scales gradients for the last entry; None: there is none.

    Raises:
        ValueError: If a regular expression matches no parameter.
        TypeError: If `groups` is neither callable nor a mapping, or gives something else than
            names.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        groups: Groups | None = None,
        preconditioner: AdamPreconditioner | None = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [p for _, p in named_parameters]
        self.device = self.parameters[0].device
        self.preconditioner = preconditioner
        group_of = [None] * len(self.names) if groups is None else groups_of(self.names, groups)
        self.group_names = tuple(dict.fromkeys(g for g in group_of if g is not None))
        self.partition = len(self.group_names) + 1
        """Entries that together are the whole gradient: the groups', and that of the rest."""
        self.entries = self.partition + (preconditioner is not None)
        entry_of_group = {name: entry for entry, name in enumerate(self.group_names)}
        self.entry_of = [len(entry_of_group) if g is None else entry_of_group[g] for g in group_of]

    def none(self) -> Norms:
        """Return the norms of nothing, to be added to."""
        return [[] for _ in range(self.entries)]

    def of(self, pieces: Iterable[Piece]) -> Norms:
        """Return the norms of gradients: one fused call an entry."""
        return self.add(self.none(), pieces)

    def add(self, norms: Norms, pieces: Iterable[Piece]) -> Norms:
        """Add the norms of gradients to `norms`, and return it."""
        of_entry: list[list[Tensor]] = [[] for _ in range(self.partition)]
        with torch.no_grad():
            for piece in pieces:
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
        """Whether some parameter has a gradient: none has after `zero_grad`."""
        return any(p.grad is not None for p in self.parameters)

    def any_trained(self) -> bool:
        """Whether a backward pass can reach any of them: not while all are toggled off."""
        return any(p.requires_grad for p in self.parameters)


def groups_of(names: Sequence[str], groups: Groups) -> list[str | None]:
    """Return the group of each name, None where it has none; see `GradientNorms`."""
    if isinstance(groups, Mapping):
        matched = {
            pattern: {name for name in names if re.search(pattern, name)} for pattern in groups
        }
        for pattern, members in matched.items():
            if not members:
                raise ValueError(
                    f"`groups` must have patterns that match parameters, got {pattern!r}, which"
                    f" matches none. Some names: {', '.join(names[:5])}."
                )
        return [
            next((group for pattern, group in groups.items() if name in matched[pattern]), None)
            for name in names
        ]
    if not callable(groups):
        raise TypeError(
            f"`groups` must be a function or a mapping, got {groups!r}. Pass a function from a"
            " parameter's name to its group's, or a dict from regular expressions to names."
        )
    found = [groups(name) for name in names]
    for name, group in zip(names, found, strict=True):
        if group is not None and not (isinstance(group, str) and group):
            raise TypeError(
                f"`groups` must give a name or None, got {group!r} for {name!r}."
                " Return None for a parameter that belongs to no group."
            )
    return found
