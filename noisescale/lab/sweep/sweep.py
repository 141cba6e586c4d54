# SPDX-License-Identifier: Apache-2.0
"""`sweep`: the steps to a result at several batch sizes, each with its best learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from noisescale.extras import need
from noisescale.lab.jobs.jobs import Training, options_of
from noisescale.lab.jobs.train_job import train_job
from noisescale.lab.jobs.workers import Place, WorkersToStart
from noisescale.lab.sweep.answer import Sweep
from noisescale.lab.sweep.make_job import SweepOptions, sweep_job

JOURNAL = "sweep.journal"
"""The file of the state, in the folder of the results."""


def sweep(
    target: str | Callable[[], Any],
    goal: str,
    batch_sizes: str | Iterable[int],
    *,
    data: str | Callable[[], Any] | None = None,
    search: Mapping[str, Any] | Iterable[str] = MappingProxyType({}),
    trials: int = 9,
    repeats: int = 3,
    epochs: float = 50.0,
    seed: int = 0,
    max_device_batch_size: int | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    devices: int = 1,
    accelerator: str = "auto",
    strategy: str = "auto",
    precision: str | None = None,
    output: str | PathLike[str] = "sweep",
    storage: str | PathLike[str] | None = None,
    name: str = "sweep",
    workers: int = 1,
    launcher: str = "local",
    launcher_options: Mapping[str, Any] | None = None,
    lease: float = 60.0,
    cold: bool = False,
    per_device: int = 1,
    progress: Callable[[Sweep], None] | None = None,
) -> Sweep:
    """Measure the steps to a result at several batch sizes, each with its best learning rate.

    Each training is another process, which a worker starts. The same call with the same
    storage goes on where it was stopped, also after an interrupt.

    Args:
        target: A function that returns a LightningModule and its data, or a LightningModule.
            Workers import it by its name: "train.py:make", "package.module:make", or a function
            that is defined in a file.
        goal: The result to reach, for example "val_loss<=0.15" or "val_acc>=0.9", in a metric that
            the module logs. It is evaluated by the module's validation.
        batch_sizes: Global batch sizes in examples, at least two; or "16..2048" for powers of two.
        data: What to train on, named like the target. Default: what the target returns, else the
            loaders that the module makes.
        search: Hyperparameters to search, and their ranges, such as {"momentum": (0.5, 0.99)}:
            learning_rate, momentum (for Adam its first beta) or weight_decay. The learning rate is
            always searched, by default from 1/8 to 8 times the module's own.
        trials: Quasi-random settings at each batch size. A third as many refine the best one.
        repeats: Trainings of the best setting, with different seeds.
        epochs: Most epochs of a training at the smallest batch size. At k times this size it is √k
            times as many.
        seed: Seed of the quasi-random settings.
        max_device_batch_size: Most examples that fit on a device. Larger batches are accumulated.
        gradient_clip_val: As for the Trainer.
        gradient_clip_algorithm: As for the Trainer.
        devices: Devices of each training, on one machine.
        accelerator: As for the Trainer.
        strategy: As for the Trainer.
        precision: As for the Trainer.
        output: Folder of the results. It gets `sweep.csv` for `fit`, `trials.csv` for `compare`,
            and a folder for each training.
        storage: Where the state is kept: a journal file, also on a shared disk; the URL of a
            database; or grpc://host:port of Optuna's proxy. Default: sweep.journal in the folder of
            the results.
        name: Name of the sweep in the storage.
        workers: Workers that are started here. With 0 this call only waits, and the work is done by
            `noisescale work` elsewhere.
        launcher: Where the workers run: "local", "slurm" (by submitit) or "ray".
        launcher_options: Options of the launcher, such as {"slurm_partition": "gpu"}.
        lease: Seconds of silence after which a worker counts as lost.
        cold: Whether each training imports its packages anew. Otherwise it is a fork of a process
            that has imported them, where that changes nothing.
        per_device: Trainings side by side on each device, for small models. Their times are those
            of a device that they share.
        progress: Called every two seconds with the sweep as it stands. In a notebook, for example,
            a function that calls `clear_output(wait=True)` and `display` of IPython.

    Returns:
        The steps and the best learning rate of each batch size, and the critical batch size with
        its interval. `reached` is False if no training reached the goal.

    Raises:
        ValueError: If an argument is impossible, the module or data do not fit, the storage has
            another sweep of this name, or all workers have stopped.
        MissingExtraError: If Optuna is not installed: `pip install "noisescale[sweep]"`.

    Examples:
        ```python
        found = noisescale.sweep("train.py:make", "val_loss<=0.15", [16, 64, 256, 1024])
        print(found.to_text())
        ```

    References:
        Shallue et al. 2019, arXiv:1811.03600.
    """
    given = locals()
    need("optuna", "`noisescale.sweep`")
    place = Place(name, str(storage or Path(output) / JOURNAL), Path(output))
    started = options_of(WorkersToStart, given)
    job = sweep_job(Training.of(given), options_of(SweepOptions, given))
    return train_job(job, place, started, lambda found: Sweep.of(job, found, place), progress)
