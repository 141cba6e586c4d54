# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - the package of the extra is asked for before it is imported.
"""The state of a job, kept in a storage of Optuna: which task is waiting, running, done.

Each attempt at a task is a trial of an Optuna study. Workers change a trial's state from waiting to
running. Optuna's storages do so for one worker alone, except for SQLite: there the last of several
that do so at once has the trial. While a worker trains, it renews a lease, a number in the trial.
Others note by their own clocks how long a lease has not changed: no two clocks are ever compared.
If a lease has not changed for as long as its worker has said, the worker is lost, and the task is
put back.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from noisescale.extras import need
from noisescale.history.metrics import Goal
from noisescale.lab.jobs.jobs import FAILED, Entry, Job, Record, State, Task, results_of
from noisescale.lab.jobs.storage import open_storage, without_password
from noisescale.refusal import Refusal

need("optuna", "A sweep")

from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

ATTEMPTS = 2
"""A task that fails this many times is given up."""

LOSSES = 3
"""A task whose worker is lost this many times is given up: it may be what ends the workers."""

LEASE = 60.0
"""Seconds after which a worker that does not renew its lease counts as lost."""

LOST = "its worker was lost"

_JOB, _FORGOTTEN = "noisescale job", "noisescale forgotten"
_KEY, _SPEC, _LEASE, _WORKER, _RESULT, _REASON = (
    "key",
    "spec",
    "lease",
    "worker",
    "result",
    "reason",
)


class LostError(Exception):
    """The task was put back: this worker took too long to renew its lease."""


class Ledger:
    """The tasks of one job.

    Args:
        storage: An opened storage of Optuna.
        name: Name of the study.
        lease: Seconds after which this worker counts as lost if it is silent.
    """

    def __init__(self, storage: BaseStorage, name: str, lease: float = LEASE) -> None:
        self._storage, self.name, self.lease = storage, name, lease
        self._study = self._study_id()
        self._seen: dict[int, tuple[Any, float]] = {}

    @classmethod
    def begin(cls, place: str, name: str, job: Job, lease: float = LEASE) -> Ledger:
        """Open the ledger of a job, or make it.

        Failures of an earlier time are forgotten, so that their tasks are tried again.

        Raises:
            ValueError: If the storage has a job of this name with other settings.
        """
        storage = open_storage(place, new=True)
        try:
            made = storage.create_new_study([StudyDirection.MINIMIZE], name)
            storage.set_study_user_attr(made, _JOB, _job_text(job))
        except DuplicatedStudyError:
            pass
        ledger = cls(storage, name, lease)
        known, now = json.loads(ledger._job_text()), json.loads(_job_text(job))
        adjusted = {name: now[name] for name in job.adjustable}
        goes_on = {**known, **adjusted} != known
        known |= adjusted
        if differing := ", ".join(_differences(known, now)):
            raise Refusal(
                "storage",
                "have a job with the same settings",
                f"{without_password(place)} with the job {name!r}, which differs in {differing}",
                "Give the settings from before. For a new job give another `--output`, and"
                " another `--name` or storage if you gave one.",
            )
        if goes_on:
            storage.set_study_user_attr(ledger._study, _JOB, _job_text(job))
        ledger._forget_failures()
        return ledger

    @classmethod
    def open(cls, place: str, name: str | None = None, lease: float = LEASE) -> Ledger:
        """Open the ledger of a job that was begun elsewhere.

        Args:
            place: See `open_storage`.
            name: Name of the job. Default: the only one in the storage.
            lease: Seconds after which this worker counts as lost if it is silent.

        Raises:
            ValueError: If there is no such job.
        """
        storage = open_storage(place)
        names = [
            study.study_name for study in storage.get_all_studies() if _JOB in study.user_attrs
        ]
        if name is None and len(names) == 1:
            (name,) = names
        if name not in names:
            found = ", ".join(map(repr, names)) or "none"
            wanted = f"the job {name!r}" if name else "one job, or `--name` given"
            raise Refusal(
                "storage",
                f"have {wanted}",
                found,
                "Check the name, and that `noisescale sweep` was started with this storage.",
            )
        return cls(storage, name, lease)

    @property
    def job(self) -> Record:
        """The settings of the job, from `Job.as_dict`, and its `kind`."""
        found: Record = json.loads(self._job_text())
        return found

    def entries(self) -> dict[str, Entry]:
        """Return each task, by its key, in the order in which they were first wanted."""
        of_key: dict[str, list[FrozenTrial]] = {}
        for trial in sorted(
            self._storage.get_all_trials(self._study, deepcopy=False), key=lambda t: t.number
        ):
            if _KEY in trial.user_attrs:
                of_key.setdefault(trial.user_attrs[_KEY], []).append(trial)
        forgotten = self._forgotten()
        found = {}
        for key, trials in of_key.items():
            found[key] = _entry(key, trials, [t for t in trials if t.number not in forgotten])
        return found

    def results(self) -> dict[str, Record]:
        """Return the results of tasks that are done or given up."""
        return results_of(self.entries())

    def want(self, tasks: Iterable[Task]) -> None:
        """Add the tasks that are not in the ledger, and attempts at tasks whose last one failed."""
        self._add(
            (task, create_trial(state=TrialState.WAITING, user_attrs=_attributes(task)))
            for task in tasks
        )

    def take(self, done: Iterable[tuple[Task, Record]]) -> None:
        """Add tasks with results that were found elsewhere, so that nobody trains them again."""
        self._add(
            (
                task,
                create_trial(
                    state=TrialState.COMPLETE,
                    value=0.0,
                    user_attrs=_attributes(task) | {_RESULT: json.dumps(dict(result))},
                ),
            )
            for task, result in done
        )

    def _add(self, attempts: Iterable[tuple[Task, FrozenTrial]]) -> None:
        known = self.entries()
        for task, attempt in attempts:
            if task.key not in known or known[task.key].state is State.FAILED:
                self._storage.create_new_trial(self._study, attempt)

    def claim(self, keys: Iterable[str], worker: Record) -> Entry | None:
        """Make this worker the one that trains a task; None if no task is waiting.

        Args:
            keys: The tasks, in the order in which they are to be tried.
            worker: Host, process and name of the worker.
        """
        entries = self.entries()
        for key in keys:
            entry = entries.get(key)
            if entry is None or entry.state is not State.WAITING:
                continue
            try:
                if not self._storage.set_trial_state_values(entry.trial_id, TrialState.RUNNING):
                    continue
                started = {**worker, "started": time.time(), "lease": self.lease}
                self._storage.set_trial_user_attr(entry.trial_id, _WORKER, started)
                mine = replace(entry, worker=started, started=started["started"])
                self.renew(mine)
            except (UpdateFinishedTrialError, LostError):
                continue
            return mine
        return None

    def renew(self, entry: Entry) -> None:
        """Renew the lease of a task.

        Raises:
            LostError: If the task was put back, or another worker has claimed it too: SQLite lets
                two do so at once. The last one to say so has it.
        """
        self._set(entry, _LEASE, uuid.uuid4().hex[:8])
        if self._storage.get_trial(entry.trial_id).user_attrs.get(_WORKER) != entry.worker:
            raise LostError(entry.key)

    def finish(self, entry: Entry, result: Record) -> None:
        """Keep the result of a task.

        Raises:
            LostError: If the task was put back. The result is not kept.
        """
        self._set(entry, _RESULT, json.dumps(dict(result)))
        self._end(entry.trial_id, TrialState.COMPLETE)

    def fail(self, entry: Entry, reason: str) -> None:
        """Say why an attempt failed.

        Raises:
            LostError: If the task was put back.
        """
        self._set(entry, _REASON, reason)
        self._end(entry.trial_id, TrialState.FAIL)

    def put_back(self, entry: Entry) -> None:
        """Let another worker train the task, as this one stops."""
        self.fail(entry, "")

    def forget(self, entries: Iterable[Entry]) -> None:
        """Forget attempts that have failed, so that they do not count against their tasks."""
        numbers = (self._storage.get_trial(entry.trial_id).number for entry in entries)
        forgotten = sorted({*self._forgotten(), *numbers})
        self._storage.set_study_user_attr(self._study, _FORGOTTEN, forgotten)

    def put_back_lost(self) -> list[str]:
        """Put back the tasks whose leases have not changed for too long, and return their keys."""
        now, lost = time.monotonic(), []
        for trial in self._storage.get_all_trials(
            self._study, deepcopy=False, states=(TrialState.RUNNING,)
        ):
            lease = trial.user_attrs.get(_LEASE)
            known, since = self._seen.get(trial._trial_id, (None, -math.inf))
            if known != lease or since == -math.inf:
                self._seen[trial._trial_id] = (lease, now)
            elif now - since > trial.user_attrs.get(_WORKER, {}).get("lease", self.lease):
                try:
                    self._storage.set_trial_user_attr(trial._trial_id, _REASON, LOST)
                    self._end(trial._trial_id, TrialState.FAIL)
                except (LostError, UpdateFinishedTrialError):
                    continue  # it was done in the meantime, or put back by another one
                lost.append(str(trial.user_attrs.get(_KEY)))
        return lost

    def _study_id(self) -> int:
        """Return the study, once it is complete: another process may be making it."""
        for _ in range(50):
            found = self._storage.get_study_id_from_name(self.name)
            if _JOB in self._storage.get_study_user_attrs(found):
                return found
            time.sleep(0.1)
        raise Refusal(
            "storage",
            "have a job of noisescale",
            f"a study {self.name!r} that is none",
            "Give another `--name`.",
        )

    def _forgotten(self) -> set[int]:
        return set(self._storage.get_study_user_attrs(self._study).get(_FORGOTTEN, ()))

    def _job_text(self) -> str:
        return str(self._storage.get_study_user_attrs(self._study)[_JOB])

    def _set(self, entry: Entry, name: str, value: Any) -> None:
        try:
            self._storage.set_trial_user_attr(entry.trial_id, name, value)
        except UpdateFinishedTrialError as error:
            raise LostError(entry.key) from error

    def _end(self, trial_id: int, state: Any) -> None:
        values = [0.0] if state is TrialState.COMPLETE else None
        try:
            self._storage.set_trial_state_values(trial_id, state, values)
        except UpdateFinishedTrialError as error:
            raise LostError(str(trial_id)) from error

    def _forget_failures(self) -> None:
        failed = self._storage.get_all_trials(
            self._study, deepcopy=False, states=(TrialState.FAIL,)
        )
        if failed:
            numbers = [trial.number for trial in failed]
            self._storage.set_study_user_attr(self._study, _FORGOTTEN, numbers)


def _attributes(task: Task) -> dict[str, Any]:
    return {_KEY: task.key, _SPEC: json.dumps(dict(task.spec))}


def _entry(key: str, every: list[FrozenTrial], trials: list[FrozenTrial]) -> Entry:
    """Return the state of a task from its attempts.

    Two workers may add the same task at once. Of several attempts that have not failed, the first
    counts.

    Args:
        key: Of the task.
        every: All attempts.
        trials: The attempts that count, without the forgotten attempts.
    """
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    live = [trial for trial in trials if trial.state != TrialState.FAIL]
    done = [trial for trial in live if trial.state == TrialState.COMPLETE]
    reasons = [trial.user_attrs.get(_REASON, "") for trial in failed]
    lost = reasons.count(LOST)
    own = [reason for reason in reasons if reason not in (LOST, "")]
    if done or (live and len(own) < ATTEMPTS and lost < LOSSES):
        trial = (done or live)[0]
        state = {TrialState.COMPLETE: State.DONE, TrialState.RUNNING: State.RUNNING}.get(
            trial.state, State.WAITING
        )
        result = json.loads(trial.user_attrs[_RESULT]) if state is State.DONE else {}
    elif len(own) >= ATTEMPTS or lost >= LOSSES:
        trial, state = failed[-1], State.GIVEN_UP
        result = {FAILED: (own or [LOST])[-1]}
    else:
        trial, state, result = every[-1], State.FAILED, {}
    worker = trial.user_attrs.get(_WORKER, {})
    return Entry(
        key,
        state,
        trial._trial_id,
        1 + len(failed) - (state is State.GIVEN_UP),
        json.loads(trial.user_attrs[_SPEC]),
        worker,
        worker.get("started", math.nan),
        result,
    )


def _job_text(job: Job) -> str:
    return json.dumps({"kind": job.kind, **job.as_dict()}, sort_keys=True)


def _differences(known: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name the settings that differ, as options are named, with both values.

    Examples:
        >>> _differences({"search": {"trials": 3}}, {"search": {"trials": 9}})
        ['`trials` (3 before, 9 now)']
    """
    found = []
    for name, before in sorted(known.items()):
        after = now.get(name)
        if before == after:
            continue
        if name == "goal" and after is not None:
            found.append(f"`goal` ({Goal(**before)} before, {Goal(**after)} now)")
        elif isinstance(before, Mapping) and isinstance(after, Mapping):
            found += _differences(before, after)
        else:
            found.append(f"`{name}` ({_in_short(before)} before, {_in_short(after)} now)")
    return found


def _in_short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    return (value if isinstance(value, str) else json.dumps(value))[:80]
