# SPDX-License-Identifier: Apache-2.0
"""A run in TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from noisescale.extras import need
from noisescale.history.metric_names import ROOT
from noisescale.history.run_files import files_of
from noisescale.lab.compare.readers.found import Found, is_event_file, named
from noisescale.lab.compare.readers.hyperparameters import read_hparams
from noisescale.lab.compare.readers.logged_run import EPOCHS, Logged, LoggedRun, trial_of
from noisescale.printable import printable

_HYPERPARAMETERS = b"_hparams_/"
_NEEDED = (_HYPERPARAMETERS, *(each.encode() for each in (ROOT, *EPOCHS)))


def read_event_run(run: Path, below: Path, metric: str, submission: str | None) -> Found:
    """Read a run from the event files in a folder, or from one of them.

    NoiseScaleMonitor is not needed, but makes the trial more exact, see `trial_of`. Without it:

    - The steps are those of the events. Lightning logs under the number of the step before: a run
      with an hparams.yaml, which Lightning's logger writes, counts one step more.
    - The seconds are the time since the first event of the run, with validations. A run that was
      resumed has several event files. The time between two files does not count; what was trained
      twice counts twice.

    Hyperparameters are those of hparams.yaml, if PyYAML is installed, and those that were logged
    for TensorBoard's page of hyperparameters: into the same folder as by Lightning, or into a
    folder in it as by torch's `add_hparams`.

    A file may end within an event, as that of a run that was killed.

    Args:
        run: The folder or file.
        below: The path that was asked for, which names the trial.
        metric: The tag.
        submission: See `read_trials`.

    Raises:
        MissingExtraError: If TensorBoard is not installed.
    """
    need("tensorboard", f"Reading the event files of {printable(run)}")
    from noisescale.history.event_files import read_scalars

    needed = (*_NEEDED, metric.encode())
    files = files_of(run)
    logged = read_scalars(files, lambda record: any(each in record for each in needed))
    folder = run.parent if run.is_file() else run
    within = sorted(file for file in folder.glob("*/*") if is_event_file(file.name))
    apart = read_scalars(within, lambda record: _HYPERPARAMETERS in record).hyperparameters
    source = LoggedRun(
        source=str(run),
        scalars={tag: Logged(*scalar) for tag, scalar in logged.scalars.items()},
        behind=float((folder / "hparams.yaml").is_file()),
        hyperparameters=apart | logged.hyperparameters | read_hparams(folder),
    )

    def metrics() -> Iterable[str]:
        return read_scalars(files).scalars

    return Found([trial_of(source, named(run, below), metric, submission)], metrics)
