# SPDX-License-Identifier: Apache-2.0
"""Sums of squares of gradients, by groups of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.collectors.devices import current_stream, keep_from
from noisescale.collectors.groups import Groups, groups_of
from noisescale.collectors.squared_norms import (
    Norm,
    norms_of,
    norms_of_one,
    scale,
    sums_of_squares,
)

Norms = list[list[Norm]]
"""A list of norms for each entry of a row: `sums_of_squares` computes the entry from them.

Each `ExtraEntry` has one list more, with the numbers of the current part.
"""


_ALL_ROWS = slice(None)


class Piece(NamedTuple):
    """A parameter's gradient, or some rows of it."""

    which: int
    """Index of the parameter in `GradientNorms.parameters`."""
    gradient: Tensor
    rows: slice = _ALL_ROWS
    holders: int = 1
    """The ranks that have this piece, of those whose norms are summed: each norms its share."""


class ExtraEntry:
    """A further entry of a row: something of each part's gradient, beside its squared norm.

    Numbers of single gradients are collected while a part is captured. At its end they become norms
    whose squares sum to the entry.
    """

    cost = 0.0
    """The cost of the numbers relative to the cost of the norms, see `Collector.cost`."""
    needs_whole = False
    """Whether the numbers of all parameters make one, so that ranks cannot share parameters out."""

    def compute(self, gradients: Iterable[tuple[Parameter, Tensor, slice]]) -> Sequence[Norm]:
        """Return numbers of gradients, each of some rows of a parameter."""
        raise NotImplementedError

    def end_part(self, numbers: list[Norm], norms: GradientNorms) -> list[Norm]:
        """Return the norms of a part, from all of its numbers."""
        return numbers

    def divisor(self, norms: GradientNorms) -> Tensor | None:
        """Return what the sum of squares on the device is divided by, if it is."""
        return None

    def begin_step(self) -> None:
        """Forget what holds for one step alone."""


class GradientNorms:
    """The entries in which squared gradient norms are summed, the same on all ranks.

    There is one entry for each group of parameters, and one for parameters in no group. Together
    these entries are the squared norm of the whole gradient. Extra entries come after these. Each
    gradient is read once for its norms, however many groups there are.

    Args:
        named_parameters: The parameters that are trained, in an order that all ranks share.
        groups: See `Groups`; None: all parameters are one entry.
        extra: Further entries.
        coordinates: The last entry: that of gradients at some coordinates, see `StepsApart`.
        device: Where norms are summed up; None: where the first parameter is that is not on the
            CPU, if there is one, as the host would wait for norms that come to the CPU.

    Raises:
        ValueError: If `groups` does not fit the parameters.
        TypeError: If `groups` has a wrong type.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        groups: Groups | None = None,
        extra: Sequence[ExtraEntry] = (),
        *,
        coordinates: ExtraEntry | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [p for _, p in named_parameters]
        elsewhere = (p for p in self.parameters if not p.is_cpu)
        self.home = next(elsewhere, self.parameters[0])
        """Norms are summed up where this parameter is, unless there is a `fixed_device`."""
        self.fixed_device = device
        self.coordinates = coordinates
        self.extra = [*extra] if coordinates is None else [*extra, coordinates]
        group_of = [None] * len(self.names) if groups is None else groups_of(self.names, groups)
        self.group_names = tuple(dict.fromkeys(g for g in group_of if g is not None))
        self.partition = len(self.group_names) + 1
        """Number of entries that together are the whole gradient: the groups and the rest."""
        self.entries = self.partition + len(self.extra)
        entry_of_group = {name: entry for entry, name in enumerate(self.group_names)}
        self.entry_of = [len(entry_of_group) if g is None else entry_of_group[g] for g in group_of]
        self._streams: set[torch.Stream] = set()
        """The streams on which norms were made in the step under way."""
        self._left_out: frozenset[int] = frozenset()

    @property
    def device(self) -> torch.device:
        """Where norms are summed up now: `module.to` moves parameters."""
        return self.home.device if self.fixed_device is None else self.fixed_device

    def leave_out(self, indices: Iterable[int]) -> None:
        """Leave the gradients of these parameters out from now on."""
        self._left_out = frozenset(indices)

    @property
    def indices_left_out(self) -> frozenset[int]:
        """The parameters whose gradients are left out, by their index."""
        return self._left_out

    def begin_step(self) -> None:
        """Forget what holds for one step alone."""
        self._streams = set()
        for extra in self.extra:
            extra.begin_step()

    def note_stream(self, device: torch.device) -> None:
        """Note that norms are made on the stream that is current now, see `keep`."""
        if device.type != "cpu" and (stream := current_stream(device)) is not None:
            self._streams.add(stream)

    def wait(self) -> None:
        """Have the current streams wait for norms of hooks, where autograd does not."""
        for stream in self._streams:
            current = current_stream(stream.device)
            if current is not None:
                current.wait_stream(stream)

    def keep(self, norms: Sequence[Norm]) -> None:
        """Keep norms of hooks until what reads them on another stream is done.

        Autograd calls hooks on the streams of the forward pass, and has others wait for them.
        """
        for stream in tuple(self._streams):  # hooks of other devices may add to them
            tensors = (x for x in norms if isinstance(x, Tensor))
            keep_from(stream, (x for x in tensors if x.device == stream.device))

    def empty(self) -> Norms:
        """Return empty norms, to add to."""
        return [[] for _ in range(self.entries + len(self.extra))]

    def compute(self, pieces: Iterable[Piece]) -> Norms:
        """Return the norms of gradients, with one fused call for each entry."""
        return self.add(self.empty(), pieces)

    def compute_share(self, pieces: Iterable[Piece], ranks: int) -> Norms:
        """Return the norms of a rank's share of what is in `p.grad`."""
        norms = self.add(self.empty(), pieces, shared=True)
        for extra, numbers in zip(self.extra, norms[self.entries :], strict=True):
            if extra.needs_whole:  # it is squared: each rank's share is 1/W of the square
                with torch.no_grad():
                    whole = extra.compute(
                        (p, p.grad, _ALL_ROWS)
                        for which, p in enumerate(self.parameters)
                        if p.grad is not None and p.requires_grad and which not in self._left_out
                    )
                    numbers.extend(number / math.sqrt(ranks) for number in whole)
        return norms

    def add(self, norms: Norms, pieces: Iterable[Piece], *, shared: bool = False) -> Norms:
        """Add the norms of gradients, or of a rank's share of them, to `norms`, and return it."""
        of_entry: list[list[Tensor]] = [[] for _ in range(self.partition)]
        held: dict[tuple[int, int], list[Tensor]] = {}
        whole: list[tuple[Parameter, Tensor, slice]] = []
        with torch.no_grad():
            for piece in pieces:
                if piece.which in self._left_out:
                    continue
                entry = self.entry_of[piece.which]
                if piece.holders == 1:
                    of_entry[entry].append(piece.gradient)
                else:
                    held.setdefault((entry, piece.holders), []).append(piece.gradient)
                whole.append((self.parameters[piece.which], piece.gradient, piece.rows))
            for extra, numbers in zip(self.extra, norms[self.entries :], strict=True):
                if not (shared and extra.needs_whole):
                    numbers.extend(extra.compute(whole))
            for entry, gradients in enumerate(of_entry):
                norms[entry].extend(norms_of(gradients))
            for (entry, holders), gradients in held.items():
                norms[entry].extend(scale(norms_of(gradients), holders**-0.5))
            for device in {g.device for some in (*of_entry, *held.values()) for g in some}:
                self.note_stream(device)
        return norms

    def add_one(self, norms: Norms, which: int, gradient: Tensor) -> None:
        """Add the norms of a whole parameter's gradient: the quick way, for hooks."""
        if which in self._left_out:
            return
        if gradient.requires_grad:  # the pass is being recorded (`create_graph`)
            gradient = gradient.detach()
        norms[self.entry_of[which]] += norms_of_one(gradient)
        self.note_stream(gradient.device)
        parameter = self.parameters[which]
        for extra, numbers in zip(self.extra, norms[self.entries :], strict=True):
            numbers += extra.compute([(parameter, gradient, _ALL_ROWS)])

    def end_part(self, norms: Norms) -> None:
        """End a small batch whose norms are in `norms`."""
        for entry, extra in enumerate(self.extra, self.partition):
            if numbers := norms[entry + len(self.extra)]:
                norms[entry] += extra.end_part(numbers, self)
                norms[entry + len(self.extra)] = []

    def sums(self, norms: Norms) -> Tensor:
        """Return the sums of squares, shape (entries,), on the device."""
        self.keep([x for entry in norms for x in entry])
        self.end_part(norms)
        with torch.no_grad():
            sums = sums_of_squares(norms[: self.entries], device=self.device)
            for entry, extra in enumerate(self.extra, self.partition):
                on_device = any(isinstance(x, Tensor) for x in norms[entry])
                if on_device and (divisor := extra.divisor(self)) is not None:
                    sums[entry].div_(divisor)
        return sums

    def any_gradient(self) -> bool:
        """Return whether any parameter has a gradient; after `zero_grad` none has one."""
        return any(p.grad is not None for p in self.parameters)

    def any_trained(self) -> bool:
        """Return whether a backward pass can reach any parameter: False if all are toggled off."""
        return any(p.requires_grad for p in self.parameters)
