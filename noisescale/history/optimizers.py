# SPDX-License-Identifier: Apache-2.0
"""The kinds of optimizers that the theory of the noise scale distinguishes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class OptimizerKind(IntEnum):
    """The kind of a run's optimizer. Logs contain the number, as they only hold numbers."""

    SGD = 1
    MOMENTUM = 2
    ADAM = 3
    OTHER = 4

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return {
            OptimizerKind.SGD: "SGD",
            OptimizerKind.MOMENTUM: "SGD with momentum",
            OptimizerKind.ADAM: "Adam and its variants",
            OptimizerKind.OTHER: "an optimizer that is neither SGD nor a variant of Adam, or"
            " without the mean over ranks,",
        }[self]

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerKind:
        """Return the kind of an optimizer, from the names of its classes and its momentum.

        Examples:
            >>> import torch
            >>> weights = [torch.zeros(1, requires_grad=True)]
            >>> OptimizerKind.of(torch.optim.AdamW(weights)).name
            'ADAM'
            >>> OptimizerKind.of(torch.optim.SGD(weights, lr=0.1, momentum=0.9)).name
            'MOMENTUM'
        """
        names = [base.__name__.lower() for base in type(optimizer).__mro__]
        if any("adam" in name for name in names):  # AdamW, NAdam, Adam8bit, DeepSpeedCPUAdam
            return cls.ADAM
        if not any(name.startswith("sgd") for name in names):
            return cls.OTHER
        moves = any(group.get("momentum", 0) for group in optimizer.param_groups)
        return cls.MOMENTUM if moves else cls.SGD

    @classmethod
    def logged_as(cls, numbers: Iterable[float]) -> OptimizerKind | None:
        """Return the kind for the numbers in a log; None if no number is known."""
        known = {float(number) for number in numbers} & {float(kind) for kind in cls}
        return cls(int(max(known))) if known else None


DECAYED = 0.5
"""The learning rate has decayed if its last value is below this share of its largest value."""


def has_decayed(history: Mapping[str, NDArray[np.float64]]) -> bool:
    """Return whether the learning rate of a run fell, by more than the batch size explains."""
    rate = np.asarray(history.get("learning_rate", ()), dtype=np.float64)
    size = np.asarray(history.get("batch_size", ()), dtype=np.float64)
    known = np.isfinite(rate) & (rate >= 0) if len(rate) == len(size) else np.array([], dtype=bool)
    if not known.any():
        return False
    rate, size = rate[known], size[known]
    peak = int(np.argmax(rate))
    return bool(rate[-1] < DECAYED * rate[peak] * min(1.0, size[-1] / size[peak]))


def learning_rate_of(optimizer: Any) -> float:
    """Return the largest learning rate of an optimizer's parameter groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def parameters_of(optimizer: Any) -> int:
    """Return the number of elements in all parameters that an optimizer trains."""
    groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(parameter.numel() for parameter in groups if parameter.requires_grad)
