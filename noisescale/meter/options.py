# SPDX-License-Identifier: Apache-2.0
"""MeterOptions: the options of a `NoiseScaleMeter`, checked before there is a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from noisescale.checks import check_confidence, refuse, require_choice
from noisescale.collectors.groups import Groups, check_groups
from noisescale.estimation.estimator import NoiseScaleEstimator, check_unit, check_window
from noisescale.meter.cadence import checked_every_n_steps, checked_share
from noisescale.meter.extra import Extra
from noisescale.refusal import Refusal

SmallBatch = Literal["auto", "rank", "micro_batch", "half"]

_LEAVE_OR_ACCUMULATE = (
    'Leave it at "auto", or accumulate two micro-batches of half the size: the batch and the'
    " training stay the same, and no extra pass is needed."
)


@dataclass(frozen=True)
class MeterOptions:
    """The arguments of a `NoiseScaleMeter` that do not depend on the model.

    Raises:
        ValueError: If an option is out of its range, or options contradict each other.
        TypeError: If `groups` has a wrong type.

    Examples:
        >>> MeterOptions(every_n_steps=5).leaves_choice
        True
    """

    window: int | Literal["auto"] = "auto"
    every_n_steps: int | Literal["auto"] = "auto"
    max_overhead: float | None = None
    unit: str = "examples"
    groups: Groups | None = None
    confidence: float = 0.95
    small_batch: SmallBatch = "auto"
    cut: Sequence[str] | None = None
    backward_twice: bool = False
    extra: Sequence[Extra] = ()

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> MeterOptions:
        """Return the options that are among the arguments of a call."""
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.name in arguments})

    def __post_init__(self) -> None:
        check_window(self.window)
        check_confidence(self.confidence)
        check_unit(self.unit)
        check_groups(self.groups)
        require_choice("small_batch", self.small_batch, get_args(SmallBatch), _LEAVE_OR_ACCUMULATE)
        if not isinstance(self.backward_twice, bool):
            refuse("backward_twice", "be True or False", repr(self.backward_twice))
        share = self.max_overhead
        as_checked = {
            "every_n_steps": checked_every_n_steps(self.every_n_steps),
            "max_overhead": None if share is None else checked_share(share),
            "cut": self._checked_cut(),
            "extra": tuple(self.extra),
        }
        for name, value in as_checked.items():
            object.__setattr__(self, name, value)  # the record is frozen

    def new_estimator(self) -> NoiseScaleEstimator:
        """Return an estimator that has seen no step."""
        return NoiseScaleEstimator(self.window, self.confidence, self.unit)

    @property
    def leaves_choice(self) -> bool:
        """Whether `small_batch` is "auto", so that the package chooses what is compared."""
        return self.small_batch == "auto" and self.cut is None

    def _checked_cut(self) -> Sequence[str] | None:
        """Return the names of modules as a list; one name becomes a list of one."""
        cut = self.cut
        if cut is None:
            return None
        names = [cut] if isinstance(cut, str) else list(cut)
        if not names or not all(isinstance(name, str) for name in names):
            raise Refusal(
                "cut",
                "be names of modules",
                repr(cut),
                "Leave it out, or see `model.named_modules()`.",
            )
        if self.small_batch not in ("auto", "half"):
            raise Refusal(
                "cut",
                f'be None with `small_batch="{self.small_batch}"`',
                f"{cut!r}: only halves of a batch are separated at a cut",
                "Leave `small_batch` out.",
            )
        return names

    def check_unit_is_counted(self, batch_size_fn: object) -> None:
        """Raise a Refusal if batches are counted in tokens, and no function counts them."""
        if batch_size_fn is None and self.counts_tokens:
            raise Refusal(
                "unit",
                "come with `batch_size_fn` if it is tokens",
                f"{self.unit!r} alone, and the rows of a batch are counted without a function",
                'Pass a function from a batch to the number of its tokens, or `unit="sequences"`.',
            )

    @property
    def counts_tokens(self) -> bool:
        """Whether the unit is tokens, of which a row has several."""
        return self.unit.lower() in ("token", "tokens")

    @property
    def names_of_extra(self) -> str:
        """The names of the extra measurements, for messages."""
        return ", ".join(getattr(one, "__name__", repr(one)) for one in self.extra) or "none"
