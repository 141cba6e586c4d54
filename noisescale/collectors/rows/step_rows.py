# SPDX-License-Identifier: Apache-2.0
"""Measured steps as rows of numbers: packed on the device, summed over ranks, unpacked."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from noisescale.batches.to_device import to_device
from noisescale.collectives import let_stream_wait
from noisescale.collectors.changes import UNTOUCHED, Changes, ReducedChanges
from noisescale.collectors.devices import read
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.rows.group_levels import NO_LEVELS, RankLevels, StepLevels
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.window_layout import UNKNOWN, Weight, WindowLayout
from noisescale.collectors.squared_norms import wide_dtype

_LAST: deque[dist.Work] = deque(maxlen=64)
"""The last sums over ranks, of all queues: kept, so that no thread of gloo frees their rows.

Such a thread lets go of a sum some time after it is there. If nothing else holds the sum, the
thread frees its row, for which it needs the interpreter. Where the process ends at that moment, the
interpreter ends the thread, and C++ the process: "terminate called without an active exception".
"""


_SAID = 4
"""Numbers that a rank says of its pace."""

_LEVELS = len(RankLevels._fields)

_COUNTS = 11 + _LEVELS + _SAID
"""Numbers behind the norms of a row."""

_BESIDE = 4
"""Numbers of `Beside`, at the end of a row."""


class Beside(NamedTuple):
    """What a row says of an earlier measured step, see `StepsApart`."""

    ends: bool
    """Whether it says anything."""
    numbers: Tensor | Sequence[float] | None
    """Numbers, shape (3,): shares of this rank, or sums once read. None: they are not known."""
    draws: float
    """A checksum of random states; NaN if there is none. Once read, the sum."""


NOTHING_BESIDE = Beside(ends=False, numbers=None, draws=math.nan)


LossSum = tuple[Tensor | None, float]
"""A rank's loss, None if it is not known, times its weight in the mean over ranks; the weight."""

NO_LOSS: LossSum = (None, 0.0)


class Heard(NamedTuple):
    """What a rank knows of a step beside norms."""

    loss: LossSum = NO_LOSS
    levels: RankLevels = NO_LEVELS


NOTHING_HEARD = Heard()


class MeasuredStep(NamedTuple):
    """One optimizer step, over all ranks."""

    norms: StepNorms
    """Norms of the whole gradient."""
    entries: list[StepNorms]
    """Norms of every entry: the groups, the rest, and the extra ones."""
    unmeasured_examples: float
    """Examples of the unmeasured steps before it."""
    unmeasured_steps: int
    """Number of unmeasured steps before it."""
    changes: ReducedChanges
    """What was done to the step's gradients."""
    at_coordinates: StepNorms | None = None
    """Norms at some coordinates, if these are compared between steps."""
    beside: Beside = NOTHING_BESIDE
    """What its row says of an earlier step."""
    said: Sequence[float] = ()
    """The means over ranks of what each said, see `StepRows.said`."""
    loss: float = math.nan
    levels: StepLevels | None = None
    """The noise between and within groups of rows, if groups are known."""


class _Waiting(NamedTuple):
    """A measured step until it is read."""

    row: Tensor
    work: dist.Work | None
    """The collective that sums the row over ranks, if there are several."""
    unmeasured_steps: int
    checked: bool
    ends: bool
    """See `Beside.ends`."""

    @property
    def has_come(self) -> bool:
        """Whether the step can be read without waiting for the device or another rank."""
        work = self.work
        if self.row.device.type != "cpu" or (work is not None and not work.is_completed()):
            return False
        try:
            return work is None or bool(work.wait())
        except RuntimeError:  # completed by failing
            return False


class Unread(Protocol):
    """Numbers on the device that the host reads together with rows."""

    def unread(self) -> Sequence[Tensor]:
        """Return the numbers, as vectors."""

    def take(self, numbers: Sequence[Sequence[float]]) -> None:
        """Receive what is in the vectors."""


class StepRows:
    """A queue of measured steps. Each is summed over ranks at once; the host reads them on demand.

    Args:
        norms: What the entries of a row are norms of.
        group: The ranks to sum over; None: one process.
        sharing: The ranks that hold one model together, by tensor parallelism, and so have one
            batch: each has its part of the norms, and all that is counted.
    """

    def __init__(
        self, norms: GradientNorms, group: dist.ProcessGroup | None, sharing: int = 1
    ) -> None:
        self._partition = norms.partition
        self._entries = norms.entries
        self._beside = 0 if norms.coordinates is None else _BESIDE
        self._device, self._home = norms.fixed_device, weakref.ref(norms.home)
        self._group = group
        self._sharing = sharing
        self.ranks = (dist.get_world_size(group) if group is not None else 1) // sharing
        """Ranks of data parallelism."""
        self.said: Sequence[float] = (0.0,) * _SAID
        """What this rank says to all in each row."""
        self._waiting: list[_Waiting] = []
        self._constants: tuple[tuple[float, ...], Tensor] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        small: Tensor | None,
        big: Tensor | None,
        layout: WindowLayout,
        *,
        examples: float,
        unmeasured_examples: float,
        unmeasured_steps: int,
        changes: Changes = UNTOUCHED,
        beside: Beside = NOTHING_BESIDE,
        heard: Heard = NOTHING_HEARD,
    ) -> None:
        """Sum a step's row over ranks, in one asynchronous collective that always runs.

        Args:
            small: Squared norms as captured, shape (entries,). None if there is nothing to compare:
                then NaN is reduced, so that all ranks leave the step out.
            big: This rank's share of the squared norm of the step's gradient, shape (entries,).
                None if it is not known: then the step is left out, too.
            layout: What the norms are norms of.
            examples: This rank's examples.
            unmeasured_examples: This rank's examples since the last measured step.
            unmeasured_steps: Steps since the last measured step, equal on all ranks.
            changes: What was done to the gradients; squared norms as captured.
            beside: What is said of an earlier step.
            heard: What this rank knows beside norms.
        """
        counts = examples, unmeasured_examples
        checked = changes.sq_norms is not None
        try:
            row = self._row(small, big, layout, counts, changes, beside, heard)
        except Exception:
            # The other ranks wait for this one's row, whatever became of it.
            row = self._row(None, None, UNKNOWN, counts, UNTOUCHED, NOTHING_BESIDE, NOTHING_HEARD)
            self._reduce(row, unmeasured_steps, checked, beside.ends)
            raise
        self._reduce(row, unmeasured_steps, checked, beside.ends)

    def _reduce(self, row: Tensor, unmeasured_steps: int, checked: bool, ends: bool) -> None:
        group = self._group
        work = dist.all_reduce(row, group=group, async_op=True) if group is not None else None
        self._waiting.append(_Waiting(row, work, unmeasured_steps, checked, ends))
        if work is not None:
            _LAST.append(work)
            let_stream_wait(work, row.device)

    def _row(
        self,
        small: Tensor | None,
        big: Tensor | None,
        layout: WindowLayout,
        counts: tuple[float, float],
        changes: Changes,
        beside: Beside,
        heard: Heard,
    ) -> Tensor:
        examples, unmeasured_examples = counts
        loss, levels = heard
        if big is None:
            home = self._home()
            device = self._device or (torch.device("cpu") if home is None else home.device)
            big = torch.full((self._entries,), math.nan, dtype=wide_dtype(device), device=device)
        if small is None:
            small = torch.full_like(big, math.nan)
        changed = big.new_zeros(3) if changes.sq_norms is None else changes.sq_norms.to(big)
        numbers = (
            layout.inverse_part_size,
            layout.inverse_size,
            layout.part_weight,
            layout.total_weight,
            layout.over_step,
            examples,
            float(changes.gone),
            float(changes.in_pieces),
            loss[1],
            *levels._replace(sq_norm=levels.sq_norm * layout.big_scale),
            *self.said,
        )
        if layout.small_scale != 1:
            small = small * layout.small_scale
        if layout.big_scale != 1:
            big = big * layout.big_scale
            changed = changed * layout.big_scale
        # This one number changes at every step: filled in, it takes no copy of the others.
        unmeasured = big.new_full((1,), unmeasured_examples)
        known_loss = unmeasured * math.nan if loss[0] is None else to_device(loss[0], big.device)
        row = [small, big, changed, *self._on_device(numbers, big), unmeasured]
        row += [known_loss.to(big).view(1)]
        if self._beside:
            said = beside.numbers
            known = to_device(said, big.device).to(big) if isinstance(said, Tensor) else None
            row += [big.new_full((3,), math.nan) if known is None else known]
            row += [big.new_full((1,), beside.draws)]
        return torch.cat(row)

    def read(
        self, *, without_waiting: bool = False, beside: Sequence[Unread] = ()
    ) -> Iterator[MeasuredStep]:
        """Take all steps out, waiting for the device.

        Args:
            without_waiting: Take only steps that need no other rank, as an error may have ended the
                other ranks. On an accelerator these are none: its stream may wait for a lost rank.
            beside: What else is to be read, if there are steps to be read.
        """
        ready = (
            list(takewhile(lambda step: step.has_come, self._waiting))
            if without_waiting
            else self._waiting
        )
        for step in ready:
            if step.work is not None:
                step.work.wait()
        self._waiting = self._waiting[len(ready) :]
        if not ready:
            return
        others = [one.unread() for one in beside]
        rows = read([step.row for step in ready] + [x for some in others for x in some])
        numbers = iter(rows[len(ready) :])
        for one, some in zip(beside, others, strict=True):
            one.take([next(numbers) for _ in some])
        rows = rows[: len(ready)]
        for row, step in zip(rows, ready, strict=True):
            said = [row.pop() for _ in range(self._beside)][::-1]
            *norms, stale, between, within = row[:-_COUNTS]
            counted = [x / self._sharing for x in row[-_COUNTS:]]
            inverse_part_sizes, inverse_sizes, weights, total, *rest = counted
            over_step, examples, gone, in_pieces, heard, *more, unmeasured, loss = rest
            of_groups, told = more[:_LEVELS], more[_LEVELS:]
            weighted = (weights, total) != (self.ranks, self.ranks)
            bad = not 0 < total < math.inf or 0 < over_step < self.ranks
            if bad or over_step not in (0, self.ranks):
                # Nothing counts in this step, or ranks disagree about its loss: leave it out.
                weights = total = inverse_part_sizes = inverse_sizes = math.nan
            entries = len(norms) // 2
            # Where all ranks weigh 1 this is the mean over them.
            small = [x * (total / self.ranks) ** 2 / weights for x in norms[:entries]]
            big = norms[entries:]
            # Without weights every rank has 1/W, so that Σw/n = Σa/W and Σw²/n = Σc/W².
            small_batch = weights / inverse_part_sizes
            big_batch = total**2 / inverse_sizes
            if over_step:  # the cross products of parts stay, see `WindowLayout.over_step`
                small_batch = examples * (weights * inverse_sizes)
                small_batch /= inverse_part_sizes * total**2
                big_batch = examples
            whole = StepNorms(
                sum(small[: self._partition]),
                sum(big[: self._partition]),
                small_batch,
                big_batch,
                examples,
                weighted,
                bad,
            )
            of_entries = [
                whole._replace(small_sq_norm=s, big_sq_norm=b)
                for s, b in zip(small, big, strict=True)
            ]
            changes = ReducedChanges(
                stale=_share(stale, whole.big_sq_norm),
                between=_share(between, whole.big_sq_norm),
                within=_share(within, whole.big_sq_norm),
                gone=gone,
                in_pieces=in_pieces,
                checked=step.checked,
            )
            at, word = None, NOTHING_BESIDE
            if self._beside:
                at, word = of_entries.pop(), Beside(step.ends, said[:-1], said[-1])
            steps = step.unmeasured_steps
            means = [x / self.ranks for x in told]
            loss /= heard or math.nan
            levels = StepLevels.of_ranks(of_groups, self.ranks)
            yield MeasuredStep(
                whole, of_entries, unmeasured, steps, changes, at, word, means, loss, levels
            )

    def clear(self) -> None:
        """Drop what has not been read."""
        self._waiting = []

    def _on_device(self, numbers: tuple[Weight, ...], like: Tensor) -> list[Tensor]:
        """Return numbers as vectors. Numbers of the host are copied if they have changed."""
        numbers = tuple(float(x) if not isinstance(x, Tensor) or x.is_cpu else x for x in numbers)
        values = tuple(0.0 if isinstance(x, Tensor) else x for x in numbers)
        known = self._constants
        if known is None or known[0] != values or known[1].device != like.device:
            tensor = to_device(torch.tensor(values, dtype=like.dtype, device="cpu"), like.device)
            self._constants = known = values, tensor
        if not any(isinstance(x, Tensor) for x in numbers):
            return [known[1]]
        constants = known[1].split(1)
        return [
            x.to(like).view(1) if isinstance(x, Tensor) else constant
            for x, constant in zip(numbers, constants, strict=True)
        ]


def _share(change: float, of_whole: float) -> float:
    """Return a change of |g|² as a share of it: infinite if nothing of it is left."""
    return change / of_whole if of_whole else math.inf if change > 0 else 0.0
