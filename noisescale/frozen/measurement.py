# SPDX-License-Identifier: Apache-2.0
"""What `measure` found: the noise scale at fixed weights, and how this model can be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from noisescale.bounded import Bounded
from noisescale.estimation.independent_batches import IndependentBatches
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.frozen.comparison import Comparison, Judgement
from noisescale.history.history import History
from noisescale.history.optimizers import OptimizerKind, OptimizerMix
from noisescale.prediction.theory import theory_band


@dataclass(frozen=True)
class Way:
    """A way of measuring in training, judged by independent batches."""

    name: str
    """"half", "micro_batch" or "rank"."""
    comparison: Comparison | None
    """tr(Σ) by this way, over that of independent batches, is near 1. None: nothing is measured."""
    reason: str = ""
    """Why it measures nothing, or is right without a comparison."""
    by_construction: bool = False
    """Whether it compares what was compared here."""

    @property
    def judgement(self) -> Judgement:
        """Whether it measures right."""
        if self.comparison is not None:
            return self.comparison.judgement
        return "yes" if self.by_construction else "no"


@dataclass(frozen=True)
class Order:
    """Whether the batches of the loader are independent draws."""

    at_random: bool
    """Whether a sampler of torch draws each example at random."""
    successive: Comparison | None = None
    """tr(Σ) of two successive batches over that of all of them. None if drawn at random."""
    shuffled: Comparison | None = None
    """tr(Σ) of the loader's batches over that of shuffled ones, where that was measured."""
    near: Comparison | None = None
    """tr(Σ) of the first batches over that of batches far on in a stream, by all before them."""

    @property
    def independent(self) -> bool:
        """Whether successive batches are as far apart as others, as far as can be told."""
        if self.near is not None and self.near.judgement == "no":
            return False
        return self.successive is None or self.successive.judgement not in ("no", "probably not")


@dataclass(frozen=True)
class MeasurementRecord:
    """The fields of `Measurement`."""

    noise_scale: NoiseScale
    """The noise scale at these weights. `steps` is the number of batches."""
    groups: Mapping[str, NoiseScale]
    """The same of groups of parameters."""
    ways: Sequence[Way]
    """How this model can be measured in training."""
    order: Order
    batch_size: float
    """Examples in a batch, over all devices."""
    optimizer: OptimizerMix | None
    """What the module's optimizer is."""
    seconds: float
    """How long it took."""
    stopped: str
    """Why it ended, as a part of a sentence."""
    products: IndependentBatches = field(repr=False, compare=False)
    """What was kept of each batch."""
    drifts: bool
    """Whether the noise rises or falls along the batches: the weights are then not all there is."""
    step: int | None = None
    """The number of optimizer steps of the checkpoint; None without one."""
    checkpoint: str | None = None
    left_out: int = 0
    """Batches without a gradient, or with one that is not finite."""
    target: str = ""
    """What was measured, if it has a name."""
    mean: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The mean gradient by the name of the parameter, with `elementwise=True`."""
    variance: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The variance of each element of one example's gradient, with `elementwise=True`."""

    @property
    def critical_batch_size(self) -> Bounded:
        """The critical batch size of a training whose noise scale stayed as it is here.

        The bounds are those of the noise scale, widened by the errors that the theory had for this
        kind of optimizer.
        """
        found = self.noise_scale
        optimizer = self.optimizer or OptimizerMix(OptimizerKind.OTHER)
        band = theory_band(optimizer, decayed=False)
        return Bounded(found.value, found.low, found.high) * band.factor

    def cheap_up_to(self, critical: float) -> float:
        """Return the batch size that costs 1.2 x the examples of `batch_size`."""
        return 1.2 * (critical + self.batch_size) - critical


@dataclass(frozen=True)
class MeasuredRunRecord:
    """The fields of `MeasuredRun`."""

    measurements: tuple[MeasurementRecord, ...]
    """A measurement for each checkpoint, in the order of the steps."""
    history: History
    """A row for each, as the record has them. It is taken that the run trained at the batch size
    that was measured."""
    record: str
    """The folder of the record, which `predict` reads."""
