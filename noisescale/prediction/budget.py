# SPDX-License-Identifier: Apache-2.0
"""The batch size that a run's number of examples allows, by its training loss and noise scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from noisescale.bounded import UNKNOWN, Bounded
from noisescale.history.increments import LOSS
from noisescale.history.segments import Array
from noisescale.tradeoff import budget as law

if TYPE_CHECKING:
    from noisescale.prediction.prediction import Prediction

_ENDS = law.BEGINS * math.exp(law.WIDTH * law.LAST)
"""The share of the run up to which losses and noise scales count."""

_BETWEEN = f"between {100 * law.BEGINS:.0f} and {100 * _ENDS:.0f} % of the run"


class Budget(NamedTuple):
    """The examples of a whole run, and the largest batch size that keeps its loss."""

    examples: float
    best_batch_size: Bounded = UNKNOWN
    why_unknown: str = ""
    """Why the run does not tell it, as a part of a sentence."""


def budget_of(p: Prediction) -> Budget:
    """Return what the examples of a run allow, by the formulas that `policy="auto"` decides by."""
    history, seen, losses = p.history, p.history["examples"], p.history[LOSS]
    left = history.planned_steps - float(history["step"][-1])
    examples = float(seen[-1] + max(np.nan_to_num(left), 0.0) * p.position.batch_size)
    ends, starts = seen / examples, np.concatenate([[0.0], seen[:-1] / examples])
    here = (starts >= law.BEGINS) & (ends <= _ENDS)
    heard = here & (recorded := np.isfinite(losses))
    resolved = here & np.isfinite(history["high"]) & (history["noise_scale"] > 0)
    slices = _slices_of(starts[heard], ends[heard], losses[heard])
    slope = law.slope_of(slices)
    reasons = {
        "the end of the run is not known": p.under_way and math.isnan(left),
        f"{100 * _ENDS:.0f} % of the run are not over": ends[-1] < _ENDS,
        "the training loss is no cross-entropy alone, or was not recorded": not recorded.any(),
        f"too few rows of the log lie {_BETWEEN}": len(slices) < law.LEAST_SLICES,
        f"the training loss does not fall or is not positive {_BETWEEN}": not slope > 0,
        f"there is only a lower bound of the noise scale {_BETWEEN}": not resolved.any(),
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        return Budget(examples, why_unknown=why)
    pairs = zip(history["noise_scale"][resolved].tolist(), ends[resolved].tolist(), strict=True)
    logs = [math.log(law.critical_batch_size_at(*pair)) for pair in pairs]
    best = law.best_batch_size(examples, math.exp(sum(logs) / len(logs)), slope)
    return Budget(examples, Bounded(best, best / law.LIKELY, best * law.LIKELY))


def _slices_of(starts: Array, ends: Array, losses: Array) -> list[law.Slice]:
    """Return the mean losses of rows between shares of a run."""
    shares, weights = (starts + ends) / 2, ends - starts
    numbers = np.array([law.slice_of(share) for share in shares])
    means = (
        (number, *(float(np.average(x[at], weights=weights[at])) for x in (shares, losses)))
        for number in np.unique(numbers)
        for at in [numbers == number]
    )
    return [law.Slice(int(number), share, loss) for number, share, loss in means]
