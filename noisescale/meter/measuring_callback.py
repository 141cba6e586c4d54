# SPDX-License-Identifier: Apache-2.0
"""What the callbacks of all trainers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch

from noisescale.batches.shared_examples import SharedExamples
from noisescale.collectives import any_rank
from noisescale.estimation.levels import Levels
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.guard import Guard, NotMeasured
from noisescale.history.history import History
from noisescale.history.record import Recorder
from noisescale.meter.meter import Meter
from noisescale.meter.options import MeterOptions
from noisescale.meter.run_log import RunLog, last_row_of
from noisescale.refusal import Refusal, TypeRefusal


class MeasuringCallback(ABC):
    """A callback with meters, which are made when training starts.

    Args:
        options: Options of the meters.
        *let_pass: The trainer's own errors that end a training.
    """

    _how_to_have_several: str
    """How this trainer has several micro-batches in each step, or several ranks."""

    _consequence = ""
    """What follows for others if nothing is measured, for the warning."""

    def __init__(self, options: MeterOptions, *let_pass: type[Exception]) -> None:
        self._options = options
        self._forget()
        self._guard = Guard(*let_pass)
        self._follows = False
        """Whether a scheduler waits for what is measured."""

    def _forget(self) -> None:
        """Begin without what an earlier training has left."""
        self.meters: list[RunLog] = []
        """A meter for each optimizer with a noise scale of its own; none if none is measured."""
        self._shared: SharedExamples | None = None
        self._counted = False
        """Whether the examples of a batch have been counted."""
        self._news: list[str] = []
        """What to say once a step could be measured."""
        self._caution: str | None = None
        """What to warn of then: an order of the data in which neighbours may be alike."""
        self._told: set[int] = set()
        """The meters of which a warning says that they measure nothing."""
        self._why_nothing = ""
        """Why nothing is measured, if there is no meter left."""

    def __repr__(self) -> str:
        """Show the arguments that are not the defaults, and the estimate of the last log step."""
        known = f": {last_row_of(self.history)}" if self.history else ""
        return f"{type(self).__name__}({self._arguments}){known}"

    @property
    @abstractmethod
    def _arguments(self) -> str:
        """The arguments that are not the defaults."""

    @property
    def noise_scale(self) -> NoiseScale:
        """The latest estimate, during and after training. Reads the device."""
        first = self.meter
        return self._options.new_estimator().estimate() if first is None else first.noise_scale

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """The latest estimate for each of `groups`, of the first optimizer."""
        return {} if self.meter is None else self.meter.group_noise_scales

    @property
    def levels(self) -> Levels | None:
        """The latest noise scale between and within groups of rows, of the first optimizer.

        None without groups, or if rows of one group act on each other in the loss.
        """
        return None if self.meter is None else self.meter.levels

    @property
    def history(self) -> History:
        """The noise scale along the run, one row for each log step, of the first optimizer."""
        return self.meters[0].explained_history() if self.meters else self._empty_history()

    @property
    def meter(self) -> Meter | None:
        """The meter of the first optimizer, which schedulers go by; None if none is measured."""
        return self.meters[0].meter if self.meters else None

    @property
    def _records(self) -> list[Path]:
        """The files in which the histories are recorded; on other ranks there are none."""
        return list(dict.fromkeys(path for logged in self.meters for path in logged.records))

    @property
    def _histories(self) -> list[History]:
        """The history of each optimizer, or one without rows that says why there is none."""
        return [logged.history for logged in self.meters] or [self._empty_history()]

    @property
    def _folder(self) -> Path | None:
        """The first folder with the record of this run, if there is one."""
        return next((record.parent for record in self._records), None)

    def _empty_history(self) -> History:
        """Return a history without rows, and why it has none."""
        history = History(unit=self._options.unit, confidence=self._options.confidence)
        history.why_nothing = self._why_nothing
        return history

    def _record_why_nothing(self, folders: Callable[[], Iterable[Path]], prefix: str) -> None:
        """Write into the record of a run why nothing is measured, if that is known when it starts.

        On one rank alone.
        """
        if self._why_nothing and not self.meters:
            with self._guard("The record of the run does not say why nothing is measured"):
                history = self._empty_history()
                history.prefix = prefix
                for folder in folders():
                    Recorder(folder).note(history)

    @property
    def _measuring(self) -> bool:
        return any(logged.meter.measuring for logged in self.meters)

    @abstractmethod
    def _tell(self, message: str) -> None:
        """Warn on one rank."""

    @abstractmethod
    def _inform(self, message: str) -> None:
        """Say something on one rank that is no warning."""

    @abstractmethod
    def _stop(self, *, interrupted: bool) -> None:
        """Take everything back that was put into the model."""

    def follow(self, *, consequence: str = "") -> None:
        """Measure in the next training for decisions: as often as a scheduler needs.

        Args:
            consequence: What to say if the training cannot be measured: what follows from that.
        """
        self._follows, self._consequence = True, consequence and f" {consequence}"

    def _make_meters(
        self, make: Callable[[], list[RunLog]], device: torch.device, ranks: int
    ) -> None:
        """Make the meters of a training. A warning tells if it cannot be measured.

        Args:
            make: Makes them. It may raise a `NotMeasured`, alike on all ranks.
            device: Where ranks may exchange a number.
            ranks: How many there are.
        """
        error: Exception | None = None
        try:
            self.meters = make()
        except NotMeasured as reason:
            self._tell_that_nothing_is_measured(reason)
        except Exception as unforeseen:
            if isinstance(unforeseen, (Refusal, TypeRefusal, *self._guard.let_pass)):
                raise
            error = unforeseen
        # A rank that measures alone would wait for the others for ever.
        if ranks > 1 and any_rank(error is not None, device):
            self._close_meters(interrupted=True)
            self.meters = []
            error = error or RuntimeError("another rank could not make its meter")
        if error is not None:
            self._guard.tell("No noise scale is measured", error)
        for logged in self.meters:
            logged.on_withheld = WeakMethod(self._tell_of_withheld)
            if self._follows:
                logged.meter.follow()
        self._tell_of_unmeasured()

    def _begin(
        self, saved: Sequence[dict[str, Any]], ranks: int, device: torch.device, accumulation: int
    ) -> None:
        """Continue from the saved states of the meters, and begin to look for shared examples."""
        with self._guard("The saved averages were not restored and start again"):
            for logged, state in zip(self.meters, saved, strict=False):
                logged.resume(state)
        if ranks > 1:
            self._shared = SharedExamples(device, accumulation, self._tell)

    def _look_for_shared_examples(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        if self._shared is not None and not self._shared.over:
            self._shared.look(tensors())

    def _pause(self, paused: bool) -> None:
        """Have evaluation, copies, pickles and exports between steps meet no hooks of ours."""
        for logged in self.meters:
            (logged.meter.pause if paused else logged.meter.resume)()

    @contextmanager
    def _leaving_step_out(self) -> Iterator[None]:
        """Leave a step out after an error. In the first batch a user's function raises it."""
        try:
            yield
        except Exception as error:
            if not self._counted and not isinstance(error, NotMeasured):
                raise
            for logged in self.meters:
                logged.meter.leave_step_out(error)
            self._tell_of_unmeasured()

    def _close_step(self, which: int, loss_divisor: float | None = None) -> bool:
        """Close a step. Return whether one was closed, and its gradients are measured."""
        logged = self.meters[which]
        closed = logged.meter.measuring and logged.meter.step(loss_divisor=loss_divisor)
        if closed:
            logged.note_step()
        self._tell_of_unmeasured()
        return closed and logged.meter.measuring

    def _tell_news(self) -> None:
        """Say what there is to say of the measurement, once a whole step could be measured."""
        if not (self._news or self._caution):
            return
        if any(logged.meter.accepted for logged in self.meters):
            for message in self._news:
                self._inform(message)
            if self._caution:
                self._tell(self._caution)
            self._news, self._caution = [], None

    def _stop_meters(self, reasons: Mapping[int, NotMeasured]) -> None:
        """Measure no more with some meters, and warn why."""
        for which, reason in reasons.items():
            if (meter := self.meters[which].meter).measuring:
                meter.stop(reason)
        self._tell_of_unmeasured()

    def _tell_of_unmeasured(self) -> None:
        """Warn once of each meter that turned out to measure nothing."""
        reasons = {
            which: reason
            for which, logged in enumerate(self.meters)
            if (reason := logged.meter.stopped_by) is not None and which not in self._told
        }
        self._told |= reasons.keys()
        if reasons and not self._measuring:
            self._tell_that_nothing_is_measured(next(iter(reasons.values())))
            for logged in self.meters:
                logged.note_unmeasured(self._why_nothing)
            self._stop(interrupted=False)
            self.meters = []
            return
        for which, reason in reasons.items():
            self.meters[which].note_unmeasured(str(reason))
        for text in dict.fromkeys(map(str, reasons.values())):
            alike = [str(which) for which, other in reasons.items() if str(other) == text]
            self._tell(
                f"{type(self).__name__} does not measure the gradients of optimizer"
                f" {', '.join(alike)}: {text}"
            )

    def _tell_of_withheld(self) -> None:
        """Warn once of each meter whose noise scale is withheld. Its history is kept."""
        for which, logged in enumerate(self.meters):
            if (reason := logged.history.withheld) and which not in self._told:
                self._told.add(which)
                self._tell(
                    f"{type(self).__name__} measures no more from here on. {reason} Training goes"
                    f" on.{self._consequence}"
                )

    def _tell_that_nothing_is_measured(self, error: NotMeasured) -> None:
        name = type(self).__name__
        on = f"Training goes on, and no noise scale is logged.{self._consequence}"
        if error.remedy:  # here it is how to do it under this trainer
            self._why_nothing = f"{error.reason} {self._how_to_have_several}"
            self._tell(
                f"{name} has nothing to measure: one process trains, with one gradient in each"
                " step, and the halves of a batch cannot be compared."
                f" {error.reason} {on} {self._how_to_have_several}"
            )
        else:
            self._why_nothing = error.reason
            self._tell(f"{name} has nothing to measure. {error.reason} {on}")

    def _interrupt(self) -> None:
        for logged in self.meters:
            logged.timer.interrupt()

    def _close_meters(self, *, interrupted: bool) -> None:
        for logged in reversed(self.meters):  # as what they wrap was wrapped
            logged.close(interrupted=interrupted)
