# SPDX-License-Identifier: Apache-2.0
"""Reduced steps on their way into the averages, and why some are left out."""

from __future__ import annotations

from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import MeasuredStep
from noisescale.guard import WarnOnce
from noisescale.meter.counts import Counts
from noisescale.meter.estimates import Estimates


class Intake:
    """Takes steps into the averages, or leaves them out, and says once why.

    Args:
        estimates: The averages.
        counts: Of the same run.
        nothing_to_compare: The warning where a step has one small batch alone.
        least_coverage: Share of |g|² that has to be measured.
    """

    def __init__(
        self, estimates: Estimates, counts: Counts, nothing_to_compare: str, least_coverage: float
    ) -> None:
        self._estimates = estimates
        self._counts = counts
        self._nothing_to_compare = nothing_to_compare
        self._least_coverage = least_coverage
        self._warn = WarnOnce()

    def take(self, step: MeasuredStep, coverage: float) -> None:
        """Take in a step. `coverage`: the share of its |g|² that is measured."""
        counts, norms = self._counts, step.norms
        counts.examples += step.unmeasured_examples
        counts.examples += norms.examples
        counts.batch_size = norms.examples
        if self._is_sound(norms, coverage) and self._estimates.update(
            norms.moments(), [entry.moments() for entry in step.entries], weight=norms.examples
        ):
            counts.measured_steps += 1
        else:
            counts.skipped_steps += 1

    def _is_sound(self, norms: StepNorms, coverage: float) -> bool:
        """Whether it tells the noise; where the user can do something about it, warn."""
        if not norms.comparable:
            if norms.alone and self._estimates.whole.steps == 0:
                self._warn(self._nothing_to_compare)
        elif norms.identical_parts:
            self._warn(
                "All ranks or micro-batches had one and the same gradient: such steps are not"
                " measured. Give each its own examples, ranks by a `DistributedSampler`. What is"
                " drawn at random (the input of a generator) needs a seed of its own on each rank."
            )
        elif not coverage >= self._least_coverage:
            self._warn(
                "Single examples can be told apart only in layers with less than"
                f" {self._least_coverage:.0%} of |g|²: such steps are not measured, as the rest may"
                " have another noise. Compare ranks, micro-batches, or in one process halves of"
                ' each batch: `small_batch="auto"`.'
            )
        else:
            return True
        return False
