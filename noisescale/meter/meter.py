# SPDX-License-Identifier: Apache-2.0
"""NoiseScaleMeter: a collector and an estimator behind one object, for any torch loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from noisescale.checks import is_real, is_whole
from noisescale.collectors.choosing import SmallBatch, choose_collector, unwrapped
from noisescale.collectors.collector import Collector
from noisescale.collectors.ddp import refuse_join
from noisescale.collectors.groups import Groups
from noisescale.collectors.loss_scale import LossScale
from noisescale.collectors.per_example.collector import Layers
from noisescale.collectors.per_example.coverage import LEAST_COVERAGE
from noisescale.collectors.rows.step_norms import StepNorms
from noisescale.collectors.rows.step_rows import StepRows
from noisescale.collectors.rows.window_layout import UNKNOWN, Weight, WindowLayout
from noisescale.estimation.moments import GradientMoments
from noisescale.estimation.noise_scale import NoiseScale
from noisescale.estimation.recent import RecentSteps
from noisescale.guard import Guard, RefusalError
from noisescale.meter.estimates import Estimates, MomentSums

# Reduced steps wait on the device until somebody asks; this many at most (a few kB).
_MOST_UNREAD = 1024

# Where a measured step has one more backward pass, and "auto" decides.
_EVERY_N_STEPS = 10

_STEPS_LOST = "A step's noise scale was not measured"


class _Pass(NamedTuple):
    """What was said of one backward pass, see `NoiseScaleMeter.before_backward`."""

    size: float
    weight: Weight | None
    batch: int | None


class NoiseScaleMeter:
    """Measure the gradient noise scale in a torch loop.

    The gradients of many small batches are compared with the one that the step is taken with.
    What a small batch is depends on the way of training:

    | `small_batch` | compared with the step's gradient | needs |
    |---|---|---|
    | `"rank"` | each rank's gradient, before it is averaged | DDP or FSDP2, two ranks or more |
    | `"micro_batch"` | that of every micro-batch (of every rank) | accumulation, or ranks |
    | `"half"` | those of two halves of a batch, from one backward pass more | one process |
    | `"example"` | that of every example, by layers | Linear, Conv, Embedding, normalization |

    With `"half"` a step of several micro-batches is measured by these.

    Norms cross ranks in one small asynchronous all-reduce a step, and stay on the device until
    `noise_scale` is read. Gradients are read only: training is bitwise what it is without the
    meter.

    Args:
        model: The DistributedDataParallel module, or one sharded by `fully_shard`; in one process
            any module. Fabric's and torch.compile's wrappers are looked through.
        window: See `NoiseScaleEstimator`.
        confidence: See `NoiseScaleEstimator`.
        unit: See `NoiseScaleEstimator`.
        every_n_steps: Measure one optimizer step in so many; "auto": every step, but one in ten
            where that takes a backward pass more. Windows count measured steps.
        parameters: The parameters that are trained; default: all that require a gradient.
        small_batch: See above. "auto": the rank where several train, else the half.
        layers: Of which examples are compared: "all" that have a formula, or only those of
            "normalization", which cost next to nothing and tend to follow the whole. They imply
            `small_batch="example"`.
        groups: From names of groups to regular expressions (one or a list) that are found in the
            names of their parameters; or a function from a parameter's name to its group's, None
            for those in none. A parameter belongs to the first group that fits. Each group gets a
            noise scale of its own from the same pass.
        grad_scaler: The GradScaler whose `scale(loss)` is passed to `backward`.
        preconditioner: The optimizer, of Adam's family, by whose second moments gradients are
            divided for `preconditioned_noise_scale`, which is not B_simple.
        cut: Where halves of a batch are told apart: names of modules whose outputs have its rows in
            front, and which all that is trained acts through. Default: modules that the training
            step calls, or else what comes nearest to the loss.

    Raises:
        TypeError: If several processes train and `model` is not wrapped.
        ValueError: If an argument is out of its range, or no parameter requires a gradient. In a
            step, if it is taken within `model.join()`.

    Example:
        >>> from noisescale import NoiseScaleMeter
        >>> def train(ddp_model, optimizer, batches, loss_function):
        ...     meter = NoiseScaleMeter(ddp_model)
        ...     for x, y in batches:
        ...         optimizer.zero_grad()
        ...         loss = loss_function(ddp_model(x), y)
        ...         meter.backward(loss, local_batch_size=len(x))
        ...         meter.step()
        ...         optimizer.step()
        ...     print(meter.noise_scale)

    References:
        McCandlish et al. 2018, arXiv:1812.06162, appendix A.1. Gray et al. 2024, arXiv:2411.00999,
        for examples and normalization layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window: int | Literal["auto"] = "auto",
        confidence: float = 0.95,
        unit: str = "examples",
        every_n_steps: int | Literal["auto"] = "auto",
        parameters: Iterable[nn.Parameter] | None = None,
        small_batch: SmallBatch = "auto",
        layers: Layers = "all",
        groups: Groups | None = None,
        grad_scaler: GradScaler | None = None,
        preconditioner: Optimizer | None = None,
        cut: Sequence[str] | None = None,
    ) -> None:
        self._every_n_steps = checked_every_n_steps(every_n_steps)
        # Arguments are checked before the collector puts hooks into the model.
        Estimates((), False, window, confidence, unit)
        collector = choose_collector(
            model,
            small_batch=small_batch,
            layers=layers,
            parameters=parameters,
            groups=groups,
            preconditioner=preconditioner,
            cut=cut,
        )
        self._collector: Collector | None = collector
        wrapper = unwrapped(model)
        self._ddp = wrapper if isinstance(wrapper, DistributedDataParallel) else None
        self._estimates = Estimates(
            collector.norms.group_names, preconditioner is not None, window, confidence, unit
        )
        self._rows = StepRows(collector.norms, collector.group)
        self._loss_scale = LossScale(grad_scaler)
        self._guard = Guard()
        self._coverage = 1.0  # of a collector that is closed
        self._covered = True
        self._least_coverage = 0.0 if layers == "normalization" else LEAST_COVERAGE
        self._spoiled = False  # the step under way
        self._accepted = False  # a step as this way of measuring needs it
        self._passes: list[_Pass] = []
        self._unmeasured_examples = 0.0
        self._warned: set[str] = set()
        self._paused = False
        self._due = True  # the step under way is to be measured
        self._steps = 0
        self._last_measured_step = 0
        self._measured_steps = 0
        self._skipped_steps = 0
        self._lone_since: int | None = None
        self._examples = 0.0
        self._batch_size = math.nan
        self._accumulation = 1
        self._found_before: dict[str, Any] = {}

    @property
    def noise_scale(self) -> NoiseScale:
        """The latest estimate. Reads the device: ask when you log, not at every step."""
        self._settle()
        return self._estimates.whole

    def follow(self, confidence: float = 0.95) -> None:
        """Keep the last steps from now on, for `recent_noise_scale`; call it before the first."""
        if self._estimates.recent is None:
            unit = self._estimates.whole.unit
            self._estimates.recent = RecentSteps(confidence=confidence, unit=unit)

    @property
    def recent_noise_scale(self) -> NoiseScale:
        """That of as few of the last steps as suffice, see `RecentSteps`: to decide upon.

        Raises:
            RuntimeError: If `follow` has not been called.
        """
        self._settle()
        if self._estimates.recent is None:
            raise RuntimeError("The last steps are not kept. Call `follow()` before training.")
        return self._estimates.recent.estimate()

    @property
    def average_moments(self) -> GradientMoments | None:
        """|G|² and tr(Σ) averaged over the run, steps weighted by their batch; None before it."""
        return self.sums.mean

    @property
    def group_noise_scales(self) -> dict[str, NoiseScale]:
        """The latest estimate for each of `groups`."""
        self._settle()
        return self._estimates.groups

    @property
    def preconditioned_noise_scale(self) -> NoiseScale | None:
        """The noise scale of g/(√v̂ + ε), see `preconditioner`; None where there is none.

        tr(Σ)/|G|² of the gradient as Adam scales it, in `unit`. It is not B_simple: the
        documentation tells what is known about it.
        """
        self._settle()
        return self._estimates.preconditioned

    @property
    def steps(self) -> int:
        """Optimizer steps so far, measured or not."""
        return self._steps

    @property
    def last_measured_step(self) -> int:
        """Optimizer steps up to the last measured one: those whose examples are counted."""
        return self._last_measured_step

    @property
    def skipped_steps(self) -> int:
        """Measured steps left out: a gradient was not finite, or had nothing to compare with."""
        self._settle()
        return self._skipped_steps

    @property
    def measured_steps(self) -> int:
        """Measured steps that are in the averages: those that were not left out."""
        self._settle()
        return self._measured_steps

    @property
    def lone_since(self) -> int | None:
        """The step since which all measured ones had too few micro-batches; None: the last had not.

        See `least_micro_batches`: such steps are left out, as there is nothing to compare.
        """
        return self._lone_since

    @property
    def examples(self) -> float:
        """Examples processed by all ranks, up to the last measured step."""
        self._settle()
        return self._examples

    @property
    def batch_size(self) -> float:
        """Global batch size of the last measured step, in examples; NaN before it."""
        self._settle()
        return self._batch_size

    @property
    def coverage(self) -> float:
        """Share of |g|² that is of parameters which are measured. Reads the device.

        Below 1 with `small_batch="example"` alone, where some layers have no formula. Below 0.9
        steps are left out, unless `layers="normalization"` was asked for.
        """
        return self._coverage if self._collector is None else self._collector.coverage

    @property
    def sums(self) -> MomentSums:
        """Sums over the measured steps so far: differences tell of any stretch of a run."""
        self._settle()
        return self._estimates.sums

    def take_increments(self) -> dict[str, float]:
        """Return what was measured since the last call, for a row of a `History`."""
        self._settle()
        return self._estimates.increments.take()

    @property
    def accumulation(self) -> int:
        """Micro-batches (backward passes) of this rank in the last measured step."""
        return self._accumulation

    @property
    def least_micro_batches(self) -> int:
        """Micro-batches that a step needs to be measured; 2 where one process compares them."""
        return 1 if self._collector is None else self._collector.least_micro_batches

    @property
    def devices(self) -> int:
        """Ranks that train together."""
        return self._rows.ranks

    def backward(self, loss: Tensor, local_batch_size: float, *, rows: int | None = None) -> None:
        """Call `loss.backward()` and capture the norms of its small batches.

        Args:
            loss: The mean over this rank's examples, divided for accumulation as you do it, and
                scaled if there is a `grad_scaler`. A forward pass whose gradients are not to be
                averaged belongs into `no_sync()` too.
            local_batch_size: This rank's examples in `loss`, each counted once however many
                augmented copies of it there are.
            rows: See `before_backward`.
        """
        self.before_backward(loss, local_batch_size, rows=rows)
        loss.backward()

    def before_backward(
        self,
        loss: Tensor,
        local_batch_size: float,
        *,
        capture_average: bool = False,
        weight: Weight | None = None,
        batch: int | None = None,
        rows: int | None = None,
        last: bool | None = None,
    ) -> None:
        """Do what `backward` does, where somebody else calls `loss.backward()` right after.

        Args:
            loss: The loss, or any tensor of the graph that its backward pass goes through first.
            local_batch_size: See `backward`.
            capture_average: Set at the last pass of a step whose gradients will be clipped or
                unscaled before `step` can be called: they are normed at the end of this pass.
            weight: What the mean loss was multiplied by, up to a factor common to all passes and
                ranks, where they do not count alike: its share of the tokens, say. A number, or a
                scalar on the device. Then all passes need one.
            batch: Which batch of data the loss is of, where several passes of a step may be of
                one: such a step is not measured, as `local_batch_size` is not that of each pass.
            rows: Of the batch, where halves of it are compared and `local_batch_size` is another.
            last: Whether the step is taken after this pass, where that is known: a batch that is
                the step's only one is measured by its halves. Default: as in the step before.
        """
        check_batch_size(local_batch_size)
        collector = self._open_collector()
        with self._spoils_step():
            if not collector.norms.any_trained():
                return  # another optimizer's turn, with this one's parameters toggled off
            if self._passes and collector.gradients_dropped:
                collector.reset()
                self._passes = []
            self._passes.append(_Pass(local_batch_size, weight, batch))
            if self._due:
                collector.expect(rows=rows, last=last)
                collector.before_backward(loss, local_batch_size, capture_average=capture_average)

    def step(self, *, loss_divisor: float | None = None) -> None:
        """Close the step: call it before gradient clipping and `optimizer.step()`.

        Every rank must call it for every optimizer step, also for one without a backward.

        Args:
            loss_divisor: What each loss of this accumulation window was divided by. Default:
                the number of backward passes in the window, which makes the gradient a mean.
                Lightning divides by its full window also when the last one of an epoch is short.
        """
        collector = self._open_collector()
        measured = self._due
        if measured:
            with self._spoils_step():
                self._leave_out_what_did_not_reach(collector)
        sizes = [one.size for one in self._passes]
        self._steps += 1
        if measured:
            self._send_row(collector, sizes, loss_divisor or len(sizes))
            self._unmeasured_examples = 0.0
            self._last_measured_step = self._steps
            self._accumulation = len(sizes) or self._accumulation
            if len(sizes) >= self.least_micro_batches:
                self._lone_since = None
            elif self._lone_since is None:
                self._lone_since = self._steps
        else:
            self._unmeasured_examples += sum(sizes)
        self._passes = []
        self._spoiled = False
        with self._spoils_step():  # the next one
            collector.reset()
        self._due = self._steps % self.every_n_steps == 0
        with self._spoils_step():
            collector.wanted = self._due and not self._paused
        if len(self._rows) >= _MOST_UNREAD:
            with self._guard(_STEPS_LOST):
                self._settle()

    def pause(self) -> None:
        """Look at no forward pass until `resume`, as between two steps.

        Nothing measured needs it: only passes that a `backward` follows count. With
        `small_batch="example"` a hook for all modules is gone meanwhile, which costs each of them
        some microseconds, and which `torch.export.export(..., strict=True)` fails on.
        """
        self._pause(True)

    def resume(self) -> None:
        """End a `pause`: call it before the forward pass of a step."""
        self._pause(False)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        if self._collector is not None:
            self._collector.wanted = self._due and not paused

    def close(self, *, interrupted: bool = False) -> None:
        """Remove every hook from the model. What was measured can still be read.

        Args:
            interrupted: See `state_dict`.
        """
        try:
            self._settle(alone=interrupted)
        finally:
            self._rows.clear()
            if self._collector is not None:
                self._found_before = self._found
                with self._guard("The coverage was not read"):
                    self._coverage = self._collector.coverage
                self._collector.close()
                self._collector = self._ddp = None

    @property
    def _found(self) -> dict[str, Any]:
        """What the collector found out about the model in its first steps."""
        return self._found_before if self._collector is None else self._collector.state_dict()

    @property
    def every_n_steps(self) -> int:
        """One step in so many is measured, as things are: "auto" goes by what a step costs."""
        if self._every_n_steps != "auto":
            return self._every_n_steps
        takes_a_pass = self._collector is not None and self._collector.takes_a_pass
        return _EVERY_N_STEPS if takes_a_pass else 1

    def _open_collector(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("This meter is closed. Make a new one and load its `state_dict`.")
        if self._ddp is not None:
            refuse_join(self._ddp)
        return self._collector

    def _leave_out_what_did_not_reach(self, collector: Collector) -> None:
        """Passes of another optimizer's loss, that left these parameters alone, do not count."""
        reached = collector.reached
        if reached is None or any(one.weight is not None for one in self._passes):
            return
        pairs = zip(self._passes, reached, strict=True)
        self._passes = [one for one, here in pairs if here]

    def leave_step_out(self, error: Exception) -> None:
        """Leave the step under way out, as it cannot be told what is in it; warn once why."""
        self._spoiled = True
        self._guard.tell(_STEPS_LOST, error)

    @contextmanager
    def _spoils_step(self) -> Iterator[None]:
        """Have errors leave out the step that is under way, and no more.

        A refusal is for the first steps: whoever asked for what cannot be had is told there.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, RefusalError) and not self._accepted:
                raise
            self.leave_step_out(error)

    def _send_row(self, collector: Collector, sizes: list[float], loss_divisor: float) -> None:
        """Reduce the step's row: whatever becomes of it here, the other ranks reduce theirs."""
        small: Tensor | None = None
        big: Tensor | None = None
        layout = UNKNOWN
        try:
            with self._spoils_step():
                small, big = self._norms(collector)
                layout = self._layout(collector, sizes, loss_divisor)
                self._accepted |= small is not None
        finally:
            with self._spoils_step():
                self._rows.add(
                    None if self._spoiled else small,
                    big,
                    layout,
                    examples=float(sum(sizes)),
                    unmeasured_examples=self._unmeasured_examples,
                )

    def _norms(self, collector: Collector) -> tuple[Tensor | None, Tensor]:
        """The small norms of the step, None where there are none to rely on, and the big one."""
        if collector.averaged_too_often:
            self._warn(
                "Gradients were averaged over ranks more than once in one step, which mixes local"
                " and averaged ones: such steps are not measured. Wrap all but the last backward"
                " of a step in `model.no_sync()`, or compare micro-batches:"
                ' `small_batch="micro_batch"`.'
            )
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        batches = [one.batch for one in self._passes if one.batch is not None]
        if len(set(batches)) < len(batches):
            small = None
            self._warn(
                "Several backward passes of one step were of the same batch: such steps are not"
                " measured, as nobody knows how many examples each pass had. Add the losses and"
                " call `manual_backward` once a batch."
            )
        as_they_are_now = not collector.average_captured
        return (
            None if small is None else self._loss_scale.without(small),
            self._loss_scale.without(big, unscaled_with_gradients=as_they_are_now),
        )

    def _layout(
        self, collector: Collector, sizes: list[float], loss_divisor: float
    ) -> WindowLayout:
        weights = [one.weight for one in self._passes if one.weight is not None]
        if not weights:
            return collector.layout(sizes, loss_divisor)
        if len(weights) == len(sizes):
            return collector.weighted_layout(sizes, weights)
        raise RefusalError(
            "`weight` must be given for all backward passes of a step or for none, got"
            f" {len(weights)} for {len(sizes)} passes. Pass 1 for those that count once."
        )

    def _settle(self, *, alone: bool = False) -> None:
        """Take in the steps that have been reduced."""
        steps = list(self._rows.read(without_waiting=alone))
        self._covered = not steps or self.coverage >= self._least_coverage
        for step in steps:
            self._examples += step.unmeasured_examples
            self._absorb(step.norms, step.entries)

    def _absorb(self, norms: StepNorms, entries: list[StepNorms]) -> None:
        self._examples += norms.examples
        self._batch_size = norms.examples
        if not norms.comparable:
            self._skipped_steps += 1
            if norms.alone and self._estimates.whole.steps == 0:
                self._warn((self._collector or Collector).nothing_to_compare)
        elif norms.identical_parts:
            self._skipped_steps += 1
            self._warn(
                "All ranks or micro-batches had one and the same gradient: such steps are not"
                " measured. Give each its own examples, ranks by a `DistributedSampler`. What is"
                " drawn at random (the input of a generator) needs a seed of its own on each rank."
            )
        elif not self._covered:
            self._skipped_steps += 1
            self._warn(
                "Single examples can be told apart only in layers with less than"
                f" {self._least_coverage:.0%} of |g|²: such steps are not measured, as the rest may"
                " have another noise. Compare ranks, micro-batches, or in one process halves of"
                ' each batch: `small_batch="auto"`.'
            )
        else:
            moments = [entry.moments() for entry in entries]
            if self._estimates.update(norms.moments(), moments, weight=norms.examples):
                self._measured_steps += 1
            else:
                self._skipped_steps += 1

    def _warn(self, message: str) -> None:
        if message not in self._warned and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(message, stacklevel=4)
        self._warned.add(message)

    def state_dict(self, *, interrupted: bool = False) -> dict[str, Any]:
        """Return everything measured so far, in builtins: it loads weights-only.

        Runs no collective, so that one rank can save alone. All of it is alike on all ranks but
        the examples since the last measured step, which are this rank's: with `every_n_steps`
        above 1 and ranks of unequal batches `examples` is off by as many after resuming.

        Args:
            interrupted: Set after an error, when other ranks may be gone: steps that have not
                been read yet are left out where reading them would mean to wait.
        """
        self._settle(alone=interrupted)
        return {
            "estimates": self._estimates.state_dict(),
            "steps": self._steps,
            "last_measured_step": self._last_measured_step,
            "measured_steps": self._measured_steps,
            "skipped_steps": self._skipped_steps,
            "examples": self._examples,
            "unmeasured_examples": self._unmeasured_examples,
            "batch_size": self._batch_size,
            "accumulation": self._accumulation,
            "lone_since": self._lone_since,
            "collector": self._found,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, saved with the same `window` and `unit`.

        Raises:
            ValueError: If it was saved with others.
            KeyError: If something is missing in it.

        In either case the averages begin anew, and what the state has of counts is counted on.
        """
        self._steps = state["steps"]
        self._last_measured_step = state["last_measured_step"]
        begun_anew = self._estimates.state_dict()
        try:
            self._measured_steps = state.get("measured_steps", 0)  # which earlier versions lack
            self._skipped_steps = state["skipped_steps"]
            self._examples = state["examples"]
            self._unmeasured_examples = state["unmeasured_examples"]
            self._batch_size = state["batch_size"]
            self._accumulation = state["accumulation"]
            self._lone_since = state.get("lone_since")  # earlier versions saved none
            if self._collector is not None:
                self._collector.load_state_dict(state["collector"])
            self._estimates.load_state_dict(state["estimates"])
        except Exception:
            self._estimates.load_state_dict(begun_anew)
            raise
        finally:
            self._due = self._steps % self.every_n_steps == 0
            if self._collector is not None:
                self._collector.wanted = self._due and not self._paused


def check_batch_size(value: float, name: str = "`local_batch_size`") -> None:
    """Raise unless it is a number of examples; `name` is where it comes from."""
    if not is_real(value):
        raise TypeError(
            f"{name} must be a number, got an object of type {type(value).__name__}. Take"
            " `int(...)` of a tensor, on the host: of one on the device it would wait for it at"
            " every step."
        )
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} must be a number of examples, got {value!r}."
            " Pass how many examples of this rank are in the loss."
        )


def checked_every_n_steps(value: int | Literal["auto"]) -> int | Literal["auto"]:
    """Return `value`, or raise a ValueError that says what is wrong with it."""
    if value == "auto":
        return "auto"
    if not is_whole(value) or value < 1:
        raise ValueError(
            f"`every_n_steps` must be at least 1, got {value!r}. Pass 1 to measure every step,"
            ' or "auto".'
        )
    return int(value)
