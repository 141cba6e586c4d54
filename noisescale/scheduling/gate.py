# SPDX-License-Identifier: Apache-2.0
"""Policies that move the batch size only as far as the noise scale's interval lets them."""

from __future__ import annotations

import math

from noisescale.checks import is_positive, require_positive
from noisescale.estimation.noise_scale import NoiseScale, three_digits
from noisescale.plan import Plan
from noisescale.refusal import Refusal
from noisescale.scheduling.policies import InsteadOfDecay, Rule, TradeoffRule
from noisescale.scheduling.policy import Policy, Progress, Wanted

HYSTERESIS = 1.5
"""The least factor of a move."""

DWELL_STEPS = 8
"""A move waits for this many steps at the current batch size, unless `min_dwell` is given."""


class Gate(Policy):
    """A policy that follows a rule, but ignores what could be chance.

    - The batch grows only if the rule asks for more at the *low* end of the interval, and shrinks
      only if it asks for less at the *high* end, in both cases by at least the factor `hysteresis`.
      The low end is known long before the noise scale itself, so a batch that is far too small
      grows within a few steps.
    - The new batch size is what the rule asks for at the noise scale, or at the low end if the
      noise scale is not resolved.
    - A move goes up by at most the factor `growth` and down by at most `shrink`. The noise scale of
      the first steps is far below the noise scale of the run, and at a batch far below it the rise
      is seen late.
    - After a move the gate waits for at least `min_dwell` examples.

    Args:
        rule: A rising function from a noise scale to a batch size.
        hysteresis: The least factor of a move.
        growth: The largest factor of a move upwards.
        shrink: The largest factor of a move downwards.
        min_dwell: Least examples between two moves. Default: those of 8 steps at the current batch
            size.

    Examples:
        >>> from noisescale.scheduling.policies import RatioRule
        >>> gate = Gate(RatioRule())
        >>> b = NoiseScale(100.0, 80.0, 130.0, grad_sq_norm=1.0, noise_trace=100.0, steps=50)
        >>> wanted = gate(b, Plan(32, 1), Progress(steps=50, examples=1600.0))
        >>> float(wanted), wanted.reason
        (100.0, 'noise scale 100 (80 to 130) asks for 100')
        >>> gate(b, Plan(80, 1), Progress(steps=60, examples=2400.0)).reason
        'noise scale 100 (80 to 130) agrees with 80'
    """

    needs_noise_scale = True
    by_reduced_values = True
    seen = "noise scale"
    """The name of the noise scale in reasons."""

    def __init__(
        self,
        rule: Rule,
        *,
        hysteresis: float = HYSTERESIS,
        growth: float = 4.0,
        shrink: float = 4.0,
        min_dwell: float | None = None,
    ) -> None:
        factors = {"hysteresis": hysteresis, "growth": growth, "shrink": shrink}
        for name, value in factors.items():
            if not (is_positive(value) and value > 1):
                raise Refusal(name, "be a factor above 1", repr(value))
            if value < hysteresis:
                raise Refusal(
                    name,
                    "be at least `hysteresis`",
                    f"{value!r} < {hysteresis!r}",
                    "No move would be large enough.",
                )
        if min_dwell not in (None, 0) and not is_positive(min_dwell):
            raise Refusal(
                "min_dwell",
                "be a number of examples or None",
                repr(min_dwell),
                "Leave it out for 8 steps.",
            )
        self.rule = rule
        self._hysteresis = hysteresis
        self._growth = growth
        self._shrink = shrink
        self._min_dwell = min_dwell

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return the wanted batch size with a reason; the plan's own batch size to stay."""
        now = float(plan.batch_size)
        dwell = DWELL_STEPS * now if self._min_dwell is None else self._min_dwell
        if progress.examples_since_move < dwell:
            return Wanted(now, "moved a short while ago")
        at_low = self.rule(noise_scale.low, plan, progress)
        at_high = self.rule(noise_scale.high, plan, progress)
        value = noise_scale.value if noise_scale.resolved else noise_scale.low
        # Averages of few steps whose parts weigh unequally may have a negative tr(Σ): no noise.
        asked = self.rule(max(value, 0.0), plan, progress)
        seen = f"{self.seen} {_describe(noise_scale)}"
        if at_low >= now * self._hysteresis or at_high <= now / self._hysteresis:
            least, most = now / self._shrink, now * self._growth
            limit = ""
            if asked > most:
                limit = f", {self._growth:g} x a move at most"
            elif asked < least:
                limit = f", 1/{self._shrink:g} a move at most"
            wanted = min(max(asked, least), most)
            return Wanted(wanted, f"{seen} asks for {three_digits(asked)}{limit}")
        return Wanted(now, f"{seen} agrees with {three_digits(now)}")


class BoundedSeesaw(InsteadOfDecay):
    """Grow where the run's own schedule lowers the learning rate, as far as the noise scale allows.

        B = max(B now, min(lift·√(r·b), E/least_steps) behind a gate,
                min(B0·lr_peak/lr, bound·√(r·b)))

    b is the noise scale now, and r the critical batch size of the run so far, as in `TradeoffRule`.
    E is the number of examples of the whole run. The schedule says when to grow. The noise scale
    lifts a batch that is far too small, and holds one that is large enough. The batch never
    shrinks.

    A lift costs loss where steps are few: the learning rate rises with it, above the peak that was
    given. So a run whose steps would be fewer than `least_steps` at the lifted batch size is lifted
    less. Where the schedule lowers the learning rate the batch may grow further.

    A run that has few steps has little to gain, and its batch may be too large already: a run of
    fewer than `shortest` steps keeps its batch size.

    While the noise scale is not resolved its lower bound is taken. Before it is measured the batch
    stays.

    Args:
        batch_size: B0, the global batch at the peak of the learning rate. Default: the batch
            size that the run starts with.
        lift: Up to what share of √(r·b) a small batch is lifted; 0: it is not.
        bound: Up to what multiple of √(r·b) the schedule lets the batch grow.
        least_steps: The fewest steps of the whole run, as if it had the lifted batch size from the
            start. Where the end of the run is not known, there is no such limit.
        shortest: The fewest steps, at B0, of a run whose batch size changes; 0: any run's does.

    Examples:
        >>> b = NoiseScale(400.0, 300.0, 500.0, grad_sq_norm=1.0, noise_trace=400.0, steps=50)
        >>> half = Progress(1000, 6.4e4, learning_rate=0.05, peak_learning_rate=0.1)
        >>> wanted = BoundedSeesaw(128)(b, Plan(128, 1), half)
        >>> float(wanted), wanted.reason
        (256.0, "the schedule's lr is 1/2 of its peak")
        >>> late = half._replace(learning_rate=0.01)
        >>> float(BoundedSeesaw(128)(b, Plan(128, 1), late))
        400.0

    References:
        Meterez et al. 2025, "Seesaw"; McCandlish et al. 2018, arXiv:1812.06162, appendix D.
    """

    _saved = ("_examples_at_lift",)
    needs_noise_scale = at_every_step = by_reduced_values = True

    def __init__(
        self,
        batch_size: float | None = None,
        *,
        lift: float = 0.5,
        bound: float = 1.0,
        least_steps: float = 2000,
        shortest: float = 1000,
    ) -> None:
        if shortest:
            require_positive("shortest", shortest, "Leave it at 1000; 0 sets no limit.")
        if lift and not 0 < lift <= bound:
            raise Refusal("lift", "lie between 0 and `bound`", repr(lift), "Leave it at 0.5.")
        if least_steps:
            require_positive("least_steps", least_steps, "Leave it at 2000; 0 sets no limit.")
        super().__init__(batch_size)
        self._rule = TradeoffRule()
        self._bound = require_positive("bound", bound, "Leave it at 1.")
        self._lift = Gate(TradeoffRule(share=lift), min_dwell=0) if lift else None
        self._least_steps, self._shortest = least_steps, shortest
        self._examples_at_lift = -math.inf

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return the wanted batch size with a reason; the plan's own batch size to stay."""
        now = float(plan.batch_size)
        scheduled = super().__call__(noise_scale, plan, progress)
        steps = _steps_of_run(self.at_peak(plan, progress), progress)
        if steps < self._shortest:
            return Wanted(now, f"a run of {three_digits(steps)} steps keeps it")
        known = noise_scale.value if noise_scale.resolved else noise_scale.low
        most = self._bound * self._rule(max(known, 0.0), plan, progress)
        found = Wanted(now, f"the noise scale holds it at {three_digits(now)}")
        if scheduled > most:
            reason = f"{scheduled.reason}, and the noise scale asks for {three_digits(most)}"
            scheduled = Wanted(most, reason)
        if scheduled > now:
            found = scheduled
        fresh = progress.noise_scale_age == 0
        dwelt = progress.examples - self._examples_at_lift >= DWELL_STEPS * now
        if self._lift is not None and fresh and dwelt:
            lifted = self._lift(noise_scale, plan, progress)
            highest = self._highest_lift(now, progress)
            if lifted > highest:
                fewest = f"{self._least_steps:,.0f} steps"
                reason = f"{lifted.reason}, but the run has {fewest} of {three_digits(highest)}"
                lifted = Wanted(highest, reason)
            if lifted > max(HYSTERESIS * now, found):
                state = {"examples_at_lift": progress.examples}
                found = Wanted(lifted, lifted.reason, state)
        return found

    def _highest_lift(self, now: float, progress: Progress) -> float:
        """Return the batch size with which the whole run would have the fewest steps allowed."""
        if not self._least_steps or progress.share is None:
            return math.inf
        if not progress.share:
            return now  # before the first step
        if progress.ends_by == "steps":
            return math.inf if progress.steps / progress.share >= self._least_steps else now
        return progress.examples / progress.share / self._least_steps


def _steps_of_run(batch_size: float, progress: Progress) -> float:
    """Return the steps of the whole run at a batch size; infinite if its end is not known."""
    if not progress.share:
        return math.inf
    if progress.ends_by == "steps":
        return progress.steps / progress.share
    return progress.examples / progress.share / batch_size


class Auto(BoundedSeesaw):
    """`BoundedSeesaw` in a run whose end is known; else `TradeoffRule` behind a `Gate`.

    A run of a known length cannot pay twice the fewest examples for its steps, as "tradeoff" does:
    what it pays is lost from its loss. Nor can its batch fall: while the gradients of all examples
    are nearly the same, b is so small that the run would end in steps of single examples. What
    costs no loss is to grow where the learning rate falls.

    Examples:
        >>> Auto().reason(Progress(0, 0.0, share=0.0, ends_by="examples"))
        'policy="auto" is "bounded_seesaw", as the run ends after a number of examples'
        >>> Auto().reason(Progress(0, 0.0))
        'policy="auto" is "tradeoff", as the end of the run is not known'
    """

    def __init__(self) -> None:
        super().__init__()
        self._tradeoff = Gate(TradeoffRule())

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return the wanted batch size with a reason; the plan's own batch size to stay."""
        if progress.share is not None:
            return super().__call__(noise_scale, plan, progress)
        if progress.noise_scale_age:
            return Wanted(plan.batch_size, "the noise scale is that of a step before")
        return self._tradeoff(noise_scale, plan, progress)

    def reason(self, progress: Progress) -> str:
        """Return what it does, and why."""
        if progress.share is None:
            return 'policy="auto" is "tradeoff", as the end of the run is not known'
        why = f"as the run ends after a number of {progress.ends_by}"
        if progress.ahead is not None and progress.ahead.never_falls:
            why += ". The learning rate never falls, so only a batch that is far too small grows"
        return f'policy="auto" is "bounded_seesaw", {why}'


def _describe(noise_scale: NoiseScale) -> str:
    low, high = three_digits(noise_scale.low), three_digits(noise_scale.high)
    if noise_scale.resolved:
        return f"{three_digits(noise_scale.value)} ({low} to {high})"
    return f"above {low}"
