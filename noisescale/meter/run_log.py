# SPDX-License-Identifier: Apache-2.0
"""A meter with a clock and a history, which the callbacks of all trainers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakMethod

from noisescale.collectors.deepspeed import elements_of, innermost
from noisescale.collectors.devices import memory_of
from noisescale.estimation.noise_scale import NoiseScale, three_digits
from noisescale.guard import Guard, WarnOnce
from noisescale.history.document import document_of, restore, round_row
from noisescale.history.history import LEVELS, History
from noisescale.history.increments import INCREMENTS
from noisescale.history.metric_names import ROOT
from noisescale.history.optimizers import (
    OptimizerKind,
    OptimizerMix,
    learning_rate_of,
    parameters_of,
)
from noisescale.history.record import Recorder
from noisescale.meter.meter import Meter
from noisescale.meter.step_timer import step_timer
from noisescale.meter.watched_steps import WatchedSteps

if TYPE_CHECKING:
    from torch.optim import Optimizer


class _Now(NamedTuple):
    """What metrics are made of."""

    estimate: NoiseScale
    meter: Meter
    seconds_per_step: float


LOGGED: dict[str, Callable[[_Now], float]] = {
    "simple": lambda now: now.estimate.value,
    "simple_low": lambda now: now.estimate.low,
    "simple_high": lambda now: now.estimate.high,
    "lower_bound": lambda now: now.estimate.low,
    "grad_sq_norm": lambda now: now.estimate.grad_sq_norm,
    "noise_trace": lambda now: now.estimate.noise_trace,
    "batch_size": lambda now: now.meter.batch_size,
    "efficiency": lambda now: now.estimate.efficiency(now.meter.batch_size),
    "seconds_per_step": lambda now: now.seconds_per_step,
    "skipped_steps": lambda now: float(now.meter.skipped_steps),
}
"""Names, without their prefix, of the metrics of every run that loggers get."""

RECORDED: dict[str, Callable[[_Now], float]] = {
    "step": lambda now: float(now.meter.last_measured_step),
    "examples": lambda now: now.meter.examples,
    "devices": lambda now: float(now.meter.devices),
    "accumulation": lambda now: float(now.meter.accumulation),
    "measured_steps": lambda now: float(now.meter.measured_steps),
    "measuring_cost": lambda now: now.meter.measuring_cost,
    "first_step": lambda now: float(now.estimate.first_step or math.nan),
}
"""Names of the metrics of every run that only its record needs."""

NAMES = (*LOGGED, *RECORDED, "learning_rate")
"""The names of every run, and those about the optimizer."""

LOGGED_LEVELS = LEVELS[:6]
"""Names, without their prefix, of the two levels of noise, in runs whose rows are in groups."""

_FOR_THE_RECORD = {
    *(*RECORDED, *INCREMENTS, *(name for name in LEVELS if name not in LOGGED_LEVELS)),
    *("learning_rate", "peak_memory", "device_memory"),
}
"""Names of metrics that loggers do not get."""

_NEED_UPPER_END = {"simple", "simple_low", "simple_high", "efficiency"}
"""Names logged only if the whole gradient's noise scale is resolved: TensorBoard draws a band only
from values that were logged together."""

_NO_LEARNING_RATE = "The learning rate was not recorded with the run"


class Metrics(NamedTuple):
    """The metrics of a meter at one step."""

    values: dict[str, float]
    """Values by name, without a prefix; NaN or infinite if not known."""
    unresolved: set[str]
    """Names of values that depend on a noise scale that is not resolved."""
    estimate: NoiseScale
    """The noise scale of the whole gradient."""
    prefix: str
    """The beginning of the names outside."""

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics, under names with the prefix."""
        return {self.prefix + name: value for name, value in self.values.items()}

    @property
    def loggable(self) -> dict[str, float]:
        """The metrics for loggers: what a person looks at, where it is finite and resolved."""
        return {
            self.prefix + name: value
            for name, value in self.values.items()
            if math.isfinite(value) and name not in self.unresolved | _FOR_THE_RECORD
        }


class RunLog:
    """A meter of one optimizer's gradients, with a clock and a history.

    Args:
        meter: A meter of its parameters.
        optimizer: The optimizer that steps, not a wrapper of it; None if it is not known.
        averaged: See `NoiseScaleMeter`. The theory was tried on no run without.
        prefix: Prefix of the names of its metrics.
        beside: Optimizers that step with it, on the gradient of the same loss.
        loop: See `History`.
    """

    def __init__(
        self,
        meter: Meter,
        optimizer: Optimizer | None,
        prefix: str = ROOT,
        *,
        beside: Sequence[Optimizer] = (),
        averaged: bool = True,
        loop: str = "",
    ) -> None:
        self.meter = meter
        self._loop, self._prefix = loop, prefix
        self.guard = Guard()
        if meter.engine is not None:
            optimizer = innermost(optimizer)
        self._optimizer = optimizer
        self._mix: OptimizerMix | None = None
        self._watched: WatchedSteps | None = None
        self._parameters = math.nan
        if optimizer is not None:
            with self.guard("The optimizer was not recorded with the run"):
                other = OptimizerMix(OptimizerKind.OTHER)
                self._mix = OptimizerMix.of(optimizer, *beside) if averaged else other
                engine = meter.engine
                of_each = [parameters_of(one) for one in (optimizer, *beside)]
                self._parameters = float(sum(of_each) if engine is None else elements_of(engine))
                # The optimizers of torch that are of no kind here are known, too.
                known = type(optimizer).step.__module__.startswith("torch.")
                if averaged and engine is None and self._mix == other and not (known or beside):
                    self._watched = WatchedSteps(optimizer)
        self.history = self._new_history()
        self.on_withheld: WeakMethod[Callable[[], None]] | None = None
        """What is called once the history is withheld. It keeps nobody alive."""
        meter.on_withheld = WeakMethod(self._note_withheld)
        self._warn = WarnOnce()
        self.timer = step_timer(meter.device)
        self._measured_by_last_row = 0
        self._in_force = False
        self._rates_in_step: list[Any] = []
        """The learning rates of the last measured step, as it was taken."""
        self._names: tuple[str, ...] = NAMES
        self._last_read_step = -1
        self._recorders: list[Recorder] = []

    @property
    def has_news(self) -> bool:
        """Whether a step was measured since the metrics were last asked for."""
        return self.meter.last_measured_step != self._last_read_step

    @property
    def advanced(self) -> bool:
        """Whether a step was measured since the last row of the history."""
        return self.meter.last_measured_step > self.history.last_step

    @property
    def unfinished(self) -> bool:
        """Whether steps were taken, measured or not, since the last row of the history."""
        return self.meter.steps > self.history.last_step

    def record_in(self, folders: Iterable[Path]) -> None:
        """Write each further row of the history to the record in some folders, too.

        Only one rank may do so.
        """
        folders = list(folders)
        self._recorders = [Recorder(folder) for folder in folders]
        self.history.source = folders[0] if folders else None

    def explained_history(self) -> History:
        """Return the history, with the reason if no step was measured."""
        self.history.why_nothing = self.meter.why_nothing
        return self.history

    def note_unmeasured(self, reason: str) -> None:
        """Note in the records why no step was measured, if none was."""
        if not self.meter.measured_steps:
            self.history.why_nothing = reason
            self._record(lambda recorder: recorder.note(self.history))

    def end(self) -> None:
        """Note in the records that the training has come to its end."""
        self._record(lambda recorder: recorder.end(self.history))

    def _record(self, write: Callable[[Recorder], None]) -> None:
        for recorder in self._recorders:
            with self.guard(warning_of_folder(recorder.path.parent)):
                write(recorder)

    @property
    def records(self) -> list[Path]:
        """The files in which rows of the history are recorded."""
        return [recorder.path for recorder in self._recorders]

    def note_step(self) -> None:
        """Note when the meter closed a step, and with which learning rates."""
        measured = self.meter.last_measured_step == self.meter.steps
        self.timer.step(measured=measured)
        if self._watched is not None:
            self._watch_step()
        if measured and self._optimizer is not None:
            with self.guard(_NO_LEARNING_RATE):
                factor = self.meter.lr_factor
                self._rates_in_step = [factor * g["lr"] for g in self._optimizer.param_groups]

    def _watch_step(self) -> None:
        watched, self._watched = self._watched, None  # once, if it fails
        with self.guard("The kind of the optimizer was not found from its steps"):
            if watched is None or (kind := watched.before_step()) is None:
                self._watched = watched
            else:
                self._mix = self.history.optimizer = OptimizerMix(kind)

    def close(self, *, interrupted: bool = False) -> None:
        """Remove everything from the model, see `NoiseScaleMeter.close`."""
        with self.guard("The last steps are missing from the averages"):
            self.meter.close(interrupted=interrupted)
        self.let_go()

    def let_go(self) -> None:
        """Let go of the optimizer. The learning rate stays that of the last measured step."""
        self._optimizer = self._watched = None

    def read(self, log_step: float = math.nan, *, at_end: bool = False) -> Metrics:
        """Return the metrics, and add a row to the history if a step was to be measured.

        Rows are added at measured steps, and one at the last step of the run. The last row counts
        the examples after the last measured step as this rank counted them.

        If all measured steps since the last row were left out (not finite, nothing to compare), the
        noise scale is NaN, here and in the row. The row still counts steps and examples. If no step
        was due since the last row (`every_n_steps` above 1), the last values are returned.

        If reading fails, all metrics are NaN, and the meter warns once.

        Args:
            log_step: The step under which the trainer logs now.
            at_end: Whether this is the end of the run.
        """
        with self.guard("The noise scale was not logged"):
            timer = self.timer
            self.meter.agree(timer.mean, timer.costs, cheaper=timer.finds_savings)
            if self.meter.last_step is not None:
                self.history.planned_steps = float(self.meter.last_step)
            self._warn_of_unmeasurable_steps()
            self._in_force = self._is_in_force()
            now = self._metrics(in_step=not at_end)
            self._note_withheld()
            self.timer.restart()
            if self.timer.device != self.meter.device:  # `module.to` moves parameters
                self.timer = step_timer(self.meter.device)
            if self.advanced or (at_end and self.unfinished):
                now.values.update(self.meter.take_increments())
                if at_end:
                    examples = now.values["examples"] + self.meter.unmeasured_examples
                    now.values.update(step=float(self.meter.steps), examples=examples)
                self._append_row(now, log_step)
            return now
        return self._unknown()

    def _note_withheld(self) -> None:
        reason = self.meter.withheld
        if reason and not self.history.withheld:
            self.history.withhold(reason)
            self._record(lambda recorder: recorder.note(self.history))
            if self.on_withheld is not None and (told := self.on_withheld()) is not None:
                told()

    def _append_row(self, now: Metrics, log_step: float) -> None:
        row = {
            "noise_scale": now.estimate.value,
            "low": now.estimate.low,
            "high": now.estimate.high,
            "behind": now.values["step"] - log_step,
            **{
                column: now.values[column]
                for column in self.history
                if column in now.values and column not in now.unresolved
            },
            **{
                name: now.values[name]
                for name in LEVELS
                if math.isfinite(now.values.get(name, math.nan))
            },
        }
        row, history = round_row(row), self.explained_history()
        self._record(lambda recorder: recorder.add(history, row))
        history.append(**row)
        self._measured_by_last_row = self.meter.measured_steps

    def look(self) -> Metrics:
        """Return the current metrics, without increments. The next row of the history is unchanged.

        Use it between two rows of the history. It reads the device, as `read` does.
        """
        with self.guard("The noise scale was not logged"):
            return self._metrics(in_step=False)
        return self._unknown()

    def _unknown(self) -> Metrics:
        estimate = NoiseScale(math.nan, 0.0, math.inf, math.nan, math.nan, steps=0)
        return Metrics(dict.fromkeys(self._names, math.nan), set(), estimate, self._prefix)

    def _metrics(self, *, in_step: bool) -> Metrics:
        meter, in_force = self.meter, self._is_in_force()
        self._last_read_step = meter.last_measured_step
        estimate = _current(meter.noise_scale, in_force)
        now = _Now(estimate, meter, self.timer.mean)
        metrics = {name: value_of(now) for name, value_of in (LOGGED | RECORDED).items()}
        metrics["learning_rate"] = self._learning_rate(in_step=in_step)
        unresolved = set() if estimate.resolved else {*_NEED_UPPER_END}
        if (memory := memory_of(meter.device)) is not None:
            metrics |= {"peak_memory": memory.peak, "device_memory": memory.total}
        for one in meter.extra:
            if one.title is not None:
                extra = _current(meter.extra_noise_scales[one.name], in_force)
                ends = {"": extra.value, "_low": extra.low, "_high": extra.high}
                interval = {one.name + end: value for end, value in ends.items()}
                metrics |= interval
                unresolved |= set() if extra.resolved else interval.keys()
        if (levels := meter.levels if in_force else None) is not None:
            of_levels = levels.columns()
            metrics |= of_levels
            for name in ("between", "within"):
                if not math.isfinite(of_levels[f"{name}_high"]):
                    unresolved |= {name, f"{name}_low", f"{name}_high"}
        for name, of_group in meter.group_noise_scales.items():
            of_group = _current(of_group, in_force)
            metrics[f"group/{name}"] = of_group.value
            unresolved |= set() if of_group.resolved else {f"group/{name}"}
        self._names = (*metrics,)
        return Metrics(metrics, unresolved, estimate, self._prefix)

    def _learning_rate(self, *, in_step: bool) -> float:
        """Return the learning rate now; between steps, the rate in the last measured step."""
        with self.guard(_NO_LEARNING_RATE):
            if self._optimizer is not None and (in_step or not self._rates_in_step):
                return self.meter.lr_factor * learning_rate_of(self._optimizer)
            return max(map(float, self._rates_in_step), default=math.nan)
        return math.nan

    def _is_in_force(self) -> bool:
        """Return whether the averages are up to date: a step was added since the last row."""
        if not self.advanced:
            return self._in_force
        if self.meter.measured_steps > self._measured_by_last_row:
            return True
        # One such step may be the short last accumulation of an epoch, which changes nothing.
        return (
            self._in_force and self.meter.unmeasurable_since is not None and not self._several_alone
        )

    @property
    def _several_alone(self) -> bool:
        """Whether two measured steps or more had nothing to be compared with, up to now."""
        return self.meter.unmeasurable_steps >= 2

    def _warn_of_unmeasurable_steps(self) -> None:
        none_since = 0 < self.meter.measured_steps == self._measured_by_last_row
        has_no_halves = self.meter.least_micro_batches > 1
        if self.advanced and has_no_halves and self._several_alone and none_since:
            self._warn(
                f"Since step {self.meter.unmeasurable_since} each step has only one micro-batch in"
                " one process, so there is nothing to compare it with: no noise scale is logged"
                f" from there on. {self.meter.how_to_compare}",
                about="lone steps",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what `resume` needs, in builtins; see `NoiseScaleMeter.state_dict`.

        If that fails, the state is empty, and the meter warns once.
        """
        with self.guard("The averages were not saved in the checkpoint"):
            return {"meter": self.meter.state_dict(), **self.log_state()}
        return {}

    def log_state(self) -> dict[str, Any]:
        """Return the state without the meter's, in builtins. The history is the run's document."""
        return {
            "document": document_of(self.history),
            "measured_by_last_row": self._measured_by_last_row,
            "in_force": self._in_force,
        }

    def load_log_state(self, state: dict[str, Any]) -> None:
        """Continue from a `log_state`."""
        self._measured_by_last_row, self._in_force = (
            state["measured_by_last_row"],
            state["in_force"],
        )
        history = self._new_history()
        restore(history, state["document"])
        if self._watched is not None and history.optimizer not in (None, self._mix):
            self._mix, self._watched = history.optimizer, None  # found in the steps before
        history.optimizer = self._mix
        self.history = history

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. What cannot be restored starts again, with a warning."""
        with self.guard("The saved averages were not restored and start again"):
            self.meter.load_state_dict(state["meter"])
        if self.meter.steps:  # else it counts from 0
            with self.guard("The saved history was not restored and starts again"):
                self.load_log_state(state)

    def _new_history(self) -> History:
        estimate = self.meter.noise_scale
        history = History(
            extra_columns=[f"group/{g}" for g in self.meter.group_noise_scales],
            unit=estimate.unit,
            confidence=estimate.confidence,
            optimizer=self._mix,
            parameters=self._parameters,
        )
        history.prefix, history.loop, history.way = self._prefix, self._loop, self.meter.way
        return history


def warning_of_folder(folder: Path) -> str:
    """Return what a warning says while a folder cannot be written: once, whatever is missing."""
    return f"What is measured and logged is not written to {folder} until it can be"


def last_row_of(history: History) -> str:
    """Return the noise scale of the last row in words: nothing waits for the device."""
    if not history:
        return "nothing measured yet"
    low, high = (float(history[name][-1]) for name in ("low", "high"))
    at = f"at step {history.last_step:,.0f}"
    if not math.isfinite(low):
        return f"nothing measured {at}"
    if not math.isfinite(high):
        return f"above {three_digits(low)} {history.unit} {at}, only a lower bound yet"
    value = three_digits(float(history["noise_scale"][-1]))
    return f"{value} {history.unit} ({three_digits(low)} to {three_digits(high)}) {at}"


def nothing_measured(prefix: str) -> dict[str, float]:
    """Return the metrics of a run in which nothing can be measured: NaN."""
    return {prefix + name: math.nan for name in NAMES}


def _current(estimate: NoiseScale, in_force: bool) -> NoiseScale:
    """Return the estimate while it is in force; else one without known values."""
    if in_force:
        return estimate
    nan = math.nan
    return replace(estimate, value=nan, low=nan, high=nan, grad_sq_norm=nan, noise_trace=nan)
