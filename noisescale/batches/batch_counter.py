# SPDX-License-Identifier: Apache-2.0
"""Counting the examples of batches, for the callbacks of all trainers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from noisescale.batches.batch_size import Count, examples_in, first_dimensions
from noisescale.batches.packed import PackedSequences
from noisescale.checks import is_real
from noisescale.refusal import Refusal, TypeRefusal

_MOST_NAMED = 8
"""The most first dimensions that an error names."""


class BatchCounter(ABC):
    """Count the examples in the batches of one run. Warn once if a number is in doubt.

    Args:
        name: The name of the callback, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False
        self._packed = PackedSequences()
        self._before: tuple[int, ...] | None = None
        self.rows: int | None = None
        """The rows of the last batch, if they are not its examples."""
        self.unequal = ""
        """What makes the last batch uncountable, for the error: its tensors' first dimensions."""

    def __call__(self, batch: Any) -> int:
        """Return the number of examples in a batch of this rank.

        Raises:
            Exception: The error that `uncountable` returns, if there is nothing to count.
        """
        why: Exception | None = None
        self.rows = None
        try:
            count = self._count(batch)
        except Exception as error:  # containers that users make themselves may raise anything
            count, why = Count(None), error
        if count.examples is None or count.withheld:
            self.unequal = _unequal(batch) if count.withheld else ""
            raise self.uncountable(batch) from why
        if count.doubt and not self._warned:
            self._warned = True
            examples = "1 example" if count.examples == 1 else f"{count.examples} examples"
            self.warn(
                f"{count.doubt} {self._name} counts {examples}. If this number is wrong, pass"
                " `batch_size_fn`."
            )
        return count.examples

    def _count(self, batch: Any) -> Count:
        """Count the examples, with what the batches before and the model say of this batch."""
        if packed := self._packed(batch):
            self.rows = 1 if packed.in_one_row else None
            doubt = (
                "A batch is one row of several sequences. How many there are is on the device, and"
                " to read it would make every step wait for the device. So the number in the first"
                " batch is taken for all. Return `cu_seqlens` with the batch, and it is counted."
            )
            return Count(packed.number, doubt if packed.of_first else None)
        count = self.count(batch)
        if (before := self._before) is None:
            self._before = None if count.doubt else _ranks(batch)
            module = self.sequence_first_module()
            if module and count.doubt is None and _may_be_sequence_first(batch):
                return Count(
                    count.examples,
                    "The first dimension of a batch is assumed to be the examples, but"
                    f" {module} has `batch_first=False`.",
                )
        elif count.doubt and before == _ranks(batch):
            return Count(count.examples)  # a short last batch of the same structure
        if self._warned:  # of a number that has gone into steps by now
            return count._replace(withheld=False)
        return count

    def sequence_first_module(self) -> str:
        """Name a module of the model that takes sequences first; empty if there is none."""
        return ""

    def count(self, batch: Any) -> Count:
        """Count the examples in a batch."""
        return examples_in(batch)

    @abstractmethod
    def uncountable(self, batch: Any) -> Exception:
        """Return the error to raise for a batch in which there is nothing to count."""

    @abstractmethod
    def warn(self, message: str) -> None:
        """Issue a warning in the trainer's own way."""


def _unequal(batch: Any) -> str:
    sizes = [*map(str, first_dimensions(batch))]
    more = ", ..." if len(sizes) > _MOST_NAMED else ""
    return f" whose tensors have the first dimensions {', '.join(sizes[:_MOST_NAMED])}{more}"


def _tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that is one, or a flat record or list of them."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    several = batch if isinstance(batch, (list, tuple)) else [batch]
    return [x for x in several if isinstance(x, Tensor) and x.dim()]


def _ranks(batch: Any) -> tuple[int, ...]:
    """Return how many dimensions each tensor of a batch has."""
    return tuple(x.dim() for x in _tensors(batch))


def _may_be_sequence_first(batch: Any) -> bool:
    """Return whether all tensors share two dimensions, either of which may be the positions."""
    tensors = _tensors(batch)
    sequences = [x for x in tensors if x.dim() == 3 or not x.is_floating_point()]
    shared = {x.shape[:2] for x in tensors}
    return bool(sequences) and len(shared) == 1 and all(x.dim() in (2, 3) for x in tensors)


def sequence_first_in(model: nn.Module) -> str:
    """Name a module that takes sequences with the positions first; empty if there is none."""
    for name, module in model.named_modules():
        if getattr(module, "batch_first", None) is False:
            return name or type(module).__name__
    return ""


def check_batch_size(value: float, name: str = "local_batch_size", verb: str = "be") -> None:
    """Raise a Refusal of the argument `name` unless `value` is a number of examples."""
    if not is_real(value):
        raise TypeRefusal(
            name,
            f"{verb} a number",
            f"an object of type {type(value).__name__}",
            "Convert a tensor with `int(...)`. The tensor should be on the host: a tensor on the"
            " device would make every step wait for the device.",
        )
    if not 0 <= value < math.inf:
        raise Refusal(
            name,
            f"{verb} a number of examples",
            repr(value),
            "Pass the number of this rank's examples in the loss.",
        )
