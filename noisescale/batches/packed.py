# SPDX-License-Identifier: Apache-2.0
"""The sequences of a batch that has them one after the other, without padding.

Such a batch is one row, or one long tensor, in which the first dimension says nothing about the
examples. Fields beside it say where sequences begin: `cu_seqlens`, `position_ids`, `seq_idx`, or
how long each one is: `lengths`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

_BOUNDARIES = ("cu_seq",)
"""How names begin of tensors with the boundaries of n sequences: n + 1 numbers."""

_LENGTHS = ("lengths", "seq_lens", "seq_lengths", "seqlens", "input_lengths")
"""Names of tensors with a number for each sequence."""

_MOST_NESTED = 3


class Sequences(NamedTuple):
    """How many sequences a batch holds."""

    number: int
    in_one_row: bool
    """Whether the first dimension of the batch is 1."""
    of_first: bool = False
    """Whether the number is that of the first batch, and not of this one."""


class PackedSequences:
    """Counts the sequences in the batches of one run.

    Where only the values of a tensor on a device say how many sequences a row has, the values of
    the first batch are read, and its number is taken for all: to read each would make every step
    wait for the device.
    """

    def __init__(self) -> None:
        self._of_first: int | None = None

    def __call__(self, batch: Any) -> Sequences | None:
        """Return the number of sequences; None if nothing says that the batch is packed."""
        named = {name: x for name, x in _named_fields(batch) if isinstance(x, Tensor) and x.dim()}
        in_one_row = any(len(x) == 1 and x.dim() > 1 for x in named.values())
        for name, x in named.items():
            if name.startswith(_BOUNDARIES) and x.numel() > 1:
                return Sequences(_count_between(x), in_one_row)
        for name in _LENGTHS:
            lengths = named.get(name)
            if lengths is not None and all(_is_of(lengths, x) for x in named.values()):
                return Sequences(len(lengths), in_one_row)
        for name, count in (("position_ids", _runs), ("seq_idx", _distinct)):
            if name not in named:
                continue
            x = named[name]
            if x.dim() > 1 and x.shape[-2] == 1 < x.shape[-1]:
                return self._of_row(x.reshape(-1, x.shape[-1])[0], count)
        return None

    def _of_row(self, row: Tensor, count: Any) -> Sequences | None:
        if row.device.type == "cpu":
            found, of_first = count(row), False
        else:
            if self._of_first is None:
                self._of_first = count(row)
            found, of_first = self._of_first, self._of_first > 1
        return Sequences(found, in_one_row=True, of_first=of_first) if found > 1 else None


def _is_of(lengths: Tensor, x: Tensor) -> bool:
    """Return whether a tensor may hold sequences of these lengths, or one item a sequence."""
    sequences = len(lengths)
    if sequences in x.shape[:2] or len(x) == 1:
        return lengths.dim() == 1
    on_host = lengths.device.type == "cpu"
    return len(x) > sequences and (not on_host or int(lengths.sum()) == len(x))


def _count_between(boundaries: Tensor) -> int:
    if boundaries.device.type != "cpu":
        return boundaries.numel() - 1
    return int((boundaries.reshape(-1).diff() > 0).sum())  # some repeat the last one as padding


def _runs(positions: Tensor) -> int:
    """Count where positions begin to rise. Padding may have the same position throughout."""
    rises = positions.diff() > 0
    return int(rises[0]) + int((rises[1:] & ~rises[:-1]).sum()) if len(positions) > 1 else 1


def _distinct(indices: Tensor) -> int:
    changes = indices.diff() != 0
    return 1 + int((changes & (indices[1:] >= 0)).sum())  # padding is -1


def _named_fields(batch: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the named fields of a batch, and of the records in it."""
    if depth > _MOST_NESTED:
        return
    if isinstance(batch, Mapping):
        items = [(name, x) for name, x in batch.items() if isinstance(name, str)]
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        items = list(zip(batch._fields, batch, strict=False))
    elif is_dataclass(batch) and not isinstance(batch, type):
        items = [(field.name, getattr(batch, field.name, None)) for field in fields(batch)]
    elif type(batch) is tuple and len(batch) == 2:  # inputs and their labels
        items = [("", x) for x in batch]
    else:
        return
    for name, x in items:
        yield name, x
        if not isinstance(x, Tensor):
            yield from _named_fields(x, depth + 1)
