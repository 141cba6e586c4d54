# SPDX-License-Identifier: Apache-2.0
"""Find the best batch size for the examples of a run, from what the run itself shows."""

from __future__ import annotations

import math
from typing import Any

from noisescale.estimation.noise_scale import NoiseScale, three_digits
from noisescale.plan import Plan
from noisescale.scheduling.policy import Policy, Progress, Wanted
from noisescale.scheduling.training_loss import BEGINS, WIDTH, slice_of

BLIND_STEPS = 1000
"""The steps that a run has at the batch size that is taken before anything is measured."""

CAP = 0.15
"""The largest batch before the decision, as a share of the critical batch size of the run."""

KAPPA = 0.03
"""B* = √(E/1000 · KAPPA·r/σ), see `best_batch_size`."""

MEASURED, DECIDES, DECIDED = -8, 5, 10
"""The slices from which on the noise scale counts, and with which decisions begin and end.

They begin at 1.0, 13.6 and 36.9 % of the run.
"""

WITHIN = 8.0
"""The largest factor between the batch size that is decided on and the blind one."""

LEAST_FACTOR, LEAST_CAP = 1.25, 1.5
"""The least factor of a move by a decision, and by the cap before it."""

LIKELY = 2.0
"""The factor within which the best batch size is, in most runs."""


def critical_batch_size_at(noise_scale: float, share: float) -> float:
    """Return the critical batch size of a run from the noise scale at a share of it, up to a third.

    It is 2.1 times the noise scale at a tenth of the run. The noise scale rises as the square root
    of the share.
    """
    return 2.1 * noise_scale * math.sqrt(0.1 / share)


def best_batch_size(examples: float, critical_batch_size: float, slope: float) -> float:
    """Return B*, the largest fixed batch size that costs a run next to no loss.

    It is the geometric mean of two estimates: a thousandth of the run, and KAPPA·r/σ. A batch B
    loses the share B/r of the progress of its examples, r being the critical batch size, and what
    is lost is worth σ = -d ln L/d ln E times that in the logarithm of the loss.

    Args:
        examples: Of the whole run.
        critical_batch_size: r.
        slope: σ.

    Examples:
        >>> round(best_batch_size(200_000, 400.0, slope=0.1))
        155
    """
    return math.sqrt(examples / BLIND_STEPS * KAPPA * critical_batch_size / slope)


class Find(Policy):
    """Find the best batch size for the examples of a run, whatever it starts with.

    - From the first step on a thousandth of the run.
    - From 1 % of the run at most a share of the critical batch size, as far as it is known.
    - From 13.6 % to 36.9 % of the run, six times, towards `best_batch_size`: the geometric mean of
      the estimates so far, within a factor of 8 of a thousandth of the run.
    - Then it stays.

    It needs a run that examples or epochs end, and a loss that is a cross-entropy. Without the
    slope of the loss or the noise scale a thousandth of the run is kept.

    Examples:
        >>> start = Progress(0, 0.0, share=0.0, examples_of_run=200_000.0)
        >>> float(Find()(NoiseScale.unknown(), Plan(32, 1), start))
        200.0
    """

    _saved = ("_asked", "_logs", "_examples")
    needs_noise_scale = by_reduced_values = True

    def __init__(self) -> None:
        self._asked = -math.inf
        """The slice of the run in which it was asked last."""
        self._logs: tuple[float, ...] = ()
        """Logarithms of the estimates of the best batch size so far."""
        self._examples: float | None = None
        """Examples of the run, since the first estimate."""

    @property
    def needs_loss(self) -> bool:
        """Whether the last decision is still to come."""
        return self._asked < DECIDED

    def due(self, share: float | None) -> bool:
        """Return whether to ask now: at the first step, and as slices of the run begin."""
        return share is not None and self._asked < _slice(share) <= DECIDED

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return the wanted batch size with a reason; the plan's own batch size to stay."""
        now, share = float(plan.batch_size), progress.share
        examples = self._examples or progress.examples_of_run
        number = _slice(share or 0.0)
        state: dict[str, Any] = {"asked": number, "logs": self._logs, "examples": self._examples}
        if share is None or examples is None:
            return Wanted(now, "the examples of the run are not known", state)
        blind = examples / BLIND_STEPS
        if number < MEASURED:
            decides = 100 * BEGINS * math.exp(WIDTH * DECIDES)
            why = f"for now (a thousandth of the run); decides at {decides:.0f} % of it"
            return Wanted(blind, why, state)
        known = noise_scale.value if noise_scale.resolved else noise_scale.low
        if number < DECIDES:
            r = critical_batch_size_at(noise_scale.high, share)
            most = max(CAP * r, blind / WITHIN)
            if now > LEAST_CAP * most:
                why = f"at most {CAP:g} of the critical batch size so far, {three_digits(r)}"
                return Wanted(most, why, state)
            return Wanted(now, "it is decided later", state)
        slope = progress.loss_slope
        if slope > 0 and known > 0:
            r = critical_batch_size_at(known, share)
            found = best_batch_size(examples, r, slope)
            found = min(max(found, blind / WITHIN), blind * WITHIN)
            state |= {"logs": (*self._logs, math.log(found)), "examples": examples}
        logs = state["logs"]
        if not logs:
            missing = "slope of the loss" if known > 0 else "noise scale"
            return Wanted(now, f"the {missing} is not known", state)
        best = math.exp(sum(logs) / len(logs))
        why = (
            f"best batch for this budget about {three_digits(best)}"
            f" ({three_digits(best / LIKELY)} to {three_digits(best * LIKELY)})"
        )
        if 1 / LEAST_FACTOR < best / now < LEAST_FACTOR:
            return Wanted(now, why, state)
        return Wanted(best, why, state)


def _slice(share: float) -> float:
    """Return the slice of a share; all before the noise scale counts are one."""
    return max(slice_of(share), MEASURED - 1)
