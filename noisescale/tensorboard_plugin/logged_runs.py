# SPDX-License-Identifier: Apache-2.0
"""The runs with a monitor, from TensorBoard's data provider, and their records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tensorboard import errors
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter

from noisescale.history.history import History
from noisescale.history.metric_names import TRAINER_PREFIXES, monitor_of, prefix_of
from noisescale.history.reading import read_run
from noisescale.history.record import RECORD
from noisescale.refusal import Refusal
from noisescale.tensorboard_plugin.query import index, short


class Measured(NamedTuple):
    """What a monitor measured of one optimizer in one run."""

    run: str
    monitor: str = ""
    """The name of the monitor; empty if it has none."""
    optimizer: int = 0

    @property
    def id(self) -> str:
        """The run as a query, without what is usual.

        Examples:
            >>> Measured("a b").id, Measured("gan", optimizer=1).id
            ('run=a+b', 'run=gan&optimizer=1')
        """
        return urlencode({name: value for name, value in self._asdict().items() if value})

    @property
    def name(self) -> str:
        """The run as a reader knows it, with the monitor and the optimizer if there are several."""
        number = f"optimizer {self.optimizer}" if self.optimizer else ""
        return ", ".join(part for part in (self.run, self.monitor, number) if part)

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Measured:
        """Read a query.

        Raises:
            ValueError: If the number of the optimizer is none.
        """
        return cls(query.get("run", ""), query.get("monitor", ""), index(query, "optimizer"))


class LoggedRuns(NamedTuple):
    """The runs of an experiment. `provider` is the data provider that plugins get."""

    provider: Any
    ctx: RequestContext
    experiment: str
    logdir: str = ""
    """The folder of all runs, if TensorBoard was given one."""

    def has_runs(self) -> bool:
        """Return whether there is a run with a monitor."""
        without_a_name = [f"{before}{prefix_of(0)}batch_size" for before in TRAINER_PREFIXES]
        return bool(self._tags(without_a_name)) or bool(self.list_measured())

    def list_measured(self) -> list[Measured]:
        """Return what was measured, sorted by runs, monitors and optimizers.

        A run of which nothing could be measured is in the list, too: its record says why.
        """
        found = {
            Measured(run, *who)
            for run, tags in self._tags(None).items()
            for tag in tags
            if (who := monitor_of(tag))
        }
        refused = self.places().keys() - {each.run for each in found}
        found |= {Measured(run) for run in refused if self._record_of(run) is not None}
        return sorted(found)

    def places(self) -> dict[str, int]:
        """Return the place of each run, from which TensorBoard's page takes the run's colour.

        The order is that of TensorBoard's route `/data/runs` (2.21): by the time of the first
        event.
        """
        runs = self.provider.list_runs(self.ctx, experiment_id=self.experiment)
        begun = [
            (math.inf if run.start_time is None else run.start_time, run.run_name) for run in runs
        ]
        return {name: place for place, (_, name) in enumerate(sorted(begun))}

    def _tags(self, wanted: list[str] | None) -> dict[str, Any]:
        """Return the wanted tags that exist in each run (all tags if `wanted` is None)."""
        found = self.provider.list_scalars(
            self.ctx,
            experiment_id=self.experiment,
            plugin_name="scalars",
            run_tag_filter=RunTagFilter(tags=wanted),
        )
        return {run: tags for run, tags in found.items() if tags}

    def _folder_of(self, run: str) -> Path | None:
        """Return the folder of a run within the log folder, where links may lead elsewhere."""
        inner = PurePath(run)
        if not self.logdir or inner.anchor or ".." in inner.parts:
            return None
        folder = Path(self.logdir, inner)
        try:
            return folder if folder.is_dir() else None
        except OSError:  # a name that is too long
            return None

    def _record_of(self, run: str) -> Path | None:
        folder = self._folder_of(run)
        return folder / RECORD if folder and (folder / RECORD).is_file() else None

    def history(self, measured: Measured) -> History:
        """Return what was recorded of one optimizer by one monitor, in the folder of the run.

        Raises:
            NotFoundError: If there is no such run, monitor or optimizer.
            ValueError: If the history has no whole row, a file is damaged, or the run's folder is
                on another machine.
        """
        if (file := self._record_of(measured.run)) is not None:
            seen = file.stat()
            return _history_in(file.parent, *measured[1:], (seen.st_size, seen.st_mtime_ns))
        if measured not in self.list_measured():
            raise _missing_run(measured)
        raise Refusal(
            "logdir",
            f"be a folder of this machine, with the file {RECORD} of each run",
            self.logdir or "none",
            "TensorBoard reads what loggers wrote, which is not all of it. Run `noisescale predict`"
            " where the folder of the run is, or start TensorBoard there with `--logdir`.",
        )


@lru_cache(maxsize=64)
def _history_in(run: Path, monitor: str, optimizer: int, seen: tuple[int, int]) -> History:
    """Return a history, from a cache as long as the record is the same."""
    try:
        return read_run(run, monitor=monitor, optimizer=optimizer)
    except Refusal as error:
        if error.word == "absent":
            raise _missing_run(Measured(run.name, monitor, optimizer)) from error
        raise


def _missing_run(measured: Measured) -> errors.NotFoundError:
    which = f" of optimizer {measured.optimizer}" if measured.optimizer else ""
    which += f" by monitor {short(measured.monitor)}" if measured.monitor else ""
    run = short(measured.run)
    return errors.NotFoundError(f"`run` must have the noise scale{which}, got {run}.")
