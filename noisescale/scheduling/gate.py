# SPDX-License-Identifier: Apache-2.0
"""Policies that move the batch size only as far as the noise scale's interval lets them."""

from __future__ import annotations

from noisescale.checks import is_positive
from noisescale.estimation.noise_scale import NoiseScale, three_digits
from noisescale.plan import Plan
from noisescale.refusal import Refusal
from noisescale.scheduling.policies import Rule
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


def _describe(noise_scale: NoiseScale) -> str:
    low, high = three_digits(noise_scale.low), three_digits(noise_scale.high)
    if noise_scale.resolved:
        return f"{three_digits(noise_scale.value)} ({low} to {high})"
    return f"above {low}"
