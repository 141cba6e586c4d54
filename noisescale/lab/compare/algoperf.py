# SPDX-License-Identifier: Apache-2.0
"""AlgoPerf's protocol: which trial of a study counts, what studies make of it, its workloads."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from noisescale.checks import refuse, require_choice

WORKLOADS = (
    "criteo1tb",
    "fastmri",
    "imagenet_resnet",
    "imagenet_vit",
    "librispeech_conformer",
    "librispeech_deepspeech",
    "ogbg",
    "wmt",
)
"""The workloads of AlgoPerf that count."""

HELD_OUT_VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "criteo1tb_embed_init": "criteo1tb",
        "fastmri_tanh": "fastmri",
        "imagenet_resnet_large_bn_init": "imagenet_resnet",
        "librispeech_conformer_layernorm": "librispeech_conformer",
        "ogbg_model_size": "ogbg",
        "wmt_glu_tanh": "wmt",
    }
)
"""The workload of each held-out variant of version 0.5, for `algoperf_score`."""

TIES = ("first", "seconds")
"""Which of several trials with the same evaluation counts: the first one, or the fastest."""


@dataclass(frozen=True)
class Ruleset:
    """How often a submission is trained, and for how long."""

    studies: int
    """Repetitions of the whole search."""
    trials: int
    """Trainings in each study, with other hyperparameters."""
    budget: float
    """Times the workload's own budget of seconds."""


RULESETS: Mapping[str, Ruleset] = MappingProxyType(
    {
        "external_tuning_v05": Ruleset(studies=5, trials=5, budget=1.0),
        "external_tuning_v06": Ruleset(studies=3, trials=5, budget=1.0),
        "self_tuning_v05": Ruleset(studies=5, trials=1, budget=3.0),
        "self_tuning_v06": Ruleset(studies=3, trials=1, budget=1.5),
    }
)
"""AlgoPerf's: hyperparameters are drawn from the submission's search space, or it finds them."""


class TrialTime(NamedTuple):
    """When a trial reached its goal. Both are infinite if it did not."""

    submission: str
    workload: str
    study: str
    evaluation: float
    """The number of the evaluation that reached the goal."""
    seconds: float
    """The time of training: evaluations are not timed, compiling is."""


def times_to_result(
    trials: Iterable[TrialTime],
    *,
    ties: str = "first",
    ruleset: Ruleset | None = None,
    budgets: Mapping[str, float] | None = None,
) -> dict[str, dict[str, float]]:
    """Return the time of each submission on each workload: the median over studies.

    The time of a study is that of the trial that reached the goal at the earliest evaluation.

    Args:
        trials: In the order in which they were made.
        ties: Which trial counts if several reached the goal at the same evaluation: the "first"
            one, as in AlgoPerf's code, or the one of the fewest "seconds", as in its text.
        ruleset: How many studies and trials there must be. Default: any number.
        budgets: From a workload to the seconds of its budget. A time above the budget, times the
            ruleset's factor, counts as missed. Default: no limit.

    Returns:
        From a submission to a workload to seconds, infinite where the goal was missed.

    Raises:
        ValueError: If there is no trial, or there are more studies or trials than the ruleset
            has.

    Warns:
        UserWarning: If there are fewer studies or trials than the ruleset has.

    Examples:
        >>> trials = [TrialTime("adam", "wmt", study, 3, t) for study, t in zip("abc", (9, 7, 8))]
        >>> times_to_result(trials)
        {'adam': {'wmt': 8.0}}
    """
    require_choice("ties", ties, TIES, "AlgoPerf's code takes the first.")
    studies: dict[tuple[str, str], dict[str, list[TrialTime]]] = defaultdict(dict)
    for trial in trials:
        studies[trial.submission, trial.workload].setdefault(trial.study, []).append(trial)
    if not studies:
        refuse("trials", "have one trial at least", "none", "Give the trials of each study.")
    if ruleset is not None:
        for (submission, workload), of in studies.items():
            _check(ruleset, f"{submission} on {workload}", of)
    factor = 1.0 if ruleset is None else ruleset.budget
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for (submission, workload), of in studies.items():
        most = factor * (budgets or {}).get(workload, math.inf)
        seconds = [_best(tried, ties, most) for tried in of.values()]
        times[submission][workload] = float(np.median(seconds))
    return dict(times)


def _best(trials: list[TrialTime], ties: str, most: float) -> float:
    """Return the seconds of the trial that counts. `min` takes the first of equals."""
    in_time = [trial for trial in trials if trial.seconds <= most]
    if not in_time:
        return math.inf
    by_time = ties == "seconds"
    return min(
        in_time, key=lambda trial: (trial.evaluation, trial.seconds if by_time else 0)
    ).seconds


def _check(ruleset: Ruleset, of: str, studies: Mapping[str, list[TrialTime]]) -> None:
    largest = max(map(len, studies.values()))
    for name, found, wanted in (
        ("studies", len(studies), ruleset.studies),
        ("trials in a study", largest, ruleset.trials),
    ):
        if found > wanted:
            refuse(
                "trials",
                f"have at most {wanted} {name}",
                f"{found} of {of}",
                "Leave the others out, or give another ruleset.",
            )
    least = min(map(len, studies.values()))
    if len(studies) < ruleset.studies or least < ruleset.trials:
        warnings.warn(
            f"{of} has {len(studies)} of {ruleset.studies} studies and {least} of"
            f" {ruleset.trials} trials in the smallest. Its time is less certain.",
            stacklevel=3,
        )
