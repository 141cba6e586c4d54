# SPDX-License-Identifier: Apache-2.0
"""The figures of a sweep: those of a comparison of its trainings."""

from __future__ import annotations

from collections.abc import Sequence

from noisescale.lab.compare import figures
from noisescale.lab.compare.compare_trials import compare_trials
from noisescale.lab.sweep.sweep_record import SweepRecord
from noisescale.report.document import Figure


def figures_of(found: SweepRecord) -> Sequence[Figure]:
    """Return the figures of the trainings that have an evaluation: none without such a training."""
    trials = [outcome.trial for outcome in found.outcomes]
    if not trials:
        return ()
    return figures.figures_of(compare_trials(trials, found.job.goal, clock="steps"))
