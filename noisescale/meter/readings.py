# SPDX-License-Identifier: Apache-2.0
"""What a meter has measured, as it is read."""

from __future__ import annotations

from noisescale.collectors.collector import Collector
from noisescale.collectors.per_example.coverage import LEAST_COVERAGE
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.recent import RecentSteps
from noisescale.meter.cadence import Cadence
from noisescale.meter.capture import StepCapture
from noisescale.meter.counts import Counts
from noisescale.meter.estimates import Estimates, MomentSums
from noisescale.meter.intake import Intake
from noisescale.meter.options import MeterOptions


class MeterReadings:
    """The averages and counts of a meter. Steps are taken into them when somebody asks.

    Args:
        capture: Of the steps.
        collector: That it has capture them.
        options: Of the meter.
    """

    def __init__(self, capture: StepCapture, collector: Collector, options: MeterOptions) -> None:
        self._capture = capture
        self._cadence = Cadence(options.every_n_steps)
        self._counts = Counts()
        self._estimates = Estimates(collector.norms.group_names, options)
        self._intake = Intake(
            self._estimates,
            self._counts,
            collector.nothing_to_compare,
            0.0 if options.layers == "normalization" else LEAST_COVERAGE,
        )

    @property
    def noise_scale(self) -> NoiseScale:
        """The latest estimate. Reads the device: ask when you log, not at every step."""
        self._settle()
        return self._estimates.whole

    def follow(self, confidence: float = 0.95) -> None:
        """Keep the last steps from now on, for `recent_noise_scale`; call it before the first."""
        if self._estimates.recent is None:
            unit = self._estimates.whole.unit
            self._estimates.recent = RecentSteps(confidence=confidence, unit=unit)

    @property
    def recent_noise_scale(self) -> NoiseScale:
        """That of as few of the last steps as suffice, see `RecentSteps`: to decide upon.

        Raises:
            RuntimeError: If `follow` has not been called.
        """
        self._settle()
        if self._estimates.recent is None:
            raise RuntimeError("The last steps are not kept. Call `follow()` before training.")
        return self._estimates.recent.estimate()

    @property
    def average_moments(self) -> GradientMoments | None:
        """|G|² and tr(Σ) averaged over the run, steps weighted by their batch; None before it."""
        return self.sums.mean

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """The latest estimate for each of `groups`."""
        self._settle()
        return self._estimates.groups

    @property
    def preconditioned_noise_scale(self) -> NoiseScale | None:
        """The noise scale of g/(√v̂ + ε), see `preconditioner`; None where there is none.

        tr(Σ)/|G|² of the gradient as Adam scales it, in `unit`. It is not B_simple: the
        documentation tells what is known about it.
        """
        self._settle()
        return self._estimates.preconditioned

    @property
    def steps(self) -> int:
        """Optimizer steps so far, measured or not."""
        return self._counts.steps

    @property
    def last_measured_step(self) -> int:
        """Optimizer steps up to the last measured one: those whose examples are counted."""
        return self._counts.last_measured_step

    @property
    def skipped_steps(self) -> int:
        """Measured steps left out: a gradient was not finite, or had nothing to compare with."""
        self._settle()
        return self._counts.skipped_steps

    @property
    def measured_steps(self) -> int:
        """Measured steps that are in the averages: those that were not left out."""
        self._settle()
        return self._counts.measured_steps

    @property
    def lone_since(self) -> int | None:
        """The step since which all measured ones had too few micro-batches; None: the last had not.

        See `least_micro_batches`: such steps are left out, as there is nothing to compare.
        """
        return self._counts.lone_since

    @property
    def examples(self) -> float:
        """Examples processed by all ranks, up to the last measured step."""
        self._settle()
        return self._counts.examples

    @property
    def batch_size(self) -> float:
        """Global batch size of the last measured step, in examples; NaN before it."""
        self._settle()
        return self._counts.batch_size

    @property
    def coverage(self) -> float:
        """Share of |g|² that is of parameters which are measured. Reads the device.

        Below 1 with `small_batch="example"` alone, where some layers have no formula. Below 0.9
        steps are left out, unless `layers="normalization"` was asked for.
        """
        return self._capture.coverage

    @property
    def sums(self) -> MomentSums:
        """Sums over the measured steps so far: differences tell of any stretch of a run."""
        self._settle()
        return self._estimates.sums

    def take_increments(self) -> dict[str, float]:
        """Return what was measured since the last call, for a row of a `History`."""
        self._settle()
        return self._estimates.increments.take()

    @property
    def accumulation(self) -> int:
        """Micro-batches (backward passes) of this rank in the last measured step."""
        return self._counts.accumulation

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches that a step needs to be measured; 2 where one process compares them."""
        return self._capture.least_micro_batches

    @property
    def devices(self) -> int:
        """Ranks that train together."""
        return self._capture.unread.ranks

    @property
    def every_n_steps(self) -> int:
        """One step in so many is measured, as things are: "auto" goes by what a step costs."""
        return self._cadence.every_n_steps(takes_a_pass=self._capture.takes_a_pass)

    def _settle(self, *, alone: bool = False) -> None:
        """Take in the steps that have been reduced."""
        steps = list(self._capture.unread.read(without_waiting=alone))
        coverage = self.coverage if steps else 1.0
        for step in steps:
            self._intake.take(step, coverage)
