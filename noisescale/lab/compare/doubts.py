# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with a comparison, in sentences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from noisescale.lab.compare.measurements import Trial
from noisescale.lab.compare.names import name_of_sweep
from noisescale.lab.compare.outcomes import Outcome, is_seed
from noisescale.lab.compare.steps_to_result import budget_mask
from noisescale.lab.compare.swept import Swept
from noisescale.refusal import Refusal
from noisescale.report.numbers import plural

if TYPE_CHECKING:
    from noisescale.lab.compare.outcomes import Standing

UNEQUAL_SEARCHES = 2
"""A comparison warns if a submission was searched over this many times another's settings."""

UNLIKE = 1.5
"""Batch sizes, or the examples of an epoch, differ if one is this many times another."""

FAR = 100
"""Examples may be of another unit if they are this many times steps times the batch size."""

GAP = 3
"""A log may be the rest of another run if it begins this many of its usual gaps after step 0."""

NAMED = 3
"""Submissions that a sentence names at the most."""

OWN_NAMES = 3
"""Runs that may all have another word by chance are fewer."""

SWEEPS = 6
"""Sweeps over batch sizes whose doubts are told."""

_CLOCK_DOUBTS = {
    "steps": " are calls of wandb.log. They are optimizer steps only if each step was logged once."
    " Export trainer/global_step, or compare by time.",
    "seconds": " are those of the logs, with validations and checkpoints. NoiseScaleMonitor logs"
    " the time of training alone.",
}


def doubts_of(
    outcomes: Sequence[Outcome],
    standings: Sequence[Standing],
    sweeps: Sequence[Swept],
    clock: str,
    budget: Mapping[str, float],
    left_out: Sequence[Trial],
) -> Iterator[str]:
    """Yield what may be wrong, the worst first."""
    yield from _runs_left_out(left_out)
    yield from _unequal_searches(standings)
    yield from _repetitions_without_seeds(standings)
    yield from _words_of_runs(standings)
    yield from _missing_runs(standings)
    yield from _doubtful_clocks(outcomes, clock)
    yield from _unlike_batch_sizes(standings, clock)
    yield from _unlike_examples(outcomes, budget)
    yield from _other_units(outcomes, clock)
    yield from _unlike_epochs(outcomes)
    yield from _late_starts(outcomes)
    reached = [outcome.reached for outcome in outcomes if outcome.reached is not None]
    if back := sum(not each.for_good for each in reached):
        yield (
            f"In {back} of {len(reached)} runs that reached the goal a later measurement was short"
            " of it. If the metric is noisy, the first measurement that reaches the goal is a"
            " lucky one: choose a goal that runs pass clearly, or a metric over more examples."
        )
    if first := sum(each.evaluation == 0 for each in reached):
        yield (
            f"{first} of {len(reached)} runs reached the goal at their first measurement. When they"
            " reached it is not known. Choose a goal that is farther away, or measure more often."
        )
    yield from _sizes_without_sweep(outcomes, sweeps)
    yield from _doubts_of_sweeps([each for each in sweeps if each.warnings])


def _doubts_of_sweeps(sweeps: Sequence[Swept]) -> Iterator[str]:
    for each in sweeps[:SWEEPS]:
        name = name_of_sweep(each)
        yield from (f"{name}: {text}" if name else text for text in each.warnings)
    if len(sweeps) > SWEEPS:
        further = map(name_of_sweep, sweeps[SWEEPS:][:NAMED])
        others = ", ..." if len(sweeps) > SWEEPS + NAMED else ""
        yield (
            f"{len(sweeps) - SWEEPS} further sweeps over batch sizes have such doubts:"
            f" {', '.join(further)}{others}. `noisescale compare --json` has them all."
        )


def _sizes_without_sweep(outcomes: Sequence[Outcome], sweeps: Sequence[Swept]) -> Iterator[str]:
    """Say where batch sizes are no sweep, as they were drawn along with other settings."""
    of: dict[tuple[str, str], set[float]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.trial.batch_size > 0:
            of[outcome.trial.submission, outcome.trial.workload].add(outcome.trial.batch_size)
    known = {(each.submission, each.workload) for each in sweeps}
    drawn = [of_both for of_both, sizes in of.items() if len(sizes) > 1 and of_both not in known]
    if drawn:
        names = dict.fromkeys(submission for submission, _ in drawn if submission)
        others = " and others" if len(names) > NAMED else ""
        of_them = f" of {', '.join([*names][:NAMED])}{others}" if names else ""
        yield (
            f"The batch sizes{of_them} are no sweep: none has several learning rates, and these"
            " rise and fall as if both were drawn. Such runs say nothing of the critical batch"
            " size. Search the learning rate at each batch size (`noisescale sweep`). If each rate"
            " is the best of a search, give the other runs of that search, too."
        )


def _unequal_searches(standings: Sequence[Standing]) -> Iterator[str]:
    """Say where one submission was searched over many more settings than another."""
    for workload in _workloads(standings):
        tried = {each.submission: each.settings for each in standings if each.workload == workload}
        most, least = max(tried, key=tried.__getitem__), min(tried, key=tried.__getitem__)
        if tried[most] >= UNEQUAL_SEARCHES * tried[least]:
            yield (
                f"The searches differ{_place(workload)}: {most} was trained with {tried[most]:g}"
                f" settings of hyperparameters, {least} with {tried[least]:g}. The best of more"
                " settings is faster. The bounds of speed-ups leave that out: search equally far."
            )


def _repetitions_without_seeds(standings: Sequence[Standing]) -> Iterator[str]:
    """Say which runs count as repetitions though no different seeds are known of them."""
    alike: list[list[Outcome]] = []
    for standing in standings:
        settings: dict[tuple[object, ...], list[Outcome]] = defaultdict(list)
        for outcome in standing.outcomes:
            settings[(outcome.trial.study, *outcome.setting)].append(outcome)
        for repeated in settings.values():
            seeds = {_seeds(outcome) for outcome in repeated}
            if len(repeated) > 1 and (len(seeds) < len(repeated) or () in seeds):
                alike.append(repeated)
    if alike:
        first, second, *_ = (outcome.trial.name for outcome in alike[0])
        yield (
            f"{sum(map(len, alike))} runs have the same hyperparameters as others and no different"
            f" seeds in their logs, for example {first} and {second}. They count as repetitions of"
            " a setting. If they differ in something else, log that as a hyperparameter."
        )


def _words_of_runs(standings: Sequence[Standing]) -> Iterator[str]:
    """Say which settings in words are another one in each run, as the names of runs are."""
    for standing in standings:
        names = dict.fromkeys(name for each in standing.outcomes for name in each.words)
        for name in names:
            texts = {each.words.get(name) for each in standing.outcomes}
            if len(texts) == len(standing.outcomes) >= OWN_NAMES:
                of = f" of {standing.submission}" if standing.submission else ""
                yield (
                    f"Each of {len(texts)} runs{of} has another `{name}`, so each is a setting, and"
                    f" the fastest one counts. If the runs differ in nothing else, leave `{name}`"
                    " out of the log: they are then repetitions."
                )


def _seeds(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((n, str(v)) for n, v in outcome.trial.hyperparameters.items() if is_seed(n))
    )


def _missing_runs(standings: Sequence[Standing]) -> Iterator[str]:
    """Say which submissions were not run on which workloads."""
    ran = {(each.submission, each.workload) for each in standings}
    submissions = dict.fromkeys(each.submission for each in standings)
    missing = [
        f"{submission} on {workload}"
        for workload in _workloads(standings)
        for submission in submissions
        if (submission, workload) not in ran
    ]
    if missing:
        yield f"Not run: {', '.join(missing)}. In profiles and scores that counts as missed."


def _runs_left_out(trials: Sequence[Trial]) -> Iterator[str]:
    """Name the runs that do not count, each with its reason."""
    if not trials:
        return
    named = [f"{trial.name}: {trial.fault}" for trial in trials[:NAMED]]
    if len(trials) > NAMED:
        named.append(
            f"And {plural(len(trials) - NAMED, 'further run')}: `noisescale compare --json` has"
            " them all."
        )
    are = "is" if len(trials) == 1 else "are"
    yield (
        f"{plural(len(trials), 'run')} {are} left out. {' '.join(named)} The answer is of the"
        " other runs. A training that failed before its first evaluation does not count against"
        " its submission."
    )


def _doubtful_clocks(outcomes: Sequence[Outcome], clock: str) -> Iterator[str]:
    """Say what the clock that counts is, where it is not quite what its name says."""
    name = "steps" if clock == "examples" else clock
    doubtful = sum(name in each.trial.doubtful_clocks for each in outcomes)
    if doubtful and name in _CLOCK_DOUBTS:
        of = f"of {doubtful} of {len(outcomes)} runs" if doubtful < len(outcomes) else "of all runs"
        yield f"The {name} {of}{_CLOCK_DOUBTS[name]}"


def _unlike_batch_sizes(standings: Sequence[Standing], clock: str) -> Iterator[str]:
    """Say where steps are compared of batches of different sizes."""
    if clock != "steps":
        return
    for workload in _workloads(standings):
        sizes = {
            each.submission: each.best.trial.batch_size
            for each in standings
            if each.workload == workload and each.best.trial.batch_size > 0
        }
        if not sizes:
            continue
        most, least = max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__)
        if sizes[most] >= UNLIKE * sizes[least]:
            yield (
                f"Steps of different batch sizes are compared{_place(workload)}: {most} has"
                f" {sizes[most]:,.6g} examples in a step, {least} {sizes[least]:,.6g}. A larger"
                " batch takes fewer steps. Compare by examples or time too, or at the same batch"
                " size."
            )


def _unlike_examples(outcomes: Sequence[Outcome], budget: Mapping[str, float]) -> Iterator[str]:
    """Say where runs of as many steps had different numbers of examples, by any clock.

    Their steps are a budget that ended one of them. Without any other budget they are the length of
    a run that missed the goal with fewer examples than a run of a larger batch needed.
    """
    others = {name: most for name, most in budget.items() if name != "steps"}
    for workload in dict.fromkeys(outcome.trial.workload for outcome in outcomes):
        of = [o for o in outcomes if o.trial.workload == workload and o.trained]
        best: dict[tuple[float, str], Outcome] = {}
        for o in sorted(of, key=lambda each: each.rank("steps")):
            if o.trial.batch_size > 0:
                best.setdefault((o.trial.batch_size, o.trial.submission), o)
        ended = "steps" in budget and any(_is_ended(o, budget["steps"], others) for o in of)
        sized = [best[key] for key in sorted(best)]
        pairs = (
            (few, many)
            for few in sized
            for many in reversed(sized)
            if many.trial.batch_size >= UNLIKE * few.trial.batch_size
            and (ended or (not others and _is_short(few, many)))
        )
        if pair := next(pairs, None):
            few, many = pair
            steps = budget["steps"] if ended else _steps_of(few)
            yield (
                f"{plural(steps, 'step')} are different numbers of examples{_place(workload)}:"
                f" {_examples(many, steps)}, {_examples(few, steps)}. A smaller batch may miss the"
                " goal, or seem slower, for that alone. Train all with one budget of examples,"
                " epochs or device-time, and compare by it, for example with --by examples"
                " and --budget examples=100000."
            )


def _is_ended(outcome: Outcome, steps: float, others: Mapping[str, float]) -> bool:
    """Return whether a budget in steps ends a run, and no other budget ends it sooner."""
    measured = outcome.trial.measurements
    try:
        inside = budget_mask(measured, others)
    except Refusal:  # what the others allowed is not known
        return False
    return bool((inside & (measured.steps >= steps)).any())


def _is_short(few: Outcome, many: Outcome) -> bool:
    """Return whether one run missed the goal with fewer examples than another one needed."""
    if few.reached is not None or few.trial.diverged or many.reached is None:
        return False
    return _steps_of(few) * few.trial.batch_size < many.at("steps") * many.trial.batch_size


def _steps_of(outcome: Outcome) -> float:
    return float(outcome.trial.measurements.steps[outcome.trained - 1])


def _examples(outcome: Outcome, steps: float) -> str:
    size, who = outcome.trial.batch_size, outcome.trial.submission
    return f"{steps * size:,.6g} at batch size {size:,.6g}{f' ({who})' if who else ''}"


def _other_units(outcomes: Sequence[Outcome], clock: str) -> Iterator[str]:
    """Say whose examples are far from steps times the batch size, by the clock that counts.

    A batch size that changes makes them differ, too, but not a hundredfold.
    """
    for outcome in outcomes if clock == "examples" else ():
        examples, expected = outcome.at("examples"), outcome.at("steps") * outcome.trial.batch_size
        known = examples > 0 and math.isfinite(examples * expected)
        if known and not 1 / FAR < examples / expected < FAR:
            yield (
                f"{outcome.trial.name} counts {examples:,.4g} examples where its steps times the"
                f" batch size are {expected:,.4g}. Examples of another unit (thousands, tokens)"
                " cannot be compared: write the number of examples, or compare by steps."
            )
            return


def _unlike_epochs(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say where the examples of an epoch differ: some batch size is then not the global one."""
    for workload in dict.fromkeys(each.trial.workload for each in outcomes):
        of_epoch: dict[float, str] = {}
        for trial in (each.trial for each in outcomes if each.trial.workload == workload):
            examples, epochs = trial.measurements.examples, trial.measurements.epochs
            if examples is None or epochs is None:
                continue
            known = np.isfinite(examples) & (examples > 0) & (epochs >= 1) & np.isfinite(epochs)
            if known.any():
                of_epoch[float(examples[known][-1] / epochs[known][-1])] = trial.name
        if of_epoch and max(of_epoch) >= UNLIKE * min(of_epoch):
            many, few = max(of_epoch), min(of_epoch)
            yield (
                f"By batch size times steps, an epoch has {many:,.0f} examples in"
                f" {of_epoch[many]} and {few:,.0f} in {of_epoch[few]}. If both have the same data,"
                " a logged batch size is of one device or one micro-batch, and examples are wrong."
            )


def _late_starts(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say which logs seem to be the rest of a run that was resumed into another folder."""
    for outcome in outcomes:
        steps = outcome.trial.measurements.steps
        if len(steps) < 3:
            continue
        gap = float(np.diff(steps).max())
        if steps[0] > GAP * gap:
            yield (
                f"{outcome.trial.name} was first measured at step {steps[0]:,.0f}, and then at"
                f" least every {gap:,.0f} steps. If it goes on from another run's checkpoint, it"
                " may have reached the goal there, and its seconds begin late: put the event files"
                " of both into one folder."
            )


def _workloads(standings: Sequence[Standing]) -> list[str]:
    return list(dict.fromkeys(standing.workload for standing in standings))


def _place(workload: str) -> str:
    return f" on {workload}" if workload else ""
