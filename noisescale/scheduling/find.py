# SPDX-License-Identifier: Apache-2.0
"""Find the best batch size for the examples of a run, from what the run itself shows."""

from __future__ import annotations

import math
from typing import Any

from noisescale.estimation.noise_scale import NoiseScale, three_digits
from noisescale.plan import Plan
from noisescale.scheduling.gate import Gate
from noisescale.scheduling.policies import TradeoffRule
from noisescale.scheduling.policy import Policy, Progress, Wanted
from noisescale.tradeoff.budget import (
    BEGINS,
    LAST,
    LIKELY,
    WIDTH,
    best_batch_size,
    blind_batch_size,
    critical_batch_size_at,
    slice_of,
)

FIRST = 0.5
"""What a run begins with, as a share of the batch size by its examples.

Until the decision too small a batch costs few steps, and too large a one costs loss that the rest
of the run does not make good, most of all where training is hardly stable.
"""

MEASURED, DECIDES, DECIDED = -8, 5, LAST
"""The slices from which on the learning rate may follow a noise scale, and with which decisions
begin and end. They begin at 1.0, 13.6 and 36.9 % of the run."""

WITHIN = 8.0
"""The largest factor between the batch size that is decided on and the one by the examples."""

LEAST_FACTOR = 1.25
"""The least factor of a move by a decision."""

FAR_ABOVE = 4.0
"""A batch so many times too large may train at a learning rate that stability bounds."""


class Find(Policy):
    """Find the best batch size for the examples of a run, whatever it starts with.

    - From the first step on half of `blind_batch_size`, so that a run of 100,000 examples has a
      batch of 50; at most 8 times the start.
    - From 13.6 % to 36.9 % of the run, six times, towards `best_batch_size`: the geometric mean of
      the estimates so far, within a factor of 8 of `blind_batch_size`.
    - Then it stays.

    Without the noise scale, or the slope of a loss that is a cross-entropy, the first batch size is
    kept. A run that optimizer steps end keeps its own batch size, and so does one of so few
    examples that the first batch size would be below 1. In a run without a known end it is
    `TradeoffRule` behind a `Gate`: only there may steps be paid for with examples.

    Examples:
        >>> start = Progress(0, 0.0, share=0.0, examples_of_run=200_000.0)
        >>> float(Find()(NoiseScale.unknown(), Plan(32, 1), start))
        100.0
    """

    _saved = ("_asked", "_logs", "_examples")
    needs_noise_scale = by_reduced_values = far_below_critical = True
    logged = ("best", "best_low", "best_high")

    def __init__(self) -> None:
        self._asked = -math.inf
        """The slice of the run in which it was asked last."""
        self._logs: tuple[float, ...] = ()
        """Logarithms of the estimates of the best batch size so far."""
        self._examples: float | None = None
        """Examples of the run, since the first estimate."""
        self._kept = False
        """Whether there is nothing to decide in this run; another one that goes on asks anew."""
        self._without_end = Gate(TradeoffRule())

    @property
    def needs_loss(self) -> bool:
        """Whether the last decision is still to come."""
        return not self.done

    @property
    def done(self) -> bool:
        """Whether the last decision is over, or there is none."""
        return self._kept or self._asked >= DECIDED

    @property
    def metrics(self) -> dict[str, float]:
        """The best batch size so far, with the ends of its band."""
        if not self._logs:
            return {}
        best = math.exp(sum(self._logs) / len(self._logs))
        return dict(zip(self.logged, (best, best / LIKELY, best * LIKELY), strict=True))

    def note(self, plan: Plan, progress: Progress) -> str | None:
        """Say where it is another policy, and where the learning rate given is no guide."""
        if progress.share is None:
            return 'as the share of the run that is over is not known, the policy is "tradeoff"'
        examples, now = progress.examples_of_run, float(plan.batch_size)
        if examples is None or _reason_to_keep(examples):
            return None  # it is said at the end
        if now <= FAR_ABOVE * (blind := blind_batch_size(examples)):
            return None
        return (
            f"the batch size of {three_digits(now)} is far above {three_digits(blind)}, which fits"
            f" a run of {examples:,.0f} examples, so the learning rate is no guide to a smaller"
            " one: search for one there"
        )

    def take(self, wanted: float) -> None:
        """Go on from an answer."""
        super().take(wanted)
        self._kept = isinstance(wanted, _Kept)

    def state_dict(self) -> Any:
        """Return what resuming needs: where nothing was to be decided, it is asked anew."""
        return super().state_dict() | ({"asked": -math.inf} if self._kept else {})

    def due(self, share: float | None) -> bool | None:
        """Return whether to ask now: at the first step, and as slices of the run begin."""
        return None if share is None else self._asked < min(_slice(share), DECIDED)

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return the wanted batch size with a reason; the plan's own batch size to stay."""
        now, share = float(plan.batch_size), progress.share
        if share is None:
            return self._without_end(noise_scale, plan, progress)
        examples = self._examples or progress.examples_of_run
        number = _slice(share)
        state: dict[str, Any] = {"asked": number, "logs": self._logs, "examples": self._examples}
        if (why := _reason_to_keep(examples)) or examples is None:
            return _Kept(now, why or "", state)
        by_examples = blind_batch_size(examples)
        first, most = FIRST * by_examples, WITHIN * (progress.first_batch_size or now)
        least = _least_batch_size(examples, plan, progress)
        why = f"by the run's {examples:,.0f} examples"
        if first > most:
            first, why = most, f"{WITHIN:g} times the batch size at the start"
        if first < least:
            first, why = least, f"by the run's limit of {progress.most_steps:,.0f} steps"
        if number < DECIDES:
            if 1 / LEAST_FACTOR < first / now < LEAST_FACTOR and now >= least:
                first = now
            decides = f"{100 * BEGINS * math.exp(WIDTH * DECIDES):.0f} %"
            return Wanted(first, f"for now, {why}; it decides at {decides} of the run", state)
        known = noise_scale.value if noise_scale.resolved else noise_scale.low
        slope = progress.loss_slope if number <= DECIDED else math.nan
        if slope > 0 and known > 0:
            r = critical_batch_size_at(known, share)
            found = best_batch_size(examples, r, slope)
            found = min(max(found, by_examples / WITHIN), by_examples * WITHIN)
            found = max(found, least)
            state |= {"logs": (*self._logs, math.log(found)), "examples": examples}
        logs = state["logs"]
        if not logs:
            if number > DECIDED:
                return Wanted(now, "no step began in the part of the run where it decides", state)
            missing = "slope of a cross-entropy is not known"
            if slope < 0:
                missing = "training loss does not fall"
            elif not known > 0:
                missing = "noise scale is not known"
            return Wanted(now, f"{why} alone: the {missing}", state)
        best = math.exp(sum(logs) / len(logs))
        why = (
            f"best batch for this budget about {three_digits(best)}"
            f" ({three_digits(best / LIKELY)} to {three_digits(best * LIKELY)})"
        )
        if 1 / LEAST_FACTOR < best / now < LEAST_FACTOR:
            return Wanted(now, why, state)
        return Wanted(best, why, state)


class _Kept(Wanted):
    """An answer in a run in which there is nothing to decide."""


def _slice(share: float) -> float:
    """Return the slice of a share; all before the noise scale counts are one."""
    return max(slice_of(share), MEASURED - 1)


def _reason_to_keep(examples: float | None) -> str | None:
    if examples is None:
        return "the examples of the run are not known, as a number of optimizer steps ends it"
    too_short = FIRST * blind_batch_size(examples) < 1
    return f"a run of {examples:,.0f} examples is too short to find another" if too_short else None


def _least_batch_size(examples: float, plan: Plan, progress: Progress) -> float:
    """Return the least batch size, in whole micro-batches, with which the examples fit the steps.

    It is 0 where no number of steps limits the run.
    """
    if math.isinf(progress.most_steps):
        return 0.0
    micro_batches = float(plan.device_batch_size * plan.devices)
    return micro_batches * math.ceil(examples / progress.most_steps / micro_batches - 1e-9)
