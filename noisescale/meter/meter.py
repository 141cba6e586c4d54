# SPDX-License-Identifier: Apache-2.0
"""Meter: measure the gradient noise scale step by step."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from noisescale.batches.batch_counter import check_batch_size
from noisescale.batches.row_groups import RowGroupsLike, check_groups_are_used, checked_row_groups
from noisescale.collectors.changes import hooks_on
from noisescale.collectors.deepspeed import DeepSpeedCollector, EngineSteps, is_deepspeed
from noisescale.collectors.in_model import InModel
from noisescale.collectors.rows.step_rows import MeasuredStep, Unread
from noisescale.collectors.rows.window_layout import Weight
from noisescale.estimation.levels import Levels
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.guard import NotMeasured, WarnOnce
from noisescale.meter.cadence import KNOWN_WITHIN, NOT_AGREED, NOTHING, Cadence, Pace, Spent
from noisescale.meter.capture import STEPS_LOST, BackwardPass, KnownToHost, StepCapture
from noisescale.meter.choosing import (
    choose_collector,
    is_sharded,
    module_in,
    nothing_to_capture,
    several_gradients_a_step,
    unwrap,
)
from noisescale.meter.estimates import Estimates, MomentSums
from noisescale.meter.extra import ExtraMeasurement
from noisescale.meter.options import MeterOptions
from noisescale.meter.soundness import fault_in
from noisescale.state import restore, to_builtins

# Reduced steps wait on the device until somebody asks; this many at most (a few kB).
_MOST_UNREAD = 1024

_MOST_COSTS = 32

_NOTHING_MORE = KnownToHost()


@dataclass
class _Counts:
    """The counts of a meter, which go on even where saved averages cannot be restored."""

    steps: int = 0
    last_measured_step: int = 0
    measured_steps: int = 0
    skipped_steps: int = 0
    examples: float = 0.0
    unmeasured_examples: float = 0.0
    """Examples of this rank since the last measured step."""
    batch_size: float = math.nan
    accumulation: int = 1
    unmeasurable_since: int | None = None
    unmeasurable_steps: int = 0
    spent: Spent = NOTHING
    """The cost of measuring."""


def _read(path: str) -> Any:
    """Return an attribute that is read alone."""
    return property(attrgetter(path))


def _read_settled(path: str) -> Any:
    """Return an attribute that is read alone, once all reduced steps are taken in."""
    of = attrgetter(path)

    def read(meter: Meter) -> Any:
        meter._settle()
        return of(meter)

    return property(read)


class Meter:
    """Measure the gradient noise scale of a model, step by step. See `NoiseScaleMeter`."""

    @classmethod
    def from_options(
        cls,
        model: nn.Module,
        options: MeterOptions,
        optimizer: Optimizer,
        *,
        parameters: Iterable[nn.Parameter] | None = None,
        grad_scaler: GradScaler | None = None,
        averaged: bool = True,
    ) -> Self:
        """Return a meter as `options` describe it. The caller has to tell `not_measured`."""
        meter = cls.__new__(cls)
        meter._open(model, options, optimizer, parameters, grad_scaler, averaged=averaged)
        return meter

    def _open(
        self,
        model: nn.Module,
        options: MeterOptions,
        optimizer: Optimizer | None,
        parameters: Iterable[nn.Parameter] | None,
        grad_scaler: GradScaler | None,
        *,
        averaged: bool,
    ) -> None:
        """Have a collector put its hooks into the model, and begin with no steps."""
        extra = [make(options, optimizer) for make in options.extra]
        reason: NotMeasured | None = None
        try:
            if isinstance(optimizer, LBFGS):
                raise several_gradients_a_step(optimizer)
            collector = choose_collector(
                model, options, parameters=parameters, averaged=averaged, extra=extra
            )
        except NotMeasured as error:
            collector, reason = nothing_to_capture(), error
        wrapper, norms = unwrap(model), collector.norms
        ddp = wrapper if isinstance(wrapper, DistributedDataParallel) else None
        self.engine: Any = wrapper if is_deepspeed(wrapper) else None
        """DeepSpeed's engine, if one trains."""
        self._engine_steps: EngineSteps | None = None
        if isinstance(collector, DeepSpeedCollector):
            self._engine_steps = collector.steps
        elif self.engine is not None:  # nothing is measured, and steps are counted
            self._engine_steps = EngineSteps(self.engine)
            self._engine_steps.close()
        in_model = None  # FSDP exchanges whole parameters and their shards
        if not is_sharded(wrapper):
            in_model = InModel(module_in(wrapper), norms.names, norms.parameters)
        self._options = options
        self._capture = StepCapture(collector, ddp, grad_scaler, in_model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._rates: deque[float] = deque()
        """The learning rates of measured steps that have not been read."""
        self._cadence = Cadence(options.every_n_steps, options.max_overhead)
        self._counts = _Counts()
        self._follows = False
        self._costs: deque[float] = deque(maxlen=_MOST_COSTS)
        """What the last measured steps cost, over the constant, as far as they were timed."""
        self._log_step = 0
        self._pace = self._said = self._told = NOT_AGREED
        """What steps are measured by since the last log step; what this rank says, and the means
        over ranks in the last row that was read."""
        self._in_groups = self._told_groups = False
        """Whether rows were in groups until the last log step, and in the last row."""
        self.last_step: float | None = None
        """The last step of the training, if it is known: it is measured more often at its end."""
        self._estimates = Estimates(norms.group_names, options, extra)
        self._way = type(collector)
        self._warn = WarnOnce()
        self._device = collector.device
        self._state_at_close: dict[str, Any] = {}
        self._warning_at_close = ""
        self.lr_factor = 1.0
        """The factor on the learning rate while the optimizer steps, of a batch-size scheduler."""
        self._nothing_to_compare = collector.nothing_to_compare
        self.how_to_compare = collector.how_to_compare
        """The remedy if a step has only one small batch."""
        self.suspects: list[str] = []
        """What else may write to gradients, for warnings."""
        self.measuring = True
        """Whether steps are measured: the meter is open."""
        self.stopped_by: NotMeasured | None = None
        """What ended the measurement; None while there is one."""
        self.not_measured: str | None = None
        """Why gradients are not measured, and what to change; None while they are."""
        self.withheld = ""
        """Why what was measured is withheld, and what to do; "" if it is not."""
        self.on_withheld: weakref.WeakMethod[Callable[[], None]] | None = None
        """What is called once the noise scale is withheld. It keeps nobody alive."""
        if reason is not None:
            self.stop(reason)

    @property
    def noise_scale(self) -> NoiseScale:
        """The noise scale now. Reads the device: use it when you log, not at every step."""
        return self.noise_scale_at(self._options.confidence)

    def noise_scale_at(self, confidence: float) -> NoiseScale:
        """Return the noise scale now with an interval of another confidence. Reads the device."""
        self._settle()
        return self._estimates.whole.estimate(
            self.steps, confidence=confidence, learning_rate=self._learning_rate()
        )

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """The noise scale now of each of `groups`."""
        self._settle()
        rate = self._learning_rate()
        groups = self._estimates.groups.items()
        return {name: group.estimate(self.steps, learning_rate=rate) for name, group in groups}

    @property
    def levels(self) -> Levels | None:
        """The noise scale now between and within groups of rows. Reads the device.

        None if no groups were given, or the rows of one group act on each other.
        """
        self._settle()
        return self._estimates.levels.estimate(self.steps, self._learning_rate())

    @property
    def extra(self) -> Collection[ExtraMeasurement]:
        """What is measured beside the noise scale. Reads nothing."""
        return self._estimates.extra.values()

    @property
    def extra_noise_scales(self) -> dict[str, NoiseScale]:
        """The estimate of each of `extra` now, in `unit`, by name."""
        if self.extra:
            self._settle()
        return {one.name: one.estimate(self.noise_scale_at, self.steps) for one in self.extra}

    steps: int = _read("_counts.steps")
    """Optimizer steps so far, measured or not."""
    last_measured_step: int = _read("_counts.last_measured_step")
    """Optimizer steps up to the last measured one. Their examples are counted."""
    accumulation: int = _read("_counts.accumulation")
    """Micro-batches (backward passes) of this rank in the last measured step."""
    unmeasurable_since: int | None = _read("_counts.unmeasurable_since")
    """The step since which measured steps had too few micro-batches; None: the last had enough.
    Such steps are left out, as there is nothing to compare. See `least_micro_batches`."""
    unmeasurable_steps: int = _read("_counts.unmeasurable_steps")
    """Measured steps since `unmeasurable_since`."""
    devices: int = _read("_capture.unread.ranks")
    """Ranks that train together."""
    accepted: bool = _read("_capture.accepted")
    """Whether some step could be measured."""
    measured_steps: int = _read_settled("_counts.measured_steps")
    """Measured steps in the averages, without those that were left out."""
    skipped_steps: int = _read_settled("_counts.skipped_steps")
    """Measured steps that were left out: a gradient was not finite, or had no counterpart."""
    examples: float = _read_settled("_counts.examples")
    """Examples processed by all ranks, up to the last measured step."""
    batch_size: float = _read_settled("_counts.batch_size")
    """Global batch size of the last measured step, in examples; NaN before it."""
    average_moments: GradientMoments | None = _read_settled("_estimates.run.mean")
    """|G|² and tr(Σ), averaged over the run; None before its first step. See `weight_in_run`."""
    sums: MomentSums = _read_settled("_estimates.sums")
    """Sums over the measured steps so far. Their differences describe any part of a run."""

    def take_increments(self) -> dict[str, float]:
        """Return the measurements since the last call, for a row of a `History`."""
        self._settle()
        return self._estimates.increments.take()

    @property
    def measuring_cost(self) -> float:
        """The cost of measuring so far, in steps that are not measured.

        It is computed from what a measured step costs, as ranks agreed on: see `Cadence`.
        """
        return self._counts.spent.plain_steps

    @property
    def unmeasured_examples(self) -> float:
        """Examples since the last measured step, if all ranks have as many as this one."""
        return self._counts.unmeasured_examples * self.devices

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches that a step needs to be measured; 2 if one process compares them."""
        collector = self._capture.collector
        return 1 if collector is None else collector.least_micro_batches

    @property
    def device(self) -> torch.device:
        """Where the norms of gradients are. Once the meter is closed, where they were."""
        if self._capture.collector is not None:
            self._device = self._capture.collector.device
        return self._device

    def backward(
        self,
        loss: Tensor,
        local_batch_size: float,
        *,
        rows: int | None = None,
        weight: Weight | None = None,
        mean_of_means: bool = False,
        row_groups: RowGroupsLike | None = None,
    ) -> None:
        """Call `loss.backward()` and capture the norms of its small batches.

        With DeepSpeed it is `engine.backward(loss)`.

        Args:
            loss: The mean over this rank's examples, divided for accumulation as you do it, and
                scaled if there is a `grad_scaler`. Put a forward pass whose gradients are not to be
                averaged into `no_sync()` too.
            local_batch_size: This rank's examples in `loss`, each counted once however many
                augmented copies of it there are.
            rows: See `before_backward`.
            weight: See `before_backward`.
            mean_of_means: See `before_backward`.
            row_groups: See `before_backward`.
        """
        self.before_backward(
            loss,
            local_batch_size,
            rows=rows,
            weight=weight,
            mean_of_means=mean_of_means,
            row_groups=row_groups,
        )
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss)

    def before_backward(
        self,
        loss: Tensor,
        local_batch_size: float,
        *,
        capture_average: bool = False,
        weight: Weight | None = None,
        mean_of_means: bool = False,
        rows: int | None = None,
        last: bool | None = None,
        row_groups: RowGroupsLike | None = None,
        host: KnownToHost = _NOTHING_MORE,
    ) -> None:
        """Prepare for a `loss.backward()` that follows right after; `backward` does both.

        Args:
            loss: The loss, or any tensor that its backward pass goes through first.
            local_batch_size: See `backward`.
            capture_average: Norm the step's gradient at the end of this pass, for certain. Default:
                if it may be the last pass of the step.
            weight: What is in the mean that the step's loss is, if that is one mean over all passes
                and ranks: the tokens of this pass, for example, where the loss is the sum over its
                tokens divided by the tokens of the step. Only ratios matter. A number, a scalar on
                the device, or a tensor with the weight of each row, which also corrects the halves
                of a batch. If one pass has a weight, all passes need one.
            mean_of_means: Whether the step's loss is a mean, weighted by `weight`, of each pass's
                mean over its examples, and not one mean over what the weights count. Then a pass
                of few examples is noisier than its weight says.
            rows: Rows of the batch, if its halves are compared and `local_batch_size` differs.
            last: Whether the optimizer steps after this pass, if that is known: the only batch of a
                step is measured by its halves. Default: as in the step before.
            row_groups: The group of each row, if the halves of a batch are compared and rows are
                not independent of each other: the completions of one prompt, pairs, augmented
                copies. Numbers or names, in a tensor or a list; a tensor on the device makes a
                measured step wait for the device. Whole groups are in one half then. What
                `local_batch_size` counts is still up to you: rows or groups.
            host: What the callback of a Trainer knows beside.
        """
        check_batch_size(local_batch_size)
        one = BackwardPass(local_batch_size, weight, host.batch, mean_of_means)
        capture = self._capture
        if self.stopped_by is not None:
            return
        if not capture.due:
            capture.count_pass(one)
            return
        groups = None
        if row_groups is not None:
            check_groups_are_used("row_groups", self._options.small_batch)
            groups = checked_row_groups(row_groups)
        try:
            capture.add_pass(
                loss,
                one,
                capture_average=capture_average,
                rows=rows,
                last=last,
                row_groups=groups,
                host=host,
            )
        except NotMeasured as reason:
            self.stop(reason)

    @property
    def way(self) -> str:
        """What measures: the name of the collector, "Halves" for example."""
        return self._way.__name__.removesuffix("Collector")

    @property
    def why_nothing(self) -> str:
        """Why no step was measured, and what to do; "" if that is not known, or some were."""
        if self._counts.measured_steps:
            return ""
        return self.not_measured or self._warn.last or self._last_warning

    @property
    def _last_warning(self) -> str:
        return self._warning_at_close or self._capture.last_warning

    @property
    def due(self) -> bool:
        """Whether the step under way is measured. Weights are not needed in other steps."""
        return self.stopped_by is None and self._capture.due

    def step(self, *, loss_divisor: float | None = None) -> bool:
        """Close the step, and return whether one was closed: see `NoiseScaleMeter.step`.

        Lightning divides losses by the full window, also in the short last one of an epoch.
        """
        if self._engine_steps is not None and not self._engine_steps.advanced():
            return False
        counts, capture = self._counts, self._capture
        unmeasured_steps = counts.steps - counts.last_measured_step
        counts.steps += 1
        if self.stopped_by is not None:
            return True
        try:
            step = capture.close_step(loss_divisor, counts.unmeasured_examples, unmeasured_steps)
        except NotMeasured as reason:
            self.stop(reason)
            return True
        if not step.due:
            for one in step.passes:
                counts.unmeasured_examples += one.size
            self._open_step()
            return True
        self._rates.append(self._learning_rate())
        counts.unmeasured_examples = 0.0
        counts.last_measured_step = counts.steps
        counts.accumulation = len(step.passes) or counts.accumulation
        enough = len(step.passes) >= self.least_micro_batches and not step.left_alone
        counts.unmeasurable_steps = 0 if enough else counts.unmeasurable_steps + 1
        counts.unmeasurable_since = None if enough else counts.unmeasurable_since or counts.steps
        counts.spent = counts.spent.plus(self._cost)
        self._open_step()
        if len(capture.unread) >= _MOST_UNREAD:
            with capture.guard(STEPS_LOST):
                self._settle()
        return True

    def count_step(self, local_examples: float) -> None:
        """Count a step that was not measured, of so many examples of this rank."""
        self._counts.steps += 1
        self._counts.unmeasured_examples += local_examples
        self._open_step()

    def follow(self, decides: bool = True) -> None:
        """Measure for decisions. Call it before the first step.

        Unless `max_overhead` was given, more steps are then measured, as decisions wait for them.

        Args:
            decides: False once all is decided: steps are then measured as without a scheduler. All
                ranks must call it after the same step.
        """
        if self._options.max_overhead is None and decides != self._follows:
            every = self._options.every_n_steps
            self._cadence = Cadence.for_decisions(every) if decides else Cadence(every)
        self._follows = decides

    def agree(
        self, seconds_per_step: float, costs: Iterable[float] = (), *, cheaper: bool = True
    ) -> None:
        """Have all ranks agree on how often they measure. Reads the device.

        Call it at log steps, on all ranks at the same ones. They go by what each of them said in
        the last row that they have summed up, and say what they know now in the rows that follow.

        Args:
            seconds_per_step: Since the last log step; NaN if it is not known.
            costs: Of measured steps since then, in plain steps, as far as they were timed.
            cheaper: Whether costs below the constant count. Else they are taken to be the constant.
        """
        step = self.steps
        try:
            self._settle()
            now = self.noise_scale
            known = now.low > 0 and now.high <= KNOWN_WITHIN * now.low
            if self._log_step and (constant := self._constant):  # the first steps prove more
                least = 0.0 if cheaper else 1.0
                self._costs += [max(cost / constant, least) for cost in costs]
            own = self._said.at(
                step, self._log_step, seconds_per_step, known=known, costs=self._costs
            )
            end = 0.0 if self._follows else self.last_step or 0.0
            self._said = own._replace(last_step=end if math.isfinite(end) else 0.0)
        finally:  # also after an error: all ranks measure the same steps
            self._capture.unread.said = self._said
            self._log_step, self._pace = step, self._told
            self._in_groups = self._told_groups

    def pause(self) -> None:
        """Ignore forward passes until `resume`, for example between two steps.

        The results do not depend on it: only passes that a `backward` follows count. It removes the
        hooks on all modules by which halves find where to separate a batch, and which make
        `torch.export.export(..., strict=True)` fail.
        """
        self._capture.pause(True)

    def resume(self) -> None:
        """End a `pause`: call it before the forward pass of a step."""
        self._capture.pause(False)

    def leave_step_out(self, error: Exception) -> None:
        """Leave the current step out, as its contents are not known; warn once with the reason."""
        if self._capture.ends_with(error):
            self.stop(error)
        else:
            self._capture.leave_step_out(error)

    def stop(self, reason: NotMeasured) -> None:
        """Measure nothing from now on, and remove every hook from the model: training goes on.

        Under several ranks all of them must do so at the same step.
        """
        self.stopped_by, self.not_measured = reason, str(reason)
        Meter.close(self, interrupted=True)  # a subclass logs when it is closed

    def close(self, *, interrupted: bool = False) -> None:
        """Remove every hook from the model. What was measured can still be read.

        Args:
            interrupted: See `NoiseScaleMeter.close`.
        """
        self.measuring = False
        try:
            self._settle(alone=interrupted)
        finally:
            with self._capture.guard("What was learned about the model was not kept"):
                self._state_at_close = self._collector_state
            self._warning_at_close = self._last_warning
            self._capture.close()
            for one in self.extra:
                one.close()

    def _open_step(self) -> None:
        """Begin the next step, which is to be measured or is not."""
        counts = self._counts
        collector = self._capture.collector
        in_pairs = collector is not None and collector.needs_pairs
        due = self._cadence.due(
            counts.steps + 1, counts.spent, self._cost, self._pace, in_pairs=in_pairs
        )
        self._capture.open_step(due=due)

    @property
    def _cost(self) -> float:
        """What measuring a step takes in plain steps, as ranks have agreed on."""
        return self._pace.cost(self._constant)

    @property
    def _constant(self) -> float:
        """What it takes by the constant, as the last ones were."""
        collector = self._capture.collector
        if collector is None:
            return 0.0
        return collector.cost + (collector.cost_in_groups if self._in_groups else 0.0)

    @property
    def _collector_state(self) -> dict[str, Any]:
        """The state of the collector: what it found out about the model in its first steps."""
        collector = self._capture.collector
        return self._state_at_close if collector is None else collector.state_dict()

    def _settle(self, *, alone: bool = False) -> None:
        """Take in the steps that have been reduced."""
        capture = self._capture
        beside: Sequence[Unread] = ()
        if not alone and capture.collector is not None:
            beside = (capture.terms, *capture.collector.beside_rows)
        steps = list(capture.unread.read(without_waiting=alone, beside=beside))
        if steps:
            self._told = Pace(*steps[-1].said)
            self._told_groups = steps[-1].levels is not None
        if steps and not alone:
            capture.terms.settle()
        for step in steps:
            self._take(step)
            if capture.collector is not None:
                capture.collector.take(step)
        if not self.withheld and capture.collector is not None and capture.collector.withheld:
            self._withhold(capture.collector.withheld)

    def _withhold(self, reason: str) -> None:
        """Forget what was measured, and measure no more. Several ranks go on, for each other."""
        self.withheld = reason
        collector = self._capture.collector
        for one in self.extra:
            one.close()
        self._estimates = Estimates([*self._estimates.groups], self._options)
        if self.on_withheld is not None and (told := self.on_withheld()) is not None:
            told()
        if collector is not None and collector.group is None:  # else others may not have read it
            self.stop(NotMeasured(reason))

    def _learning_rate(self) -> float:
        """Return the largest learning rate now; NaN if the host does not know it."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            return math.nan
        rates = [group.get("lr", math.nan) for group in optimizer.param_groups]
        if any(isinstance(rate, Tensor) and not rate.is_cpu for rate in rates):
            return math.nan
        return self.lr_factor * max(map(float, rates))

    def _take(self, step: MeasuredStep) -> None:
        """Take a step into the averages, or leave it out."""
        counts, norms = self._counts, step.norms
        counts.examples += step.unmeasured_examples
        counts.examples += norms.examples
        counts.batch_size = norms.examples
        rate = self._rates.popleft() if self._rates else math.nan
        sound = not self.withheld and self._is_sound(step)
        if self._estimates.take(step, sound=sound, learning_rate=rate):
            counts.measured_steps += 1
        else:
            counts.skipped_steps += 1

    def _is_sound(self, step: MeasuredStep) -> bool:
        """Return whether a step shows the noise; warn if not and the user can change that."""
        capture, counts, changes = self._capture, self._counts, step.changes
        if changes.checked:
            capture.note_check(clean=changes.cause is None)
        if changes.cause is not None:
            suspects = [*self.suspects]
            if capture.collector is not None:
                norms = capture.collector.norms
                suspects += hooks_on(zip(norms.names, norms.parameters, strict=True))
            self._warn(changes.explain(changes.cause, capture.gone, suspects), about=changes.cause)
            return False
        fault = fault_in(
            step.norms,
            self._way,
            nothing_to_compare=f"{self._nothing_to_compare} {self.how_to_compare}",
            lone=counts.unmeasurable_since is not None,
            measured=counts.measured_steps > 0,
        )
        if fault:
            self._warn(fault)
        return fault is None

    def state_dict(self, *, interrupted: bool = False) -> dict[str, Any]:
        """Return everything measured so far, see `NoiseScaleMeter.state_dict`."""
        self._settle(alone=interrupted)
        return {
            "estimates": self._estimates.state_dict(),
            "counts": to_builtins(self._counts),
            "collector": self._collector_state,
            "lr_factor": self.lr_factor,
            "pace": {"log_step": self._log_step, **self._pace._asdict()},
            "in_groups": self._in_groups,
            "withheld": self.withheld,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, see `NoiseScaleMeter.load_state_dict`.

        After an error the averages start again, and the counts that the state has are continued.
        """
        begun_anew = self._estimates.state_dict()
        self.lr_factor = state["lr_factor"]
        try:
            for name, now in vars(self._counts).items():
                setattr(self._counts, name, restore(now, state["counts"][name]))
            agreed = {**state["pace"]}
            self._log_step = agreed.pop("log_step")
            self._pace = self._said = self._told = self._capture.unread.said = Pace(**agreed)
            self._in_groups = self._told_groups = bool(state.get("in_groups", False))
            if self._capture.collector is not None:  # which steps are due goes by what it knows
                self._capture.collector.load_state_dict(state["collector"])
            self._estimates.load_state_dict(state["estimates"])
        except Exception:
            self._estimates.load_state_dict(begun_anew)
            raise
        finally:
            # Averages that begin anew do so in the middle of the run.
            self._estimates.step = self._counts.last_measured_step
            self._open_step()
            if reason := state["withheld"]:
                self._withhold(reason)
