# SPDX-License-Identifier: Apache-2.0
"""Find the best batch size for the examples of a run, from what the run itself shows."""

from __future__ import annotations

import math
from typing import Any

from noisescale.estimation.noise_scale import NoiseScale, three_digits
from noisescale.plan import Plan
from noisescale.scheduling.policy import Policy, Progress, Wanted
from noisescale.scheduling.training_loss import slice_of

BLIND_STEPS = 1000
"""The steps that a run has at the batch size that is taken before anything is measured."""

CAP = 0.15
"""Before the decision a batch is at most this share of the critical batch size of the moment."""

KAPPA = 0.0163
"""B* = KAPPA·r/σ, see `best_batch_size`."""

DECIDES, DECIDED = 5, 10
"""The slices of the run at whose beginnings it is decided: from 13.6 % to 36.9 % of the run."""

WITHIN = 8.0
"""The largest factor between the batch size that is decided on and the blind one."""


def critical_batch_size_at(noise_scale: float, share: float) -> float:
    """Return the critical batch size of a run from the noise scale at a share of it.

    It is 2.1 x the noise scale at a tenth of the run; before 35 % of the run the noise scale rises
    as the square root of the share.
    """
    return 2.1 * noise_scale * math.sqrt(0.1 / share)


class Find(Policy):
    """Find it."""

    _saved = ("_asked", "_logs", "_trace")
    needs_noise_scale = by_reduced_values = needs_loss = True

    def __init__(self) -> None:
        self._asked = -math.inf
        self._logs: tuple[float, ...] = ()
        self._trace: tuple[tuple[float, ...], ...] = ()

    def due(self, progress: Progress) -> bool:
        """Return whether to ask now: at the first step, and as slices of the run begin."""
        if progress.share is None:
            return False
        now = _slice_of(progress.share)
        return now > self._asked and now <= DECIDED

    def __call__(self, noise_scale: NoiseScale, plan: Plan, progress: Progress) -> Wanted:
        """Return it."""
        now, share, run = float(plan.batch_size), progress.share, progress.examples_of_run
        if share is None or run is None:
            return Wanted(now, "the run's end is not known")
        number = _slice_of(share)
        blind = run / BLIND_STEPS
        state: dict[str, Any] = {"asked": number, "logs": self._logs, "trace": self._trace}
        b = noise_scale.value if noise_scale.resolved else noise_scale.low
        state["trace"] = (
            *self._trace,
            (share, now, noise_scale.low, noise_scale.value, noise_scale.high, progress.loss_slope),
        )
        if number < -8:
            return Wanted(blind, f"a thousandth of the run for now: {blind:g}", state)
        if number < DECIDES:
            high = noise_scale.high
            most = CAP * critical_batch_size_at(high, share) if math.isfinite(high) else math.inf
            return Wanted(min(blind, most), "capped", state)
        slope = progress.loss_slope
        if slope > 0 and b > 0:
            r = critical_batch_size_at(b, share)
            target = min(max(KAPPA * r / slope, blind / WITHIN), blind * WITHIN)
            state["logs"] = (*self._logs, math.log(target))
        if not state["logs"]:
            return Wanted(now, "nothing known", state)
        wanted = math.exp(sum(state["logs"]) / len(state["logs"]))
        return Wanted(wanted, f"best batch about {three_digits(wanted)}", state)


def _slice_of(share: float) -> float:
    return max(slice_of(share), -9)
