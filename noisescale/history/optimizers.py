# SPDX-License-Identifier: Apache-2.0
"""The kinds of optimizers that the theory of the noise scale distinguishes."""

from __future__ import annotations

import re
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
        """The name of the kind in a sentence."""
        return {
            OptimizerKind.SGD: "SGD",
            OptimizerKind.MOMENTUM: "SGD with momentum",
            OptimizerKind.ADAM: "Adam and its variants",
            OptimizerKind.OTHER: "an optimizer that is neither SGD nor a variant of Adam, or"
            " without the mean over ranks,",
        }[self]

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerKind:
        """Return the kind of an optimizer, from the class of its `step`, its name and its groups.

        A class with a step of its own is of the kind that its whole name says. A name that only
        contains another name says nothing: `MuonAdamW` is not Adam, and `Signum(SGD)` is not SGD.

        Examples:
            >>> import torch
            >>> weights = [torch.zeros(1, requires_grad=True)]
            >>> OptimizerKind.of(torch.optim.AdamW(weights)).name
            'ADAM'
            >>> OptimizerKind.of(torch.optim.SGD(weights, lr=0.1, momentum=0.9)).name
            'MOMENTUM'
        """
        named = next((name for name in _classes_of_step(optimizer) if _is_known(name)), "")
        groups = optimizer.param_groups
        others = (name for group in groups for name in _algorithms(group) if not _is_known(name))
        if not named or any(others):
            return cls.OTHER
        if _ADAM.fullmatch(_plain(named)):
            return cls.ADAM
        moves = any(group.get("momentum", 0) for group in groups)
        return cls.MOMENTUM if moves else cls.SGD

    @classmethod
    def from_log(cls, numbers: Iterable[float]) -> OptimizerKind | None:
        """Return the kind for the numbers in a log; None if no number is known."""
        known = {float(number) for number in numbers} & {float(kind) for kind in cls}
        return cls(int(max(known))) if known else None


_HOW = r"(?:fused|foreach|deepspeed|cpu|hybrid|paged|distributed|sparse|\d+bit|fp8|bf16)*"
"""What the names of optimizers say of how, and not of what, they compute."""

_ADAM = re.compile(f"{_HOW}[nr]?adam(?:w|ax)?{_HOW}")
_SGD = re.compile(f"{_HOW}sgdw?{_HOW}")

_ALGORITHM = ("kind", "algorithm")
"""Settings of parameter groups that name an algorithm, where an optimizer has several."""

_USES_MUON = ("use_muon", "is_muon")
"""Settings of parameter groups that choose Muon if they are true."""


def _classes_of_step(optimizer: Any) -> list[str]:
    """Return the names of an optimizer's classes, down to the class that its `step` is of."""
    names = [base.__name__ for base in type(optimizer).__mro__]
    # Not the class whose `__dict__` has it: torch wraps the step of each class and puts it there.
    qualified: str = getattr(type(optimizer).step, "__qualname__", "")
    step_of = qualified.rpartition(".")[0].rpartition(".")[2]
    return names[: names.index(step_of) + 1] if step_of in names else []


def _algorithms(group: Mapping[str, Any]) -> list[str]:
    named = [name for key in _ALGORITHM if isinstance(name := group.get(key), str)]
    return named + ["muon" for key in _USES_MUON if group.get(key)]


def _is_known(name: str) -> bool:
    return bool(_ADAM.fullmatch(_plain(name)) or _SGD.fullmatch(_plain(name)))


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


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
