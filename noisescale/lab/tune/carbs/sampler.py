# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - the packages of the extra are asked for before they are imported.
"""The sampler of Optuna: it reads the study, and asks the search for a point."""

from __future__ import annotations

import json
import math
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from noisescale.checks import is_positive, is_whole, refuse, require_count, require_positive
from noisescale.extras import need

for _package in ("optuna", "sklearn"):
    need(_package, "`CarbsSampler`", extra="tune")

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.search_space import intersection_search_space
from optuna.trial import TrialState
from threadpoolctl import threadpool_limits

from noisescale.lab.tune.carbs.acquisition import steps_from
from noisescale.lab.tune.carbs.dimensions import Dimension, dimensions_of
from noisescale.lab.tune.carbs.observations import SUGGESTED, observe
from noisescale.lab.tune.carbs.search import Suggestion, suggest
from noisescale.lab.tune.carbs.spaces import Array, Space, require_spaces
from noisescale.lab.tune.carbs.trials import is_success, one_direction

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

ATTEMPTS = 3
"""A trial that fails for another reason than its parameters is tried this often."""


class CarbsSampler(BaseSampler):
    """Search along the front of cost and performance, from cheap to dear (CARBS).

    Trials that cost more may perform better. The sampler finds the best parameters at each cost:
    it keeps the front of what has been tried, steps from its members, and suggests what promises
    to add the largest area to what the front dominates in log cost and performance.

    A trial says what it costs by `trial.set_user_attr("cost", ...)`. Otherwise it costs its
    duration in seconds. A trial that fails, is pruned or has an infinite value makes its
    neighbourhood less likely. If that was not its parameters' fault, set
    `trial.set_user_attr("unrelated_failure", True)`: the trial is then repeated and otherwise
    ignored.

    Args:
        seed: Seed of the random numbers. The same seed and history give the same suggestion, in
            any process. Default: drawn once.
        centers: Where the search begins, by parameter. Default: the parameters of the first
            enqueued trial, else the middle of the range (of its logs, if it is searched in logs).
        spaces: Spaces of parameters (`noisescale.lab.tune.carbs.spaces`), where Optuna's
            distribution does not say enough. Default: linear or log spaces by the distributions.
        max_cost: Two standard deviations above a trial's predicted cost must be below. Without
            `cost_prior` the first trials are not limited.
        cost: Name of the user attribute with a trial's cost.
        cost_prior: From parameters to their predicted cost. The sampler then learns the ratio of
            the cost to it.
        length: Name of the parameter that says how long a run is. Needed where trials have the user
            attribute "curve", a list of [cost, value] or [cost, value, length] on the way: each
            point counts as a shorter run.
        resample_every: After this number of suggestions a member of the Pareto set is repeated; 0
            for never.
        n_startup_trials: Until this number of trials has succeeded, suggestions are drawn around
            the centre.

    Raises:
        ValueError: If an argument is out of its range.
        MissingExtraError: If Optuna or scikit-learn is not installed.

    Examples:
        >>> import optuna
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> def objective(trial):
        ...     width = trial.suggest_int("width", 8, 512, log=True)
        ...     lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
        ...     trial.set_user_attr("cost", float(width))
        ...     return 1 / width + (math.log10(lr) + 3) ** 2
        >>> study = optuna.create_study(sampler=CarbsSampler(seed=0, centers={"width": 16}))
        >>> study.optimize(objective, n_trials=8)
        >>> study.trials[0].params
        {'width': 16, 'lr': 0.001}

    References:
        Fetterman et al. 2023, arXiv:2306.08055.
    """

    # This differs from the paper and from the authors' implementation in:
    # 1. The first trial is the centre itself. Theirs is drawn around it.
    # 2. Nothing is kept in the sampler. All is read from the study.
    # 3. A resampled trial is every n-th by its number, not by a count of successes.
    # 4. Candidates that run or have been observed already are left out while there are others:
    #    theirs fails on duplicates (its issue 6). Only resampling repeats.
    # 5. Where all candidates cost too much, the cheapest one is suggested. Theirs fails.
    # 6. Categorical parameters, as coordinates one for each choice. Theirs has none.
    # 7. Half of the candidates take shorter steps (`steps_from`). From the best of all, more
    #    candidates take small steps (`small_steps_from`).
    # 8. A candidate is valued by the area that it adds in log cost and output (`Front.log_gain`).
    #    In half of the suggestions only costs above a random one count (`search.WHOLE`). Theirs
    #    values how far it beats the front at its own cost, and at least at a random cost.
    #    So the search also goes below the costs that it began with. Theirs never does.
    # 9. The front has the means of the process of the outputs, at all trials. Theirs is a process
    #    of its own, of the Pareto set.
    # 10. The density of a step counts less as trials grow (`search.HOLD`).
    # 11. A member with three samples is not repeated. Theirs repeats the only member of a set
    #    again and again.
    # 12. Outputs far below the median are bounded (`bounded_outputs`). Theirs are quantiles, which
    #    make differences among bad outputs as large as among good ones.
    # 13. The surrogates differ: see surrogates.py.

    def __init__(
        self,
        *,
        seed: int | None = None,
        centers: Mapping[str, Any] | None = None,
        spaces: Mapping[str, Space] | None = None,
        max_cost: float | None = None,
        cost: str = "cost",
        cost_prior: Callable[[dict[str, Any]], float] | None = None,
        length: str | None = None,
        resample_every: int = 5,
        n_startup_trials: int = 4,
    ) -> None:
        if seed is not None and not (is_whole(seed) and seed >= 0):
            refuse("seed", "be a whole number from 0 up, or None", repr(seed), "Pass 0.")
        if not (is_whole(resample_every) and resample_every >= 0):
            remedy = "Pass 0 to repeat no trial."
            refuse("resample_every", "be a whole number from 0 up", repr(resample_every), remedy)
        if max_cost is not None:
            require_positive("max_cost", max_cost, "Leave it out for no limit.")
        self._seed = secrets.randbits(63) if seed is None else int(seed)
        self._centers = dict(centers or {})
        self._spaces = require_spaces(spaces)
        self._max_cost, self._cost, self._cost_prior = max_cost, cost, cost_prior
        self._length, self._resample_every = length, resample_every
        self._startup = require_count("n_startup_trials", n_startup_trials, "Pass 4.")

    def reseed_rng(self) -> None:
        """Do nothing: random numbers depend on the seed and the trial's number alone."""

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the parameters that all completed trials have."""
        one_direction(study)
        done = study._get_trials(deepcopy=False, states=(TrialState.COMPLETE,), use_cache=True)
        found = intersection_search_space(done)
        return {name: each for name, each in found.items() if not each.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Suggest values of the parameters in the search space."""
        sign = 1 if one_direction(study) == "maximize" else -1
        if not search_space:
            return {}
        trials = study._get_trials(deepcopy=False, use_cache=False)
        dimensions = dimensions_of(search_space, self._spaces)
        seen = observe(
            trials,
            dimensions,
            sign=sign,
            cost=self._cost,
            length=self._length,
            before=trial.number,
            attempts=ATTEMPTS,
        )
        every = self._resample_every
        # BLAS and OpenMP threads make matrices of this size slower, and other workers with them.
        with threadpool_limits(limits=1):
            found = suggest(
                seen,
                dimensions,
                center=self._center(trials, dimensions),
                startup=self._startup,
                resample=every > 0 and trial.number % every == every - 1,
                max_cost=self._max_cost,
                log_prior=lambda points: self._log_prior(points, dimensions),
                rng=np.random.default_rng([self._seed, trial.number]),
            )
        params = _params_at(found.point, dimensions)
        self._share(study, trial, params, found)
        return params

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw a parameter that not all completed trials have: near where it did best, or begins.

        The first trial has the centre.
        """
        maximize = one_direction(study) == "maximize"
        (dimension,) = dimensions_of({param_name: param_distribution}, self._spaces)
        trials = study._get_trials(deepcopy=False, use_cache=True)
        best = [
            t
            for t in trials
            if is_success(t) and t.distributions.get(param_name) == param_distribution
        ]
        if len(best) >= self._startup:
            sign = -1 if maximize else 1
            # A success has a value, which the type does not know.
            best.sort(key=lambda t: (sign * t.value, t.number))  # type: ignore[operator]
            origins = dimension.to_basic([t.params[param_name] for t in best[: self._startup]])
        else:
            origins = self._center(trials, [dimension])[None]
        if trial.number == 0 and dimension.space is not None:
            return dimension.from_basic(origins[0])
        which = zlib.crc32(param_name.encode())
        rng = np.random.default_rng([self._seed, trial.number, which])
        return dimension.from_basic(steps_from(origins, [dimension], 1, rng)[0])

    def _center(self, trials: Sequence[FrozenTrial], dimensions: Sequence[Dimension]) -> Array:
        """Return where the search begins: given, or of the first enqueued trial, or the middle."""
        enqueued: dict[str, Any] = next(
            (t.system_attrs["fixed_params"] for t in trials if "fixed_params" in t.system_attrs),
            {},
        )
        parts = []
        for dimension in dimensions:
            name = dimension.name
            values = [of[name] for of in (self._centers, enqueued) if name in of]
            parts.append(_at_center(dimension, values[0]) if values else dimension.middle)
        return np.concatenate(parts)

    def _log_prior(self, points: Array, dimensions: Sequence[Dimension]) -> Array:
        if self._cost_prior is None:
            return np.zeros(len(points))
        logs = []
        for point in points:
            params = _params_at(point, dimensions)
            predicted = self._cost_prior(params)
            if not is_positive(predicted):
                remedy = "Return the cost that you expect, in the unit of the trials' costs."
                got = f"{predicted!r} for {params}"
                refuse("cost_prior", "return positive, finite numbers", got, remedy)
            logs.append(math.log(predicted))
        return np.array(logs)

    def _share(
        self, study: Study, trial: FrozenTrial, params: dict[str, Any], found: Suggestion
    ) -> None:
        """Let other workers know the parameters before the trial asks for them."""
        text = json.dumps(params)
        if len(text) < 2000:  # databases take 2045 characters
            study._storage.set_trial_system_attr(trial._trial_id, SUGGESTED, text)
        why = {"why": found.why} | ({"cost": found.cost} if math.isfinite(found.cost) else {})
        study._storage.set_trial_system_attr(trial._trial_id, "carbs:suggestion", why)


def _params_at(point: Array, dimensions: Sequence[Dimension]) -> dict[str, Any]:
    ends = np.cumsum([dimension.width for dimension in dimensions])[:-1]
    parts = np.split(point, ends)
    return {d.name: d.from_basic(part) for d, part in zip(dimensions, parts, strict=True)}


def _at_center(dimension: Dimension, value: Any) -> Array:
    """Return the coordinates of a centre, or raise a ValueError if its space has no such value."""
    try:
        inside = dimension.distribution._contains(dimension.distribution.to_internal_repr(value))
        part = dimension.to_basic([value])[0] if inside else None
    except (TypeError, ValueError):
        part = None
    if part is None or not np.isfinite(part).all():
        refuse(
            "centers",
            f"lie in the space of {dimension.name!r}, {dimension.distribution}",
            repr(value),
            "Pass another centre, or give the parameter a wider range.",
        )
    return np.asarray(part)
