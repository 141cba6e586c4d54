# SPDX-License-Identifier: Apache-2.0
"""The counting of batches that the callbacks of all trainers share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from noisescale.batches.batch_size import Count, examples_in
from noisescale.checks import is_real


class BatchCounter(ABC):
    """Count the examples in the batches of one run; warn once where their number is in doubt.

    Args:
        name: Of the callback that counts, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def __call__(self, batch: Any) -> int:
        """Return the examples that this rank has in a batch.

        Raises:
            Exception: As `uncountable` returns it, if there is nothing to count.
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
                f"{count.doubt} {self._name} counts {examples}. If that is not so, pass"
                " `batch_size_fn`."
            )
        return count.examples

    def count(self, batch: Any) -> Count:
        """Count the examples in a batch."""
        return examples_in(batch)

    @abstractmethod
    def uncountable(self, batch: Any) -> Exception:
        """Return the error of a batch in which there is nothing to count."""

    @abstractmethod
    def warn(self, message: str) -> None:
        """Warn as the trainer does."""


def check_batch_size(value: float, name: str = "`local_batch_size`") -> None:
    """Raise unless it is a number of examples; `name` is where it comes from."""
    if not is_real(value):
        raise TypeError(
            f"{name} must be a number, got an object of type {type(value).__name__}. Take"
            " `int(...)` of a tensor, on the host: of one on the device it would wait for it at"
            " every step."
        )
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} must be a number of examples, got {value!r}."
            " Pass how many examples of this rank are in the loss."
        )
