# SPDX-License-Identifier: Apache-2.0
"""A worker: asks for a task, has it trained by a command, tells the result."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from noisescale.lab.jobs.jobs import FAILED, Entry, Job, Record, State, results_of
from noisescale.lab.jobs.ledger import Ledger, LostError
from noisescale.lab.jobs.storage import retry
from noisescale.lab.jobs.trial_process import TrialProcess, new_folder
from noisescale.lab.jobs.warm import Starts
from noisescale.refusal import Refusal

IDLE = 2.0
"""Seconds between two looks for a task."""

RENEWALS = 4
"""A lease is renewed this many times before it runs out."""

LOOK = 0.2
"""Seconds between two looks at a running training, at first. Long trainings are looked at less."""


TELLING = 3
"""Tasks that have failed, and none that has not, after which a worker stops.

One may fail for its own reasons: a module may refuse a loss that is no number.
"""


class Worker:
    """Train tasks of a job until there are none.

    Args:
        ledger: Of the job.
        job: The job.
        output: Folder of the trainings.
        name: Name of the worker, for people.
        cold: Whether each training imports its packages anew, see `Starts`.
        device: Name of what it trains on, for people; "" if it is not known.
        sharing: Number of workers that share the devices of this one, itself among them.
        on_event: Called with a line about what happens.
    """

    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        output: Path,
        *,
        name: str = "",
        cold: bool = False,
        device: str = "",
        sharing: int = 1,
        on_event: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ledger, self._job, self._output = ledger, job, output
        self._on_event = on_event
        self._sharing = sharing
        self._starts = Starts(job.devices, cold=cold, on_event=on_event)
        self._me = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "name": name,
            "device": device,
            "sharing": sharing,
        }
        self._failed: list[tuple[Entry, str]] = []
        self._has_trained = False

    def work(self) -> None:
        """Work until the job is done.

        Raises:
            ValueError: If every training fails, so that there is no reason to go on; if every
                training of this worker fails, while others are at work and have succeeded: the
                failures are forgotten, and others train these tasks; or if the storage is out of
                reach for long.
        """
        known: dict[str, State] | None = None
        while True:
            entries = retry(self._ledger.entries)
            states = {key: entry.state for key, entry in entries.items()}
            if known != states:  # else nothing else is wanted
                _refuse_if_all_failed(results_of(entries))
                known, wanted = states, self._job.next_tasks(entries)
            if not wanted:
                return
            self._starts.prepare()  # it takes seconds, in which no lease would be renewed
            for key in retry(self._ledger.put_back_lost):
                self._on_event(f"{key}: put back, as its worker was lost")
            retry(lambda: self._ledger.want(wanted))  # noqa: B023 - called at once
            entry = retry(
                lambda: self._ledger.claim([task.key for task in wanted], self._me)  # noqa: B023
            )
            if entry is None:
                time.sleep(IDLE)
                continue
            self._train(entry, self._job.limit_of(entry.spec, entries))
            self._refuse_if_only_this_one_fails()

    def _train(self, entry: Entry, limit: float) -> None:
        self._on_event(f"{entry.key}: begun")
        trial = None
        try:
            trial = TrialProcess(
                new_folder((self._output / "trials").absolute(), entry.key),
                entry.spec,
                self._job.devices,
                self._starts.start,
                limit=limit,
                sharing=self._sharing,
            )
            self._attend(entry, trial)
            result = trial.result()
            if result is None:
                reason = trial.reason()
                self._on_event(f"{entry.key}: failed: {reason}")
                retry(lambda: self._ledger.fail(entry, reason))
                self._failed.append((entry, reason))
            else:
                self._has_trained = True
                self._on_event(f"{entry.key}: {result.get('ended', 'done')}")
                retry(lambda: self._ledger.finish(entry, result))
        except LostError:
            self._on_event(f"{entry.key}: left to another worker, this one was silent too long")
        except BaseException:
            # At once: more signals may come in the seconds until the training has ended.
            with suppress(Exception):  # the reason to stop is what is told
                self._ledger.put_back(entry)
                self._on_event(f"{entry.key}: put back")
            raise
        finally:
            if trial is not None:
                trial.process.kill()

    def _refuse_if_only_this_one_fails(self) -> None:
        if self._has_trained or len(self._failed) < TELLING:
            return
        entries = retry(self._ledger.entries)
        if all(FAILED in result for result in results_of(entries).values()):
            return
        if all(entry.state is not State.RUNNING for entry in entries.values()):
            return  # nobody else would train these tasks
        retry(lambda: self._ledger.forget([entry for entry, _ in self._failed]))
        raise Refusal(
            "target",
            "train on this worker as on others",
            f"only failures: {self._failed[-1][1]}",
            "Others train these tasks. Start the worker in the folder of the sweep, or in a copy of"
            " it, with the same packages.",
        )

    def _attend(self, entry: Entry, trial: TrialProcess) -> None:
        """Wait for the end of a training, renew its lease, and keep its limit up to date.

        A process that has told its result and does not end, as some thread of it goes on, is ended.
        """
        every = self._ledger.lease / RENEWALS
        renewed = looked = time.monotonic()
        wait = LOOK
        while not trial.process.wait(wait):
            wait = min(1.1 * wait, 2.0, every)
            now = time.monotonic()
            if trial.lingers():
                trial.process.kill()
                return
            if now - renewed > every:
                retry(lambda: self._ledger.renew(entry))
                renewed = now
            if now - looked < min(every, 2.0):
                continue
            looked = now
            trial.set_limit(self._job.limit_of(entry.spec, retry(self._ledger.entries)))


def _refuse_if_all_failed(results: Mapping[str, Record]) -> None:
    failed = [result[FAILED] for result in results.values() if FAILED in result]
    if len(failed) >= TELLING and len(failed) == len(results):
        raise Refusal(
            "target", "train", "only trainings that failed", f"The last one: {failed[-1]}"
        )
