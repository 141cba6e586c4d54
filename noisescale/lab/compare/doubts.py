# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a comparison, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from noisescale.lab.compare.names import name_of_sweep
from noisescale.lab.compare.outcomes import Outcome, Standing, is_seed
from noisescale.report.numbers import plural

if TYPE_CHECKING:
    from noisescale.lab.compare.comparison import Comparison

UNEQUAL_SEARCHES = 2
"""A comparison warns if a submission was searched over this many times another's settings."""

UNLIKE = 1.5
"""Batch sizes, or the examples of an epoch, differ if one is this many times another."""

NAMED = 3
"""Runs that a sentence names at the most."""

SWEEPS = 6
"""Sweeps over batch sizes whose doubts are told."""

_LEFT_AGAIN = (
    "In {} of {} runs that reached the goal a later measurement was short of it. If the metric is"
    " noisy, the first measurement that reaches the goal is a lucky one: choose a goal that runs"
    " pass clearly, or a metric over more examples."
)

_BEGAN_THERE = (
    "{} of {} runs reached the goal at their first measurement. When they reached it is not known."
    " Choose a goal that is farther away, or measure more often."
)

_CLOCK_DOUBTS = {
    "steps": " are calls of wandb.log. They are optimizer steps only if each step was logged once."
    " Export trainer/global_step, or compare by time.",
    "seconds": " are those of the logs, with validations and checkpoints. NoiseScaleMonitor logs"
    " the time of training alone.",
}


def doubts_of(found: Comparison) -> Iterator[str]:
    """Yield what may be wrong, the worst first."""
    for doubt in _DOUBTS:
        yield from doubt(found)


def _workloads(
    found: Comparison,
) -> Iterator[tuple[str, list[Standing], list[Outcome]]]:
    """Yield each workload as a place in a sentence, with its standings and outcomes."""
    for name in found.workloads:
        yield f" on {name}" if name else "", found.standings_of(name), found.outcomes_of(name)


def _runs_left_out(found: Comparison) -> Iterator[str]:
    """Name the runs that do not count, each with its reason."""
    if trials := found.left_out:
        named = [f"{trial.name}: {trial.fault}" for trial in trials[:NAMED]]
        if len(trials) > NAMED:
            further = plural(len(trials) - NAMED, "further run")
            named.append(f"And {further}: `noisescale compare --json` has them all.")
        are = "is" if len(trials) == 1 else "are"
        yield (
            f"{plural(len(trials), 'run')} {are} left out. {' '.join(named)} The answer is of the"
            " other runs. A training that failed before its first evaluation does not count against"
            " its submission."
        )


def _unmeasured_runs(found: Comparison) -> Iterator[str]:
    """Name the runs whose noise scale was refused, with the reason and its remedy."""
    refused: dict[str, list[str]] = defaultdict(list)
    for trial in (outcome.trial for outcome in found.outcomes):
        if trial.unmeasured:
            refused[trial.unmeasured].append(trial.name)
    for reason, (first, *others) in [*refused.items()][:NAMED]:
        more = f" and {plural(len(others), 'other run')}" if others else ""
        yield f"The noise scale of {first}{more} is not known. {reason}"


def _unequal_searches(found: Comparison) -> Iterator[str]:
    """Say where one submission was searched over many more settings than another."""
    for place, standings, _ in _workloads(found):
        most, least = _ends(standings, lambda standing: standing.settings)
        if most.settings >= UNEQUAL_SEARCHES * least.settings:
            yield (
                f"The searches differ{place}: {most.submission} was trained with {most.settings:g}"
                f" settings of hyperparameters, {least.submission} with {least.settings:g}. The"
                " best of more settings is faster. The bounds of speed-ups leave that out: search"
                " equally far."
            )


def _repetitions_without_seeds(found: Comparison) -> Iterator[str]:
    """Say which runs count as repetitions though no different seeds are known of them."""
    settings: dict[tuple[object, ...], list[Outcome]] = defaultdict(list)
    for outcome in found.outcomes:
        trial = outcome.trial
        where = trial.submission, trial.workload, trial.study
        settings[(*where, *outcome.setting)].append(outcome)
    alike: list[str] = []
    for repeated in settings.values():
        seeds = {_seeds(outcome) for outcome in repeated}
        if len(repeated) > 1 and (len(seeds) < len(repeated) or () in seeds):
            alike += [outcome.trial.name for outcome in repeated]
    if alike:
        yield (
            f"{len(alike)} runs have the same hyperparameters as others and no different seeds in"
            f" their logs, for example {alike[0]} and {alike[1]}. They count as repetitions of"
            " a setting. If they differ in something else, log that as a hyperparameter."
        )


def _seeds(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    given = outcome.trial.hyperparameters
    return tuple(sorted((name, str(value)) for name, value in given.items() if is_seed(name)))


def _missing_runs(found: Comparison) -> Iterator[str]:
    """Say which submissions were not run on which workloads."""
    submissions = dict.fromkeys(each.submission for each in found.standings)
    missing = [
        f"{submission}{place}"
        for place, standings, _ in _workloads(found)
        for submission in submissions
        if submission not in {each.submission for each in standings}
    ]
    if missing:
        yield f"Not run: {', '.join(missing)}. In profiles and scores that counts as missed."


def _doubtful_clocks(found: Comparison) -> Iterator[str]:
    """Say what the clock that counts is, where it is not quite what its name says."""
    name, every = "steps" if found.clock == "examples" else found.clock, len(found.outcomes)
    doubtful = sum(name in each.trial.doubtful_clocks for each in found.outcomes)
    if doubtful and name in _CLOCK_DOUBTS:
        of = f"of {doubtful} of {every} runs" if doubtful < every else "of all runs"
        yield f"The {name} {of}{_CLOCK_DOUBTS[name]}"


def _unlike_batch_sizes(found: Comparison) -> Iterator[str]:
    """Say where steps are compared of batches of different sizes."""
    for place, standings, _ in _workloads(found) if found.clock == "steps" else ():
        sized = [each for each in standings if each.best.trial.batch_size > 0]
        if not sized:
            continue
        most, least = _ends(sized, lambda standing: standing.best.trial.batch_size)
        large, small = most.best.trial.batch_size, least.best.trial.batch_size
        if large >= UNLIKE * small:
            yield (
                f"Steps of different batch sizes are compared{place}: {most.submission} has"
                f" {large:,.6g} examples in a step, {least.submission} {small:,.6g}. A larger"
                " batch takes fewer steps. Compare by examples or time too, or at the same batch"
                " size."
            )


def _unlike_examples(found: Comparison) -> Iterator[str]:
    """Say where a batch size missed the goal with fewer examples than a larger one needed.

    A budget in examples, epochs or seconds would be a fair end of the smaller one.
    """
    for place, _, outcomes in _workloads(found) if {*found.budget} <= {"steps"} else ():
        best: dict[tuple[float, str], Outcome] = {}
        for outcome in sorted(outcomes, key=lambda each: each.rank("steps")):
            if outcome.trained and outcome.trial.batch_size > 0:
                best.setdefault((outcome.trial.batch_size, outcome.trial.submission), outcome)
        every = [best[key] for key in sorted(best)]
        pairs = (
            (few, many)
            for few in every
            for many in reversed(every)
            if many.reached
            and not (few.reached or few.trial.diverged)
            and many.trial.batch_size >= UNLIKE * few.trial.batch_size
            and _examples(few) < _examples(many)
        )
        for few, many in islice(pairs, 1):
            small, large = (
                f"batch size {each.trial.batch_size:,.6g}"
                + (f" ({each.trial.submission})" if each.trial.submission else "")
                for each in (few, many)
            )
            yield (
                f"With {_examples(few):,.6g} examples {small} missed the goal{place}, and {large}"
                f" needed {_examples(many):,.6g}. A smaller batch may miss the goal, or seem"
                " slower, for that alone. Train all with one budget of examples, epochs or"
                " device-time, and compare by it, for example with --by examples --budget"
                " examples=100000."
            )


def _examples(outcome: Outcome) -> float:
    """Return the examples to the goal, or those of the whole training where it was missed."""
    steps = outcome.at("steps") if outcome.reached else outcome.trained_steps
    return outcome.trial.batch_size * steps


def _unlike_epochs(found: Comparison) -> Iterator[str]:
    """Say where the examples of an epoch differ: some batch size is then not the global one."""
    for _, _, outcomes in _workloads(found):
        of_epoch: dict[float, str] = {}
        for trial in (outcome.trial for outcome in outcomes):
            examples, epochs = trial.measurements.examples, trial.measurements.epochs
            if examples is None or epochs is None:
                continue
            known = np.isfinite(examples) & (examples > 0) & (epochs >= 1)
            if known.any():
                of_epoch[float(examples[known][-1] / epochs[known][-1])] = trial.name
        if of_epoch and max(of_epoch) >= UNLIKE * min(of_epoch):
            many, few = max(of_epoch), min(of_epoch)
            yield (
                f"By batch size times steps, an epoch has {many:,.0f} examples in"
                f" {of_epoch[many]} and {few:,.0f} in {of_epoch[few]}. If both have the same data,"
                " a logged batch size is of one device or one micro-batch, and examples are wrong."
            )


def _goals_too_near(found: Comparison) -> Iterator[str]:
    """Say how many runs left the goal again, and how many began there."""
    reached = [each.reached for each in found.outcomes if each.reached is not None]
    back = sum(not each.for_good for each in reached)
    first = sum(each.evaluation == 0 for each in reached)
    for runs, said in ((back, _LEFT_AGAIN), (first, _BEGAN_THERE)):
        if runs:
            yield said.format(runs, len(reached))


def _doubts_of_sweeps(found: Comparison) -> Iterator[str]:
    """Yield what each sweep has to say. Of many only the first."""
    doubtful = [each for each in found.sweeps if each.warnings]
    for each in doubtful[:SWEEPS]:
        name = name_of_sweep(each)
        yield from (f"{name}: {text}" if name else text for text in each.warnings)
    if further := len(doubtful[SWEEPS:]):
        yield (
            f"{plural(further, 'further sweep')} over batch sizes also had doubts:"
            " `noisescale compare --json` has them all."
        )


_DOUBTS = (
    _runs_left_out,
    _unmeasured_runs,
    _unequal_searches,
    _repetitions_without_seeds,
    _missing_runs,
    _doubtful_clocks,
    _unlike_batch_sizes,
    _unlike_examples,
    _unlike_epochs,
    _goals_too_near,
    _doubts_of_sweeps,
)


def _ends(
    standings: Sequence[Standing], size: Callable[[Standing], float]
) -> tuple[Standing, Standing]:
    """Return the standing with the most of something, and the one with the least."""
    return max(standings, key=size), min(standings, key=size)
