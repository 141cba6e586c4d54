# SPDX-License-Identifier: Apache-2.0
"""`tune`: the best result at each cost, by a search of a module's parameters."""

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
from noisescale.lab.tune.answer import Tune
from noisescale.lab.tune.make_job import TuneOptions, tune_job

JOURNAL = "tune.journal"
"""The file of the state, in the folder of the results."""


def tune(
    target: str | Callable[..., Any],
    metric: str,
    *,
    data: str | Callable[[], Any] | None = None,
    search: Mapping[str, Any] | Iterable[str] = MappingProxyType({}),
    space: str | PathLike[str] | None = None,
    maximize: bool = False,
    budget: str | None = None,
    trials: int | None = None,
    max_cost: str | None = None,
    seed: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
    noise_scale: float | None = None,
    run: str | PathLike[str] | None = None,
    max_device_batch_size: int | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    devices: int = 1,
    accelerator: str = "auto",
    strategy: str = "auto",
    precision: str | None = None,
    output: str | PathLike[str] = "tune",
    storage: str | PathLike[str] | None = None,
    name: str = "tune",
    workers: int = 1,
    launcher: str = "local",
    launcher_options: Mapping[str, Any] | None = None,
    lease: float = 60.0,
    cold: bool = False,
    per_device: int = 1,
    progress: Callable[[Tune], None] | None = None,
) -> Tune:
    """Search parameters for the best result at each cost, by CARBS.

    Each training is another process, which a worker starts. The first one has the module's own
    settings. The same call goes on where it was stopped, also with a larger budget.

    Args:
        target: A function that returns a LightningModule and its data. Parameters that are not
            those of the training are its arguments. Workers import it by its name: "train.py:make",
            "package.module:make", or a function that is defined in a file.
        metric: The result, for example "val_loss": a metric that the module logs. Its value at the
            end of a training counts. It is minimised.
        data: What to train on, named like the target. Default: what the target returns, else the
            loaders that the module makes.
        search: Parameters to search, and their values, such as {"learning_rate": (0.001, 1.0),
            "batch_size": (16, 1024), "dropout": (0, 0.5, "linear"), "act": ["relu", "tanh"]}.
            learning_rate, batch_size, weight_decay, momentum, epochs and steps are those of the
            training. Kinds of ranges: log, linear, logit, momentum, int, pow2.
        space: TOML file of parameters, with a table for each: low, high, kind, ...
        maximize: Whether the metric is to rise, as an accuracy is.
        budget: Device-hours for all trainings, such as "2h" or "30m". Those under way may end.
        trials: The most trainings. Give it, or a budget, or both.
        max_cost: The most device-time of one training, such as "10m". It then stops.
        seed: Seed of the search and of its trainings.
        epochs: Epochs of each training. Default: 10. The search begins there if it searches them.
        steps: Steps of each training, instead of epochs.
        noise_scale: The critical batch size, in examples. Epochs and steps are then those at the
            batch size of your loader; others are trained until they have made the same progress.
        run: A run with a NoiseScaleMonitor, which has the noise scale and step times.
        max_device_batch_size: Most examples that fit on a device. Larger batches are accumulated.
        gradient_clip_val: As for the Trainer.
        gradient_clip_algorithm: As for the Trainer.
        devices: Devices of each training, on one machine.
        accelerator: As for the Trainer.
        strategy: As for the Trainer.
        precision: As for the Trainer.
        output: Folder of the results. It gets `trials.csv`, `front.csv`, and a folder for each
            training.
        storage: Where the state is kept, as for `sweep`. Default: tune.journal in the folder of the
            results.
        name: Name of the search in the storage.
        workers: Workers that are started here. With 0 this call only waits, and the work is done by
            `noisescale work` elsewhere.
        launcher: Where the workers run: "local", "slurm" (by submitit) or "ray".
        launcher_options: Options of the launcher, such as {"slurm_partition": "gpu"}.
        lease: Seconds of silence after which a worker counts as lost.
        cold: Whether each training imports its packages anew. Otherwise it is a fork of a process
            that has imported them, where that changes nothing.
        per_device: Trainings side by side on each device, for small models. Their times are those
            of a device that they share.
        progress: Called every two seconds with the search as it stands, as for `sweep`.

    Returns:
        All trainings, the front of cost and result, and how each parameter grows with the cost
        along it. A single best result may be lucky: repeat it with other seeds.

    Raises:
        ValueError: If an argument is impossible, the module or data do not fit, the storage has
            another search of this name, or all workers have stopped.
        MissingExtraError: If Optuna or scikit-learn is not installed:
            `pip install "noisescale[tune]"`.

    Examples:
        ```python
        ranges = {"learning_rate": (0.001, 1.0), "batch_size": (16, 1024)}
        found = noisescale.tune("train.py:make", "val_loss", search=ranges, budget="1h")
        found.to_html("tune.html")
        ```

    References:
        Fetterman et al. 2023, arXiv:2306.08055.
    """
    given = locals()
    for package in ("optuna", "sklearn"):
        need(package, "`noisescale.tune`", extra="tune")
    place = Place(name, str(storage or Path(output) / JOURNAL), Path(output))
    started = options_of(WorkersToStart, given)
    job = tune_job(Training.of(given), options_of(TuneOptions, given))
    return train_job(job, place, started, lambda found: Tune.of(job, found, place), progress)
