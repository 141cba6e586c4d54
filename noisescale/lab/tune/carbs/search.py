# SPDX-License-Identifier: Apache-2.0
"""One suggestion of the search: a pure function of observations, settings and random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from noisescale.lab.tune.carbs.acquisition import (
    CANDIDATES,
    Front,
    log_near,
    small_steps_from,
    steps_from,
)
from noisescale.lab.tune.carbs.dimensions import Dimension
from noisescale.lab.tune.carbs.observations import Observations, key_of
from noisescale.lab.tune.carbs.pareto import front_of, group_by_key
from noisescale.lab.tune.carbs.spaces import Array
from noisescale.lab.tune.carbs.surrogates import (
    bounded_outputs,
    fit_process,
    fit_success,
)

BEYOND = math.log(4.0), math.log(2.0)
"""How far below the cheapest and above the dearest trial an improvement counts, in log cost."""

CAUTION = 2.0
"""How many standard deviations of the predicted log cost must fit below the limit too.

The authors let the prediction itself reach the limit. Half of the trials at the limit then cost
more, up to 2.3 times in three problems of 30 trials. With two deviations 1 of 360 did, one of the
first four, which have no prediction.
"""

HOLD = 20.0
"""The number of observations at which the density of a step counts half. Later it counts less."""

WHOLE = 0.5
"""Share of the suggestions for which all costs count. For the others a random cost is the least."""

REFINED = 10
"""The number of best candidates that small steps are taken from."""

REPEATS = 3
"""A member of the Pareto set is repeated until it has this number of samples."""

LogPrior = Callable[[Array], Array]
"""A function from points to the logs of the costs that the user predicts."""


@dataclass(frozen=True)
class Suggestion:
    """A point, and why."""

    point: Array
    why: str
    """"startup", "retry", "resample" or "search"."""
    cost: float = math.nan
    """The cost that the model predicts."""


def suggest(
    seen: Observations,
    dimensions: Sequence[Dimension],
    *,
    center: Array,
    startup: int,
    resample: bool,
    max_cost: float | None,
    log_prior: LogPrior,
    rng: np.random.Generator,
) -> Suggestion:
    """Suggest the next point.

    Args:
        seen: Observations so far.
        dimensions: Of the search.
        center: Where the search begins.
        startup: Number of successes before the surrogates are used.
        resample: Whether to repeat a member of the Pareto set.
        max_cost: Largest predicted cost.
        log_prior: The user's prediction of log costs; zeros if there is none.
        rng: Random numbers of this suggestion.
    """
    if len(seen.retries):
        return Suggestion(seen.retries[0], "retry")
    if seen.successes < startup:
        drawn = steps_from(center[None], dimensions, CANDIDATES, rng)
        prior = log_prior(drawn)
        # Zeros all over are no prediction.
        if max_cost is not None and prior.any():
            allowed = prior <= math.log(max_cost)
            drawn = drawn[allowed] if allowed.any() else drawn[[prior.argmin()]]
        return Suggestion(_new(drawn, seen.running)[0], "startup")
    if resample and (found := _to_resample(seen, max_cost)) is not None:
        return found
    return _search(seen, dimensions, max_cost, log_prior, rng)


def _to_resample(seen: Observations, max_cost: float | None) -> Suggestion | None:
    """Return the cheapest of the members of the (plain) Pareto set with the fewest samples."""
    keys: list[Hashable] = [key_of(point) for point in seen.points]
    groups = group_by_key(keys, seen.costs.tolist(), seen.outputs.tolist())
    whole = {key for key, complete in zip(keys, seen.whole, strict=True) if complete}
    running: list[Hashable] = [key_of(point) for point in seen.running]
    members = [
        group
        for group in front_of(groups, conservative=False, cheapest=0.0)
        if group.key in whole and (max_cost is None or group.cost <= max_cost)
    ]
    samples = [len(group.costs) + running.count(group.key) for group in members]
    if not members or min(samples) >= REPEATS:
        return None
    least = members[samples.index(min(samples))]
    return Suggestion(seen.points[keys.index(least.key)], "resample", least.cost)


def _search(
    seen: Observations,
    dimensions: Sequence[Dimension],
    max_cost: float | None,
    log_prior: LogPrior,
    rng: np.random.Generator,
) -> Suggestion:
    """Return the candidate with the largest acquisition.

    It is the area that the candidate is expected to add to what the front dominates in log cost
    and output, times a power of the density of a step, times the probability of success, in logs.
    In half of the suggestions only costs above a random one count, so that trials spread over all
    costs. The power falls from 1 to 0: few observations say little about what is far from them.
    """
    outputs = bounded_outputs(seen.outputs)
    output = fit_process(seen.points, outputs, rng).imagining(seen.running, rng)
    cost = fit_process(seen.points, np.log(seen.costs) - log_prior(seen.points), rng)
    known, log_costs = seen.points, np.log(seen.costs)
    if len(seen.running):
        known = np.vstack([known, seen.running])
        running = log_prior(seen.running) + cost.predict(seen.running)[0]
        log_costs = np.concatenate([log_costs, running])
    front = Front.of(log_costs, output.predict(known)[0], BEYOND)
    origins = known[front.members]

    success = fit_success(seen.points, seen.failures, rng)
    hold = HOLD / (HOLD + len(seen.points))
    whole = rng.random() < WHOLE
    least = -math.inf if whole else rng.uniform(front.edges[0], front.edges[-1])
    limit = math.inf if max_cost is None else math.log(max_cost)

    def rank(points: Array) -> tuple[Array, Array]:
        """Return the points and their log costs, the best first."""
        costs, unsure = cost.predict(points)
        log_cost = log_prior(points) + costs
        value = (
            front.log_gain(log_cost, *output.predict(points), least)
            + hold * log_near(points, origins)
            + success(points)
        )
        highest = log_cost + CAUTION * unsure
        allowed = (highest < limit) & (log_cost < front.edges[-1])
        # Where all are too dear, the cheapest one leads back.
        order = np.lexsort((np.where(allowed, -value, highest), ~allowed))
        return points[order], log_cost[order]

    count = CANDIDATES * sum(dimension.width for dimension in dimensions)
    steps = _new(steps_from(origins, dimensions, count, rng, shorter=True), known)
    best = rank(steps)[0][:REFINED]
    nearby = small_steps_from(best, dimensions, count // 2, rng)
    points, log_cost = rank(_new(np.vstack([best, nearby]), known))
    return Suggestion(points[0], "search", math.exp(log_cost[0]))


def _new(candidates: Array, known: Array) -> Array:
    """Return the candidates that are not known yet, or all of them if there are none."""
    taken = {key_of(point) for point in known}
    new = [key_of(point) not in taken for point in candidates]
    return candidates[new] if any(new) else candidates
