# SPDX-License-Identifier: Apache-2.0
"""The runs with a monitor and their histories, from TensorBoard's data provider."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
from tensorboard import errors
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter

from noisescale.history.history import COLUMNS, History
from noisescale.history.metric_names import (
    ABOUT_RUN,
    TRAINER_PREFIXES,
    monitor_of,
    name_in,
    prefix_of,
)
from noisescale.history.reading import history_from_scalars, read_run
from noisescale.history.run_files import files_of
from noisescale.refusal import Refusal
from noisescale.tensorboard_plugin.query import index
from noisescale.tensorboard_plugin.sampled import in_rows, on_common_steps

MOST_POINTS = 1000
"""The number of points of each tag. TensorBoard also keeps this many, at random, with the last."""

TAGS = ("simple", "simple_high", "lower_bound", *COLUMNS, *ABOUT_RUN)
"""The tags to read. Columns that have another name in logs are not found, which does no harm."""


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
        without_a_name = [f"{before}{prefix_of(0)}step" for before in TRAINER_PREFIXES]
        return bool(self._tags(without_a_name)) or bool(self.list_measured())

    def list_measured(self) -> list[Measured]:
        """Return what was measured, sorted by runs, monitors and optimizers."""
        return sorted(
            {
                Measured(run, *who)
                for run, tags in self._tags(None).items()
                for tag in tags
                if (who := monitor_of(tag))
            }
        )

    def _tags(self, wanted: list[str] | None) -> dict[str, Any]:
        """Return the wanted tags that exist in each run (all tags if `wanted` is None)."""
        found = self.provider.list_scalars(
            self.ctx,
            experiment_id=self.experiment,
            plugin_name="scalars",
            run_tag_filter=RunTagFilter(tags=wanted),
        )
        return {run: tags for run, tags in found.items() if tags}

    def files_of(self, run: str) -> list[Path]:
        """Return the event files of a run; none if they are on another machine."""
        folder = Path(self.logdir, run)
        return files_of(folder) if self.logdir and folder.is_dir() else []

    def history(self, measured: Measured) -> History:
        """Return what was logged of one optimizer by one monitor, from the files of the run.

        TensorBoard keeps a sample of the points of each metric. If the run's files are on another
        machine, the history is made of these points.

        Raises:
            NotFoundError: If there is no such run, monitor or optimizer.
            ValueError: If the history has no whole row, or a file is damaged.
        """
        if files := self.files_of(measured.run):
            sizes = tuple(file.stat().st_size for file in files)
            return _history_in_files(Path(self.logdir, measured.run), *measured[1:], sizes)
        return self._history_in_points(measured)

    def _history_in_points(self, measured: Measured) -> History:
        run, monitor, optimizer = measured
        prefix = prefix_of(optimizer, monitor)
        tags = [before + prefix + tag for before in TRAINER_PREFIXES for tag in TAGS]
        found = self.provider.read_scalars(
            self.ctx,
            experiment_id=self.experiment,
            plugin_name="scalars",
            downsample=MOST_POINTS,
            run_tag_filter=RunTagFilter(runs=[run], tags=tags),
        )
        logged = {
            prefix + str(name_in(tag, prefix)): (
                np.array([point.step for point in points], dtype=np.float64),
                np.array([point.wall_time for point in points], dtype=np.float64),
                np.array([point.value for point in points], dtype=np.float64),
            )
            for tag, points in found.get(run, {}).items()
        }
        if (base := f"{prefix}step") not in logged:
            raise _missing_run(measured)
        scalars = on_common_steps(in_rows(logged, base), base)
        return history_from_scalars(scalars, optimizer=optimizer, monitor=monitor, source=run)


@lru_cache(maxsize=64)
def _history_in_files(run: Path, monitor: str, optimizer: int, sizes: tuple[int, ...]) -> History:
    """Return a history, from a cache as long as the files have the same sizes."""
    try:
        return read_run(run, monitor=monitor, optimizer=optimizer, allow_truncated=True)
    except Refusal as error:
        if error.word in ("unmeasured", "absent"):
            raise _missing_run(Measured(run.name, monitor, optimizer)) from error
        raise


def _missing_run(measured: Measured) -> errors.NotFoundError:
    which = f" of optimizer {measured.optimizer}" if measured.optimizer else ""
    which += f" by monitor {measured.monitor!r}" if measured.monitor else ""
    return errors.NotFoundError(f"`run` must have the noise scale{which}, got {measured.run!r}.")
