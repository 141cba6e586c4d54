# SPDX-License-Identifier: Apache-2.0
"""`branch`: the critical batch size of a run, by training branches at other batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

from noisescale.checks import require_folder_of
from noisescale.extras import need
from noisescale.history.segments import Array
from noisescale.lab.branch.answer import Branches
from noisescale.lab.branch.branch_by_workers import branch_by_workers
from noisescale.lab.branch.cost import BranchCost
from noisescale.lab.branch.planning import BranchOptions, plan_branches
from noisescale.lab.branch.train_branches import train_branches
from noisescale.lab.jobs.jobs import Training, options_of
from noisescale.lab.jobs.workers import WorkersToStart
from noisescale.refusal import Refusal
from noisescale.user_code.targets import module_and_data, refuse_out_of_memory, train_and_val

Run = Mapping[str, Array] | str | PathLike[str]


def branch(
    run: Run,
    checkpoint: str | PathLike[str],
    target: Any,
    data: Any = None,
    *,
    batch_sizes: Sequence[str | float] | str = "1x,4x,16x",
    until: str | PathLike[str] | None = None,
    orders: int = 3,
    learning_rate: str = "auto",
    loss_examples: int = 2048,
    max_device_batch_size: int | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    devices: int = 1,
    nodes: int = 1,
    accelerator: str = "auto",
    strategy: str = "auto",
    precision: str | None = None,
    output: str | PathLike[str] = "branches.json",
    monitor: str | None = None,
    storage: str | None = None,
    launcher: str | None = None,
    launcher_options: Mapping[str, Any] | None = None,
    workers: int = 1,
    lease: float = 60.0,
    cold: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Branches:
    """Measure the critical batch size by training branches of a run at larger batch sizes.

    Branches use the module's code, the optimizer's state and the learning rate schedule of the run,
    but not its callbacks. Each branch is saved in `output` as soon as it ends. The same call with
    the same file continues.

    Args:
        run: `monitor.history`, or the folder of a TensorBoard or CSVLogger run.
        checkpoint: A checkpoint of the run, from which branches start. In a folder of checkpoints,
            the checkpoint nearest to the middle of the run is used.
        target: A LightningModule, or a function that returns one, alone or with its data; or a text
            that names one of these, "file.py:name" or "package.module:name". Workers need a text,
            or a function that they can import.
        data: A Dataset, a DataLoader, a LightningDataModule, or a pair to train and to validate on;
            or a function or a text as for `target`. Default: what the target returns, else the
            loaders that the module makes.
        batch_sizes: Batch sizes of the branches. "4x" is four times the run's batch size; 512 is
            512 examples. "1x" checks that branches train like the run.
        until: A later checkpoint of the run. Branches train until they reach its loss. Default: the
            last checkpoint.
        orders: Branches at each batch size. Each has its own order of the data.
        learning_rate: The rule by which the learning rate follows the batch size: "sqrt", "linear",
            "adascale", "capped_sqrt" or "none". "auto": sqrt for Adam; for SGD adascale, or linear
            if the noise scale is not resolved.
        loss_examples: Examples in the average of a loss. They are always the same ones.
        max_device_batch_size: Most examples that fit on a device. Default: the number in the run.
        gradient_clip_val: Limit of gradient clipping, if the run clipped.
        gradient_clip_algorithm: Kind of gradient clipping, if the run clipped: "norm" or "value".
        devices: Devices on each node.
        nodes: Number of nodes. The same program has to be started on each.
        accelerator: As in training.
        strategy: As in training.
        precision: As in training.
        output: The JSON file of the branches. `predict` reads it, too.
        monitor: Name of the monitor, if it has a name.
        storage: Where the state of workers is kept: a journal file, or the URL of a database.
            Default: a journal beside `output`. Without it and without a launcher the branches are
            trained in this process, one after the other.
        launcher: Have branches trained by workers: "local", "slurm" (by submitit) or "ray".
        launcher_options: Options of the launcher, such as {"slurm_partition": "gpu"}.
        workers: Workers to start. 0: the work is done by `noisescale work` elsewhere.
        lease: Seconds of silence after which workers count as lost.
        cold: Whether each training by workers imports its packages anew, as for `sweep`.
        progress: Called with sentences about the cost and each branch, for example `print`.

    Returns:
        The branches, and the critical batch size that they and the noise scale give.

    Raises:
        ValueError: If an argument is wrong or does not fit the run, the checkpoints are of another
            module, the run's loss did not fall, or a worker gave a branch up.
        OSError: If a file cannot be read or written.
    """
    given = locals()
    output = Path(output)
    require_folder_of("output", output)
    started = options_of(WorkersToStart, {**given, "launcher": launcher or "local"})
    by_workers = launcher is not None or storage is not None
    if by_workers:
        need("optuna", "Training by workers")
        training = Training.of(given)
        _refuse_for_workers(run, nodes)
    else:  # nobody else loads the target
        training = options_of(Training, {**given, "target": "", "data": None})
    asked = _branch_options(given)
    branching = plan_branches(asked)
    say = progress or (lambda _: None)
    cost = BranchCost(branching, loss_examples).document()
    for line in (cost.headline, *(f"{one.label} {one.sentence}" for one in cost.answers)):
        say(f"{line}.")
    module, examples = module_and_data(target, data)
    setting = (branching, module, train_and_val(examples)[0], output)
    options: dict[str, Any] = {"loss_examples": loss_examples, "progress": say}
    with refuse_out_of_memory(
        "max_device_batch_size",
        "Finished branches are kept. Give a smaller number: larger batches are then accumulated.",
    ):
        if by_workers:
            place = storage or str(output.with_suffix(".journal"))
            branched = branch_by_workers(*setting, asked, training, place, started, **options)
        else:
            options |= training.trainer_options
            branched = train_branches(*setting, **options, num_nodes=nodes)
    by_noise_scale = branched.by_noise_scale(branching.history)
    folder = None if isinstance(run, Mapping) else str(run)
    return Branches(branched, by_noise_scale, str(output), folder)


def branch_cost(*arguments: Any, **named: Any) -> BranchCost:
    """Return what `branch` would cost, and train nothing. The arguments are those of `branch`.

    Raises:
        ValueError: If an argument is wrong or does not fit the run.
        OSError: If a file cannot be read.
    """
    bound = signature(branch).bind(*arguments, **named)
    bound.apply_defaults()
    given = bound.arguments
    branching = plan_branches(_branch_options(given))
    module_and_data(given["target"], given["data"])  # refuses what `branch` would refuse
    return BranchCost(branching, given["loss_examples"])


def _branch_options(given: Mapping[str, Any]) -> BranchOptions:
    return options_of(BranchOptions, {**given, "devices": given["devices"] * given["nodes"]})


def _refuse_for_workers(run: Run, nodes: int) -> None:
    if nodes > 1:
        raise Refusal(
            "nodes",
            "be 1 for branches by workers",
            f"{nodes}: a worker trains on one machine",
            "Leave `launcher` and `storage` out.",
        )
    if isinstance(run, Mapping):
        raise Refusal(
            "run",
            "be a folder for branches by workers",
            "a history, which other processes cannot read",
            "Give the folder of the run, or leave `launcher` and `storage` out.",
        )
