# SPDX-License-Identifier: Apache-2.0
"""Counting the examples of batches, for the callbacks of all trainers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from noisescale.batches.batch_size import Count, examples_in
from noisescale.checks import is_real


class BatchCounter(ABC):
    """Count the examples in the batches of one run. Warn once if a number is in doubt.

    Args:
        name: The name of the callback, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def __call__(self, batch: Any) -> int:
        """Return the number of examples in a batch of this rank.

        Raises:
            Exception: The error that `uncountable` returns, if there is nothing to count.
        """
        why: Exception | None = None
        try:
            count = self.count(batch)
        except Exception as error:  # containers that users make themselves may raise anything
            count, why = Count(None), error
        if count.examples is None:
            raise self.uncountable(batch) from why
        if count.doubt and not self._warned:
            self._warned = True
            examples = "1 example" if count.examples == 1 else f"{count.examples} examples"
            self.warn(
                f"{count.doubt} {self._name} counts {examples}. If this number is wrong, pass"
                " `batch_size_fn`."
            )
        return count.examples

    def count(self, batch: Any) -> Count:
        """Count the examples in a batch."""
        return examples_in(batch)

    @abstractmethod
    def uncountable(self, batch: Any) -> Exception:
        """Return the error to raise for a batch in which there is nothing to count."""

    @abstractmethod
    def warn(self, message: str) -> None:
        """Issue a warning in the trainer's own way."""


def check_batch_size(value: float, name: str = "`local_batch_size`") -> None:
    """Raise unless `value` is a number of examples. `name` is its name in the message."""
    if not is_real(value):
        raise TypeError(
            f"{name} must be a number, got an object of type {type(value).__name__}. Convert a"
            " tensor with `int(...)`. The tensor should be on the host: a tensor on the device"
            " would make every step wait for the device."
        )
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} must be a number of examples, got {value!r}."
            " Pass the number of this rank's examples in the loss."
        )
