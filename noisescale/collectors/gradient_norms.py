# SPDX-License-Identifier: Apache-2.0
"""Sums of squares of gradients, by groups of parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from noisescale.collectors.devices import current_stream, keep_from
from noisescale.collectors.groups import Groups, groups_of
from noisescale.collectors.momentum import MomentumDirection
from noisescale.collectors.preconditioner import AdamPreconditioner
from noisescale.collectors.squared_norms import (
    Norm,
    norms_of,
    norms_of_one,
    squared_norm,
    sums_of,
    sums_of_squares,
)

Norms = list[list[Norm]]
"""For each entry of a row, the norms from which `sums_of_squares` computes the entry. With a
direction there is one list more, of the numbers that sum to the dot product of the current part."""


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
    these entries are the squared norm of the whole gradient. With a preconditioner, a further entry
    holds the whole preconditioned gradient, and with momentum, the last entry has the square of the
    gradient's dot product with its direction. Each gradient is read once for its norms, however
    many groups there are.

    Args:
        named_parameters: The parameters that are trained, in an order that all ranks share.
        groups: See `Groups`; None: all parameters are one entry.
        preconditioner: The preconditioner for a further entry; None: there is no such entry.
        momentum: The direction for the last entry; None: there is no such entry.
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
        preconditioner: AdamPreconditioner | None = None,
        *,
        momentum: MomentumDirection | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [p for _, p in named_parameters]
        elsewhere = (p for p in self.parameters if not p.is_cpu)
        self.home = next(elsewhere, self.parameters[0])
        """Norms are summed up where this parameter is, unless there is a `fixed_device`."""
        self.fixed_device = device
        self.preconditioner, self.momentum = preconditioner, momentum
        group_of = [None] * len(self.names) if groups is None else groups_of(self.names, groups)
        self.group_names = tuple(dict.fromkeys(g for g in group_of if g is not None))
        self.partition = len(self.group_names) + 1
        """Number of entries that together are the whole gradient: the groups and the rest."""
        self.entries = self.partition + (preconditioner is not None) + (momentum is not None)
        entry_of_group = {name: entry for entry, name in enumerate(self.group_names)}
        self.entry_of = [len(entry_of_group) if g is None else entry_of_group[g] for g in group_of]
        self._streams: set[torch.Stream] = set()
        """On which norms were made in the step under way."""
        self._left_out: frozenset[int] = frozenset()
        self._of_direction: Tensor | None = None
        """|m|² in the step under way."""

    @property
    def device(self) -> torch.device:
        """Where norms are summed up now: `module.to` moves parameters."""
        return self.home.device if self.fixed_device is None else self.fixed_device

    def restricted_to(self, indices: Sequence[int]) -> GradientNorms:
        """Return the norms of only these parameters, in the same entries; before `leave_out`."""
        some = copy.copy(self)
        some.names = [self.names[i] for i in indices]
        some.parameters = [self.parameters[i] for i in indices]
        some.entry_of = [self.entry_of[i] for i in indices]
        some._streams = set()
        return some

    def leave_out(self, indices: Iterable[int]) -> None:
        """Leave the gradients of these parameters out from now on."""
        self._left_out = frozenset(indices)

    def begin_step(self) -> None:
        """Forget what holds for one step alone."""
        self._of_direction = None
        self._streams = set()

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

    def none(self) -> Norms:
        """Return empty norms, to add to."""
        return [[] for _ in range(self.entries + (self.momentum is not None))]

    def of(self, pieces: Iterable[Piece]) -> Norms:
        """Return the norms of gradients, with one fused call for each entry."""
        return self.add(self.none(), pieces)

    def add(self, norms: Norms, pieces: Iterable[Piece], *, dots: bool = True) -> Norms:
        """Add the norms of gradients to `norms`, and return it; with or without dot products."""
        of_entry: list[list[Tensor]] = [[] for _ in range(self.partition)]
        whole: list[tuple[Parameter, Tensor, slice]] = []
        with torch.no_grad():
            for piece in pieces:
                if piece.which in self._left_out:
                    continue
                of_entry[self.entry_of[piece.which]].append(piece.gradient)
                whole.append((self.parameters[piece.which], piece.gradient, piece.rows))
            if self.preconditioner is not None:
                norms[self.partition].extend(self.preconditioner.norms(whole))
            if self.momentum is not None and dots:
                norms[-1].extend(self.momentum.dots((p, gradient) for p, gradient, _ in whole))
            for entry, gradients in enumerate(of_entry):
                norms[entry].extend(norms_of(gradients))
            for device in {gradient.device for gradients in of_entry for gradient in gradients}:
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
        if self.preconditioner is not None:
            norms[self.partition] += self.preconditioner.norms([(parameter, gradient, _ALL_ROWS)])
        if self.momentum is not None:
            norms[-1] += self.momentum.dots([(parameter, gradient)])

    def end_part(self, norms: Norms) -> None:
        """End a small batch whose norms are in `norms`: its dot product is whole, and squared."""
        if self.momentum is None or not (dots := norms[-1]):
            return
        on_host = sum(dot for dot in dots if not isinstance(dot, Tensor))
        if self.device.type == "cpu" and not any(isinstance(dot, Tensor) for dot in dots):
            # See `Norm`. Along m/|m|: what is left is comparable to |g|².
            norms[-2].append(on_host**2 / (float(self._sq_norm_of_direction()) or math.nan))
        else:  # `sums` divides by |m|²
            on_device = [dot for dot in dots if isinstance(dot, Tensor)]
            self.keep(on_device)
            alone = len(on_device) == 1 and not on_host
            whole = on_device[0] if alone else sums_of([on_device], device=self.device) + on_host
            norms[-2].append(whole.view(1))
        norms[-1] = []

    def sums(self, norms: Norms) -> Tensor:
        """Return the sums of squares, shape (entries,), on the device."""
        self.keep([x for entry in norms for x in entry])
        self.end_part(norms)
        with torch.no_grad():
            sums = sums_of_squares(norms[: self.entries], device=self.device)
            if self.momentum is not None and any(isinstance(x, Tensor) for x in norms[-2]):
                sums[-1].div_(self._sq_norm_of_direction())
        return sums

    def _sq_norm_of_direction(self) -> Tensor:
        """|m|², which stands still within a step."""
        if self._of_direction is None:
            parts = [
                m
                for which, p in enumerate(self.parameters)
                if p.requires_grad and which not in self._left_out
                if self.momentum is not None and (m := self.momentum.of(p)) is not None
            ]
            self._of_direction = squared_norm(parts, device=self.device)
        return self._of_direction

    def dots(self) -> list[Norm]:
        """Return numbers that sum to the dot product of what is in `p.grad` with the direction."""
        if self.momentum is None:
            return []
        with torch.no_grad():
            return self.momentum.dots(
                (p, p.grad)
                for which, p in enumerate(self.parameters)
                if p.grad is not None and p.requires_grad and which not in self._left_out
            )

    def any_gradient(self) -> bool:
        """Whether any parameter has a gradient; none has after `zero_grad`."""
        return any(p.grad is not None for p in self.parameters)

    def any_trained(self) -> bool:
        """Whether a backward pass can reach any parameter; not while all are toggled off."""
        return any(p.requires_grad for p in self.parameters)
