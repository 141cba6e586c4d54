# SPDX-License-Identifier: Apache-2.0
"""The settings of a sweep, checked, and completed by what module and data bring along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from noisescale.checks import refuse, require_count, require_positive
from noisescale.lab.jobs.jobs import TOO_LARGE, Training
from noisescale.lab.parameter_texts import Searched, sweep_parameters
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import ModuleDefaults, SweepJob, check_goal, read_batch_sizes
from noisescale.user_code.targets import module_and_data, refuse_out_of_memory, shield_process

if TYPE_CHECKING:
    from noisescale.history.metrics import Goal

MOST_SEED = 2**31
"""The end of the seeds. The seed of a later round is larger, and the sampler has a limit."""

UNUSUAL_SEED = 67_280_421_310_721
"""Set before the script is loaded. If there is another one afterwards, the script has set it."""


@dataclass(frozen=True)
class SweepOptions:
    """The arguments of `noisescale.sweep` that say what is searched."""

    goal: str
    batch_sizes: str | Iterable[int]
    search: Searched
    trials: int
    repeats: int
    epochs: float
    seed: int
    max_device_batch_size: int | None


def sweep_job(training: Training, asked: SweepOptions) -> SweepJob:
    """Return the settings of a sweep, once module and data were tried for one step.

    Raises:
        ValueError: If a value is impossible, or the module or data do not fit.
    """
    goal, sizes = check_goal(asked.goal), read_batch_sizes(asked.batch_sizes)
    parameters = sweep_parameters(asked.search)
    if require_count("trials", asked.trials, "Give 9.") < 3:
        refuse("trials", "be at least 3", str(asked.trials), "Give 9.")
    require_count("repeats", asked.repeats, "Give 3.")
    require_positive("epochs", asked.epochs, "Give 50, for example.")
    check_numbers(training, asked.seed, asked.max_device_batch_size)
    own = own_of(training, goal, min(sizes), [each.name for each in parameters])
    if not own.learning_rate > 0:
        refuse(
            "configure_optimizers",
            "set a positive learning rate",
            f"{own.learning_rate:g}",
            "The sweep multiplies it.",
        )
    search = Search(parameters, asked.trials, asked.repeats, asked.seed)
    return SweepJob(training, own, goal, sizes, search, asked.epochs, asked.max_device_batch_size)


def check_numbers(training: Training, seed: int, max_device_batch_size: int | None) -> None:
    """Refuse impossible numbers of what a sweep and a search have in common."""
    if not 0 <= seed < MOST_SEED:
        refuse("seed", f"be from 0 to below {MOST_SEED:,}", f"{seed:,}", "Give 0.")
    require_count("devices", training.devices, "Give 1.")
    if max_device_batch_size is not None:
        require_count("max_device_batch_size", max_device_batch_size, "Leave it out for no limit.")


def own_of(
    training: Training,
    goal: Goal,
    batch_size: int,
    searched: Sequence[str],
    arguments: Mapping[str, Any] | None = None,
) -> ModuleDefaults:
    """Return what module and data bring along, once they were tried for one step.

    Args:
        training: How they are trained.
        goal: Its metric has to be there.
        batch_size: For data without a loader.
        searched: Names of hyperparameters that are searched.
        arguments: Of the function that makes the module.
    """
    import torch

    from noisescale.lab.sweep.trial_fit import MadeModule, describe
    from noisescale.lightning.trainer_access import isolate_rng

    with (
        shield_process(),
        isolate_rng(),
        refuse_out_of_memory("max_device_batch_size", TOO_LARGE),
    ):
        torch.manual_seed(UNUSUAL_SEED)
        module, data = module_and_data(training.target, training.data, arguments)
        seeded = torch.initial_seed() != UNUSUAL_SEED
        own = describe(MadeModule(module, data), training, goal, batch_size, searched)
    return replace(own, seeded=seeded)
