# SPDX-License-Identifier: Apache-2.0
"""Accumulation windows that may begin at any batch of an epoch."""

from __future__ import annotations

from typing import Any


class Accumulation(int):
    """The number of batches in a step, counted from the batch that the window begins with.

    Trainers ask two things of their number of accumulated batches by the remainder of a batch
    counter: whether gradients begin anew (`batch_idx % n == 0`) and whether the optimizer steps
    (`(batch_idx + 1) % n == 0`). With a plain number this works only for windows that begin at a
    multiple of it: a change elsewhere applies gradients twice or drops them. This number takes the
    remainder from the beginning of the window, so windows of any length can begin anywhere.

    Lightning calls that number `trainer.accumulate_grad_batches`, and transformers'
    `TrainingArguments` call it `gradient_accumulation_steps`.

    Examples:
        >>> three_from_five = Accumulation(3, begin=5)
        >>> [batch_idx % three_from_five for batch_idx in (5, 6, 7, 8)]
        [0, 1, 2, 0]
        >>> three_from_five == 3, 1.5 / three_from_five
        (True, 0.5)
    """

    begin: int

    def __new__(cls, length: int, begin: int = 0) -> Accumulation:
        """Make a number of batches with the window's first batch."""
        made = super().__new__(cls, length)
        made.begin = begin
        return made

    def __rmod__(self, counter: Any) -> Any:
        """Return how far a batch counter is into its window."""
        return (counter - self.begin) % int(self)

    def __deepcopy__(self, memo: Any) -> Accumulation:
        """Return the number itself: it never changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain number, which is read without this package."""
        return int, (int(self),)
