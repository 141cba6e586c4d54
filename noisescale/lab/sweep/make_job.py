# SPDX-License-Identifier: Apache-2.0
"""The settings of a sweep, checked, and completed by what module and data bring along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from noisescale.checks import refuse, require_count, require_positive
from noisescale.lab.jobs.jobs import TOO_LARGE, Training
from noisescale.lab.parameter_texts import Searched, sweep_parameters
from noisescale.lab.sweep.search import Search
from noisescale.lab.sweep.settings import SweepJob, check_goal, read_batch_sizes
from noisescale.made.targets import module_and_data, refuse_out_of_memory, shield_process

MOST_SEED = 2**31
"""The end of the seeds. The seed of a later round is larger, and the sampler has a limit."""

UNUSUAL_SEED = 67_280_421_310_721
"""Set before the script is loaded. If there is another one afterwards, the script has set it."""


def sweep_job(
    training: Training,
    goal: str,
    batch_sizes: str | Iterable[int],
    search: Searched,
    *,
    trials: int,
    repeats: int,
    seed: int,
    epochs: float,
    max_device_batch_size: int | None,
) -> SweepJob:
    """Return the settings of a sweep, once module and data were tried for one step.

    Args:
        training: How each training is run.
        goal: See `noisescale.sweep`, as for the other arguments.
        batch_sizes: Global.
        search: Hyperparameters and their ranges.
        trials: Settings of the first round at each batch size.
        repeats: Trainings of the best setting.
        seed: Of the settings.
        epochs: The most epochs at the smallest batch size.
        max_device_batch_size: Larger batches are accumulated.

    Raises:
        ValueError: If a value is impossible, or the module or data do not fit.
    """
    reached, sizes = check_goal(goal), read_batch_sizes(batch_sizes)
    parameters = sweep_parameters(search)
    if require_count("trials", trials, "Give 9.") < 3:
        refuse("trials", "be at least 3", str(trials), "Give 9.")
    require_count("repeats", repeats, "Give 3.")
    if not 0 <= seed < MOST_SEED:
        refuse("seed", f"be from 0 to below {MOST_SEED:,}", f"{seed:,}", "Give 0.")
    require_positive("epochs", epochs, "Give 50, for example.")
    require_count("devices", training.devices, "Give 1.")
    if max_device_batch_size is not None:
        require_count("max_device_batch_size", max_device_batch_size, "Leave it out for no limit.")
    import torch

    from noisescale.lab.sweep.trial_fit import MadeModule, describe
    from noisescale.lightning.trainer_access import isolate_rng

    names = [parameter.name for parameter in parameters]
    with (
        shield_process(),
        isolate_rng(),
        refuse_out_of_memory("max_device_batch_size", TOO_LARGE),
    ):
        torch.manual_seed(UNUSUAL_SEED)
        module, data = module_and_data(training.target, training.data)
        seeded = torch.initial_seed() != UNUSUAL_SEED
        own = describe(MadeModule(module, data), training, reached, min(sizes), names)
    if not own.learning_rate > 0:
        refuse(
            "configure_optimizers",
            "set a positive learning rate",
            f"{own.learning_rate:g}",
            "The sweep multiplies it.",
        )
    return SweepJob(
        training,
        replace(own, seeded=seeded),
        reached,
        sizes,
        Search(parameters, trials, repeats, seed),
        epochs,
        max_device_batch_size,
    )
