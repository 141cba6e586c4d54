# SPDX-License-Identifier: Apache-2.0
"""The kinds of optimizers that the theory of the noise scale distinguishes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray


class OptimizerKind(Enum):
    """A kind of optimizers. A run's document has the name."""

    SGD = auto()
    MOMENTUM = auto()
    ADAM = auto()
    OTHER = auto()
    SIGN = auto()
    SPECTRAL = auto()
    SCHEDULE_FREE = auto()

    @property
    def title(self) -> str:
        """The name of the kind in a sentence."""
        return {
            OptimizerKind.SGD: "SGD",
            OptimizerKind.MOMENTUM: "SGD with momentum",
            OptimizerKind.ADAM: "Adam and its variants",
            OptimizerKind.OTHER: "an optimizer of no kind that was tried, or without the mean over"
            " ranks,",
            OptimizerKind.SIGN: "Lion and its like",
            OptimizerKind.SPECTRAL: "Muon and its like",
            OptimizerKind.SCHEDULE_FREE: "a schedule-free optimizer",
        }[self]


SMALLEST_SHARE = 0.01
"""A kind with a smaller share of the parameters is left out of a mix."""


@dataclass(frozen=True)
class OptimizerMix:
    """What trains a run: an optimizer of one kind, or of different kinds on different parameters.

    Examples:
        >>> OptimizerMix(OptimizerKind.ADAM).title
        'Adam and its variants'
        >>> OptimizerMix(OptimizerKind.SPECTRAL, OptimizerKind.ADAM, 0.62).title
        'Muon and its like on 62 % of the parameters and Adam and its variants on others'
    """

    kind: OptimizerKind
    """The kind that trains the most elements of parameters."""
    beside: OptimizerKind | None = None
    """The kind with the next most, if there are two or more."""
    share: float = 1.0
    """The share of the main kind. A third kind may have a part of the rest."""

    @property
    def kinds(self) -> tuple[OptimizerKind, ...]:
        """The main kind and, if there is one, the kind beside it."""
        return (self.kind,) if self.beside is None else (self.kind, self.beside)

    @property
    def title(self) -> str:
        """What it is called in a sentence."""
        if self.beside is None:
            return self.kind.title
        share = f"{100 * self.share:.0f} % of the parameters"
        return f"{self.kind.title} on {share} and {self.beside.title} on others"

    def to_dict(self) -> dict[str, str | float | None]:
        """Return it in builtins, as a run's document has it."""
        beside = None if self.beside is None else self.beside.name.lower()
        return {"kind": self.kind.name.lower(), "beside": beside, "share": self.share}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any] | None) -> OptimizerMix | None:
        """Return what `to_dict` was made of.

        Raises:
            KeyError: If a part is missing, or there is no such kind.
        """
        if found is None:
            return None
        beside = found["beside"]
        return cls(
            OptimizerKind[str(found["kind"]).upper()],
            None if beside is None else OptimizerKind[str(beside).upper()],
            float(found["share"]),
        )

    @classmethod
    def of(cls, *optimizers: Any) -> OptimizerMix:
        """Return what an optimizer is, or several that step together are.

        It is read from the class of `step`, the name and the groups of each.

        A class with a step of its own is of the kind that its whole name says. A name that only
        contains another name says nothing: `SoapAdam` is not Adam. Parameter groups that name an
        algorithm, as those of hybrids do, are of the kind that they name.

        Examples:
            >>> import torch
            >>> weights = [torch.zeros(1, requires_grad=True)]
            >>> OptimizerMix.of(torch.optim.AdamW(weights)).kind.name
            'ADAM'
            >>> OptimizerMix.of(torch.optim.SGD(weights, lr=0.1, momentum=0.9)).kind.name
            'MOMENTUM'
        """
        elements = Counter[OptimizerKind]()
        named = OptimizerKind.OTHER
        for optimizer in optimizers:
            found = (kind for name in _classes_of_step(optimizer) if (kind := _kind_named(name)))
            named = next(found, OptimizerKind.OTHER)
            # Moonlight's Muon has `use_muon` in each parameter's state.
            state = optimizer.state if named is OptimizerKind.SPECTRAL else {}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    settings = {**group, **state.get(parameter, {})}
                    trained = parameter.numel() * parameter.requires_grad
                    elements[_kind_by(settings, named)] += trained
        total = elements.total()
        ranked = [kind for kind, n in elements.most_common() if n >= SMALLEST_SHARE * total]
        if not total or len(ranked) == 1:
            return cls((ranked or [named])[0])
        main, beside, *_ = ranked
        return cls(main, beside, elements[main] / total)


_HOW = (
    r"(?:fused|foreach|deepspeed|cpu|hybrid|paged|distributed|dist|singledevice|decoupled|sparse"
    r"|\d+bit|fp8|bf16)*"
)
"""What the names of optimizers say of how, and not of what, they compute."""

_NAMES = {
    OptimizerKind.ADAM: r"[nr]?adam(?:w|ax)?",
    OptimizerKind.SGD: r"sgdw?",
    OptimizerKind.SIGN: r"lionw?|signum|signsgd|tiger",
    OptimizerKind.SPECTRAL: r"(?:nor|ada)?muon(?:w|clip)?|(?:scalable)?shampoo|soap|scion(?:light)?"
    r"|dion2?",
    OptimizerKind.SCHEDULE_FREE: r"(?:adamw|sgd|radam|prodigy)?schedulefree"
    r"(?:adamw|sgd|radam|wrapper)?(?:closure|reference|paper)?",
}

_ALGORITHM = ("kind", "algorithm")
"""Settings of parameter groups that name an algorithm, where an optimizer has several."""

_USES_MUON = ("use_muon", "is_muon")
"""Settings of parameter groups that choose Muon if they are true, and else Adam."""


def _classes_of_step(optimizer: Any) -> list[str]:
    """Return the names of an optimizer's classes, down to the class that its `step` is of."""
    names = [base.__name__ for base in type(optimizer).__mro__]
    # Not the class whose `__dict__` has it: torch wraps the step of each class and puts it there.
    qualified: str = getattr(type(optimizer).step, "__qualname__", "")
    step_of = qualified.rpartition(".")[0].rpartition(".")[2]
    return names[: names.index(step_of) + 1] if step_of in names else []


def _kind_named(name: str) -> OptimizerKind | None:
    plain = name.lower().replace("_", "")
    matches = (kind for kind, of in _NAMES.items() if re.fullmatch(f"{_HOW}(?:{of}){_HOW}", plain))
    return next(matches, None)


def _kind_by(settings: Mapping[str, Any], named: OptimizerKind) -> OptimizerKind:
    """Return the kind by a parameter group's settings, in an optimizer that is named as a kind."""
    for name in (settings[key] for key in _ALGORITHM if isinstance(settings.get(key), str)):
        named = _kind_named(name) or named  # or the label says something else
    for chosen in (settings[key] for key in _USES_MUON if key in settings):
        if chosen:
            named = OptimizerKind.SPECTRAL
        elif named in (OptimizerKind.SPECTRAL, OptimizerKind.OTHER):
            named = OptimizerKind.ADAM
    moves = named is OptimizerKind.SGD and settings.get("momentum", 0)
    return OptimizerKind.MOMENTUM if moves else named


DECAYED = 0.5
"""The learning rate has decayed if its last value is below this share of its largest value."""

RISING = 1.02
"""The learning rate rises if it gains more than this factor in the last quarter of the rows."""


def has_decayed(history: Mapping[str, NDArray[np.float64]]) -> bool:
    """Return whether the learning rate of a run fell, by more than the batch size explains."""
    rate = np.asarray(history.get("learning_rate", ()), dtype=np.float64)
    size = np.asarray(history.get("batch_size", ()), dtype=np.float64)
    known = np.isfinite(rate) & (rate >= 0) if len(rate) == len(size) else np.array([], dtype=bool)
    if not known.any():
        return False
    rate, size = rate[known], size[known]
    peak = int(np.argmax(rate))
    smaller = min(size[-1], size[peak])
    return bool(rate[-1] * size[peak] < DECAYED * rate[peak] * smaller)


def is_warming_up(history: Mapping[str, NDArray[np.float64]]) -> bool:
    """Return whether the learning rate of a run still rises at its end, at one batch size."""
    rate = np.asarray(history.get("learning_rate", ()), dtype=np.float64)
    size = np.asarray(history.get("batch_size", ()), dtype=np.float64)
    if not len(rate) or not np.isfinite(rate).all() or len({*size}) > 1:
        return False
    late = rate[3 * len(rate) // 4 :]
    return bool(rate[-1] == rate.max() and rate[-1] > RISING * late[0])


def learning_rate_of(optimizer: Any) -> float:
    """Return the largest learning rate of an optimizer's parameter groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def parameters_of(optimizer: Any) -> int:
    """Return the number of elements in all parameters that an optimizer trains."""
    groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return sum(parameter.numel() for parameter in groups if parameter.requires_grad)
