# SPDX-License-Identifier: Apache-2.0
"""The results of a meter: its averages and its counts, updated when they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from noisescale.collectors.changes import ReducedChanges, hooks_on
from noisescale.collectors.collector import Collector
from noisescale.collectors.per_example.coverage import LEAST_COVERAGE
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import MeasuredStep, Unread
from noisescale.estimation.along_gradient import AlongGradient
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.pair_shares import PairShares
from noisescale.guard import WarnOnce
from noisescale.meter.cadence import COST_OF_DECISIONS, NOTHING, OPENING, Cadence, Due, Spent
from noisescale.meter.capture import StepCapture
from noisescale.meter.estimates import Estimates, MomentSums
from noisescale.meter.options import MeterOptions


@dataclass
class Counts:
    """The counts of a meter, under the names that its `state_dict` uses."""

    steps: int = 0
    last_measured_step: int = 0
    measured_steps: int = 0
    skipped_steps: int = 0
    examples: float = 0.0
    unmeasured_examples: float = 0.0
    """This rank's examples since the last measured step."""
    batch_size: float = math.nan
    accumulation: int = 1
    lone_since: int | None = None
    lone_steps: int = 0
    """Measured steps since `lone_since`."""
    spent: Spent | None = NOTHING
    """The cost of measuring; None: not known, as an earlier version did not save it."""

    def close_measured(self, micro_batches: int, *, least: int) -> None:
        """Count the measured step that was just taken; it needs `least` micro-batches."""
        self.unmeasured_examples = 0.0
        self.last_measured_step = self.steps
        self.accumulation = micro_batches or self.accumulation
        if micro_batches >= least:
            self.lone_since, self.lone_steps = None, 0
            return
        self.lone_steps += 1
        if self.lone_since is None:
            self.lone_since = self.steps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from all counts in a state; raise a KeyError if one is missing."""
        for name in vars(self):
            if name in state and name != "spent":
                setattr(self, name, state[name])
            elif name not in ("measured_steps", "lone_since", "lone_steps", "spent"):
                raise KeyError(name)  # the others have been saved from the beginning
        self.spent = Spent(*spent) if (spent := state.get("spent")) else None


class MeterReadings:
    """The averages and counts of a meter. Captured steps are added when a result is read.

    Args:
        capture: The capture of the steps.
        collector: The collector that captures them.
        options: The options of the meter.
    """

    def __init__(self, capture: StepCapture, collector: Collector, options: MeterOptions) -> None:
        self._capture = capture
        self._cadence = Cadence(options.every_n_steps, options.cost)
        self._options = options
        self._counts = Counts()
        self._estimates = Estimates(collector.norms.group_names, options)
        self._pair_shares = PairShares()
        self._persistence = 0.0
        """Of the momentum, as it was last."""
        self._warn = WarnOnce()
        self._nothing_to_compare = collector.nothing_to_compare
        self._same_gradient = collector.same_gradient
        self._least_coverage = 0.0 if options.layers == "normalization" else LEAST_COVERAGE
        self._coverage_at_close = 1.0
        self._device = collector.device
        self.suspects: list[str] = []
        """What else may write to gradients, for warnings."""

    @property
    def noise_scale(self) -> NoiseScale:
        """The noise scale now. Reads the device: use it when you log, not at every step."""
        return self.noise_scale_at(self._options.confidence)

    def noise_scale_at(self, confidence: float) -> NoiseScale:
        """Return the noise scale now with an interval of another confidence. Reads the device."""
        self._settle()
        return self._estimates.whole.estimate(self._counts.steps, confidence=confidence)

    def follow(self, confidence: float = 0.95) -> None:
        """Measure for decisions. Call it before the first step.

        Unless a `cost` was given, more steps are then measured, as decisions wait for them.

        Args:
            confidence: Coverage of the interval of `noise_along_gradient`.
        """
        if self._estimates.along_gradient is not None:
            self._estimates.along_gradient = AlongGradient(confidence, self._options.unit)
        if self._options.cost is None:
            self._cadence = Cadence(self._options.every_n_steps, COST_OF_DECISIONS)

    @property
    def average_moments(self) -> GradientMoments | None:
        """|G|² and tr(Σ), averaged over the run; None before its first step. See `RunAverage`."""
        self._settle()
        return self._estimates.run.mean

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """The noise scale now of each of `groups`."""
        self._settle()
        now = self._counts.steps
        return {name: group.estimate(now) for name, group in self._estimates.groups.items()}

    @property
    def preconditioned_noise_scale(self) -> NoiseScale | None:
        """The noise scale of g/(√v̂ + ε); None without a `preconditioner`.

        tr(Σ)/|G|² of the gradient as Adam scales it, in `unit`. It is not B_simple: the
        documentation says what is known about it.
        """
        self._settle()
        of_adam = self._estimates.preconditioned
        return None if of_adam is None else of_adam.estimate(self._counts.steps)

    @property
    def noise_along_gradient(self) -> NoiseScale | None:
        """G'ΣG/|G|⁴ of the last steps, in `unit`; None without `momentum`.

        At this batch size the noise along the gradient is as large as the gradient. It is measured
        along the optimizer's momentum, and unknown where momentum does not point along the
        gradient, see `AlongGradient`.
        """
        along = self._estimates.along_gradient
        if along is None:
            return None
        self._settle()
        collector = self._capture.collector
        if collector is not None and collector.norms.momentum is not None:
            self._persistence = collector.norms.momentum.persistence
        whole = self.noise_scale_at(along.confidence)
        return along.estimate(whole, self._persistence, self._counts.steps)

    @property
    def measures_along_gradient(self) -> bool:
        """Whether there is a `momentum`. Reads nothing."""
        return self._options.along_gradient

    @property
    def steps(self) -> int:
        """Optimizer steps so far, measured or not."""
        return self._counts.steps

    @property
    def last_measured_step(self) -> int:
        """Optimizer steps up to the last measured one. Their examples are counted."""
        return self._counts.last_measured_step

    @property
    def skipped_steps(self) -> int:
        """Measured steps that were left out: a gradient was not finite, or had no counterpart."""
        self._settle()
        return self._counts.skipped_steps

    @property
    def measured_steps(self) -> int:
        """Measured steps in the averages, without those that were left out."""
        self._settle()
        return self._counts.measured_steps

    @property
    def measuring_cost(self) -> float:
        """The cost of measuring so far, in steps that are not measured.

        It is computed from a constant for each way of measuring, `Collector.cost`, not timed.
        """
        spent = self._counts.spent
        return math.nan if spent is None else spent.budget + spent.opening

    @property
    def lone_since(self) -> int | None:
        """The step since which measured steps had too few micro-batches; None: the last had enough.

        Such steps are left out, as there is nothing to compare. See `least_micro_batches`.
        """
        return self._counts.lone_since

    @property
    def examples(self) -> float:
        """Examples processed by all ranks, up to the last measured step."""
        self._settle()
        return self._counts.examples

    @property
    def unmeasured_examples(self) -> float:
        """Examples since the last measured step, if all ranks have as many as this one."""
        return self._counts.unmeasured_examples * self.devices

    @property
    def batch_size(self) -> float:
        """Global batch size of the last measured step, in examples; NaN before it."""
        self._settle()
        return self._counts.batch_size

    @property
    def coverage(self) -> float:
        """The share of |g|² in parameters that are measured. Reads the device.

        It is below 1 only with `small_batch="example"`, if some layers have no formula. Steps with
        a share below 0.9 are left out, unless you chose `layers="normalization"`.
        """
        collector = self._capture.collector
        return self._coverage_at_close if collector is None else collector.coverage

    @property
    def sums(self) -> MomentSums:
        """Sums over the measured steps so far. Their differences describe any part of a run."""
        self._settle()
        return self._estimates.sums

    def take_increments(self) -> dict[str, float]:
        """Return the measurements since the last call, for a row of a `History`."""
        self._settle()
        return self._estimates.increments.take()

    @property
    def accumulation(self) -> int:
        """Micro-batches (backward passes) of this rank in the last measured step."""
        return self._counts.accumulation

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches that a step needs to be measured; 2 if one process compares them."""
        collector = self._capture.collector
        return 1 if collector is None else collector.least_micro_batches

    @property
    def device(self) -> torch.device:
        """Where the norms of gradients are. Once the meter is closed, where they were."""
        if self._capture.collector is not None:
            self._device = self._capture.collector.device
        return self._device

    @property
    def devices(self) -> int:
        """Ranks that train together."""
        return self._capture.unread.ranks

    @property
    def lone_steps(self) -> int:
        """Measured steps since `lone_since`."""
        return self._counts.lone_steps

    def _next_due(self, cost: float) -> Due:
        """Whether the step after those counted is to be measured, at that cost in plain steps."""
        counts, cadence = self._counts, self._cadence
        if counts.spent is None:  # as if it had been within the budget
            counts.spent = Spent(
                cadence.budget(counts.steps, cost), 0.0, counts.measured_steps, OPENING
            )
        return cadence.due(counts.steps + 1, counts.spent, cost)

    def _settle(self, *, alone: bool = False) -> None:
        """Take in the steps that have been reduced."""
        capture = self._capture
        beside: Sequence[Unread] = ()
        if not alone and capture.collector is not None:
            beside = (capture.terms, *capture.collector.beside_rows)
        steps = list(capture.unread.read(without_waiting=alone, beside=beside))
        if steps and not alone:
            capture.terms.settle()
        coverage = self.coverage if steps else 1.0
        for step in steps:
            self._take(step, coverage)

    @property
    def _suspects(self) -> list[str]:
        collector = self._capture.collector
        if collector is None:
            return self.suspects
        named = zip(collector.norms.names, collector.norms.parameters, strict=True)
        return [*self.suspects, *hooks_on(named)]

    def _take(self, step: MeasuredStep, coverage: float) -> None:
        """Take a step into the averages, or leave it out."""
        counts, norms = self._counts, step.norms
        counts.examples += step.unmeasured_examples
        counts.examples += norms.examples
        counts.batch_size = norms.examples
        self._estimates.step += 1 + step.unmeasured_steps
        sound, share = self._is_sound(norms, step.changes, coverage), None
        if sound and norms.weighted and norms.big_batch == norms.examples:  # no mean of means
            share = self._pair_shares.mean(norms.examples, norms.pair_share)
        if sound and self._estimates.update(
            norms.moments(share),
            [entry.moments(share) for entry in step.entries],
            weight=norms.examples,
            steps=1 + step.unmeasured_steps,
        ):
            counts.measured_steps += 1
        else:
            counts.skipped_steps += 1

    def _is_sound(self, norms: StepNorms, changes: ReducedChanges, coverage: float) -> bool:
        """Whether a step shows the noise; warn if it does not and the user can change that."""
        capture, cause = self._capture, changes.cause
        if changes.checked:
            capture.note_check(clean=cause is None)
        if cause is not None:
            self._warn(changes.told(cause, capture.gone, self._suspects), about=cause)
        elif norms.bad_weights:
            self._warn(
                "The weights of a step were all zero, negative or not finite, or only some ranks"
                " gave weights. Such steps are not measured. Give each pass on each rank the number"
                " of tokens, or of other terms, in the mean that the loss is."
            )
        elif norms.lacks_losses:
            self._warn(
                "Many rows of a batch have no loss (labels of -100, boxes without a positive, a"
                " hinge that is satisfied), and their weights are not known. The halves of such a"
                " batch may show |G|² wrong by more than 5 %, so such steps are not measured. Pass"
                " `weight_fn` (or `weight` to the meter): a tensor with the weight of each row in"
                " the mean, which is its positives or tokens, or 1 for each row of a plain mean."
            )
        elif not norms.comparable:
            if norms.alone and norms.weighted and self._counts.lone_since is None:
                self._warn(
                    "One part of a step had all of the weight, so there is nothing to compare it"
                    " with. Such steps are not measured."
                )
            elif norms.alone and self._counts.measured_steps == 0:
                self._warn(self._nothing_to_compare)
        elif norms.identical_parts:
            self._warn(self._same_gradient)
        elif not coverage >= self._least_coverage:
            self._warn(
                "There are formulas for single examples only in layers with less than"
                f" {self._least_coverage:.0%} of |g|². Such steps are not measured, as the other"
                " layers may have another noise scale. Compare ranks, micro-batches, or in one"
                ' process the halves of each batch: `small_batch="auto"`.'
            )
        else:
            return True
        return False
