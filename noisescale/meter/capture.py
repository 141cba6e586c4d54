# SPDX-License-Identifier: Apache-2.0
"""Capture the norms of one optimizer step after another, and reduce them over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.weights import GuessedTerms
from noisescale.collectors.changes import UNTOUCHED, Changes
from noisescale.collectors.collector import Collector
from noisescale.collectors.ddp import refuse_join
from noisescale.collectors.gathered import GatheredRows
from noisescale.collectors.halves.parts import Parts
from noisescale.collectors.in_model import InModel
from noisescale.collectors.loss_scale import LossScale
from noisescale.collectors.rows.group_levels import (
    NO_LEVELS,
    GroupedPass,
    RankLevels,
    levels_of_step,
    split_group,
)
from noisescale.collectors.rows.step_rows import (
    NO_LOSS,
    NOTHING_BESIDE,
    NOTHING_HEARD,
    Heard,
    LossSum,
    StepRows,
)
from noisescale.collectors.rows.window_layout import UNKNOWN, Weight, WindowLayout, halved_layout
from noisescale.collectors.squared_norms import wide_dtype
from noisescale.guard import Guard, NotMeasured, WarnOnce
from noisescale.meter.cross_entropy import is_cross_entropy
from noisescale.meter.loss_terms import LossTerms
from noisescale.refusal import Refusal

_CHECKS = 8
"""Checked steps in a row without a finding, until fewer are checked."""

_MOST_EMPTY = 3
"""Steps without a backward pass from the start on, at which it is said that none was seen."""

_CHECK_EVERY = 16
"""One of this many measured steps is checked after `_CHECKS`."""

STEPS_LOST = "A step's noise scale was not measured"


_SPLIT = (
    "Rows of one group are in two micro-batches of a step: those of {}. So these are not"
    " independent of each other, and the halves of the first one, with two rows of a group in it,"
    " could not be compared. Such steps are not measured. Have each micro-batch hold whole groups,"
    " or the step one micro-batch, or use several devices, each with whole groups."
)


class KnownToHost(NamedTuple):
    """What a Trainer's callback knows of a backward pass beside what a loop of one's own gives."""

    batch: int | None = None
    """Index of the batch that the loss is of, if several passes of a step may use one batch. Such a
    step is not measured, as the examples of each pass are not known."""
    terms: Weight | GuessedTerms | None = None
    """The tokens that count in the loss, by a mask, labels or a guess, if there is no `weight`. A
    warning tells if the losses follow them, so that a `weight` is needed."""
    mean_loss: Tensor | None = None
    """The mean loss of the examples, neither divided nor scaled, if it is not the loss of the pass.
    The history has it, see `History`."""


class BackwardPass(NamedTuple):
    """The caller's arguments for one backward pass, see `NoiseScaleMeter.before_backward`."""

    size: float
    weight: Weight | None
    """The weight of the loss, or of each row of the batch."""
    batch: int | None
    mean_of_means: bool = False
    loss: Tensor | None = None
    """The loss without its scale, if it is a cross-entropy alone; times `size` if it is a mean."""
    whole: bool = False
    """Whether `loss` is a mean that was not divided for accumulation."""
    grouped: GroupedPass | None = None
    """The groups of its rows, if they are given."""

    def with_loss(self, loss: object, scale: LossScale | None) -> BackwardPass:
        """Return the pass with its loss. Without a scale that is its mean, and whole."""
        if type(loss) is not Tensor or loss.dim() or not is_cross_entropy(loss):
            return self  # also for the start of several tensors, or a DTensor
        found = loss.detach().to(wide_dtype(loss.device), copy=True)
        if scale is None:
            return self._replace(loss=found * self.size, whole=True)
        found = scale.unscale_loss(found)
        return self._replace(loss=found * self.size if self.weight is None else found)

    @property
    def total_weight(self) -> Weight:
        """The weight of the loss."""
        weight = self.weight
        assert weight is not None
        if isinstance(weight, Tensor):  # of the device's numbers nothing is read
            total, positive = weight.detach().float(), weight >= 0
            if weight.dim():
                total, positive = total.sum(), positive.all()
            return torch.where(positive & (total < math.inf), total, math.nan)
        if not 0 <= weight < math.inf:
            raise Refusal(
                "weight",
                "be finite and not negative",
                repr(weight),
                "Pass the number of tokens, positives or other terms of the mean that the loss is",
            )
        return float(weight)


@dataclass
class StepUnderWay:
    """One optimizer step, from its first backward pass until the optimizer steps."""

    due: bool
    """Whether the step is to be measured."""
    passes: list[BackwardPass] = field(default_factory=list)
    too_short: bool = False
    """Whether the step ended earlier than any before, at a pass that was not taken for its last."""
    left_alone: bool = False
    """Whether the step had one small batch, where steps have several."""
    begun_in_a_pass: bool = False
    """Whether a pass was announced while another one ran."""
    begun_again: bool = False
    """Whether gradients were dropped after some passes: the step began again."""
    spoiled: bool = False
    """Whether the step is left out because its contents are not known."""
    shares_groups: bool = False
    """Whether its micro-batches share groups of rows."""
    misfit: NotMeasured | None = None
    """Why groups of rows do not fit their batch."""
    gathered: str | None = None
    """What a loss gathers rows of other ranks with."""

    @property
    def repeats_a_batch(self) -> bool:
        """Whether several passes were of one batch."""
        batches = [one.batch for one in self.passes if one.batch is not None]
        return len(set(batches)) < len(batches)

    def keep(self, reached: list[bool] | None) -> None:
        """Keep the passes that reached a measured parameter; None: not known, keep all.

        Passes of another optimizer's loss, which did not reach these parameters, do not count. So
        the two networks of a GAN tell their own passes from passes that only flow through them.
        """
        if reached is not None and all(one.weight is None for one in self.passes):
            pairs = zip(self.passes, reached, strict=True)
            self.passes = [one for one, here in pairs if here]

    def loss(self, loss_divisor: float | None, *, later: bool) -> LossSum:
        """Return the loss of the step, if it is known of all passes. An engine may divide later."""
        losses = [one.loss for one in self.passes if one.loss is not None]
        if not losses or len(losses) < len(self.passes):
            return NO_LOSS
        first, total, passes = self.passes[0], torch.stack(losses).sum(), len(losses)
        examples = float(sum(one.size for one in self.passes))
        if first.whole:
            return total, examples
        total = total / passes if later else total
        if first.weight is None:
            return total * (loss_divisor or passes), examples
        return total, 1.0  # a part of one mean over the step

    def layout(self, collector: Collector, loss_divisor: float | None) -> WindowLayout:
        """Return what the norms that `collector` captured are norms of."""
        sizes = [one.size for one in self.passes]
        weights = [one.total_weight for one in self.passes if one.weight is not None]
        if not weights:
            found = collector.layout(sizes, loss_divisor or len(sizes))
            return halved_layout(found, sum(sizes)) if self.shares_groups else found
        if len(weights) == len(sizes):
            over_step = float(not any(one.mean_of_means for one in self.passes))
            found = collector.weighted_layout(sizes, weights)
            found = halved_layout(found, sum(sizes)) if self.shares_groups else found
            return found._replace(over_step=over_step)
        raise NotMeasured(
            "`weight` must be given for all backward passes of a step or for none, got"
            f" {len(weights)} for {len(sizes)} passes. Pass 1 for passes that count once."
        )


class StepCapture:
    """Captures each step with a collector, and reduces the captured norms over ranks.

    An error leaves out only the step that it happens in. The other ranks take part in a collective
    at each measured step, so this rank does too, even after an error.

    Args:
        collector: A collector with its hooks in the model.
        ddp: The model that the collector was made for, if it is a DistributedDataParallel.
        grad_scaler: The scaler of the losses, if there is one.
        in_model: The places of the measured parameters; None: they are replaced in each step.
    """

    def __init__(
        self,
        collector: Collector,
        ddp: DistributedDataParallel | None,
        grad_scaler: GradScaler | None,
        in_model: InModel | None = None,
    ) -> None:
        self.unread = StepRows(collector.norms, collector.group, collector.sharing)
        """Measured steps that have been sent and not yet read."""
        self.guard = Guard()
        self.terms = LossTerms(self.unread.ranks)
        """Whether the first losses follow their weights."""
        self.collector: Collector | None = collector
        """The collector; None once the capture is closed."""
        self.gone: list[str] = []
        """Parameters whose gradients were gone at the end of a pass, when that last happened."""
        self._alone = collector.group is None
        collector.may_be_unscaled = grad_scaler is not None
        self._ddp = ddp
        self._in_model = in_model
        self._loss_scale = LossScale(grad_scaler, collector.norms.parameters)
        self._gathered = GatheredRows(collector.group)
        self._warn = WarnOnce()
        self._step = StepUnderWay(due=True)
        self._paused = False
        self._fewest_passes: int | None = None
        self._empty_steps = self._splits = 0
        self._clean_checks = 0
        self._until_check = 0
        self._spoils_step = _SpoilsStep(self)
        self.accepted = False
        """Whether some step met the needs of this way of measuring."""

    def add_pass(
        self,
        loss: Tensor,
        one: BackwardPass,
        *,
        capture_average: bool,
        rows: int | None,
        last: bool | None,
        row_groups: RowGroups | None,
        host: KnownToHost,
    ) -> None:
        """Arrange for the next backward pass to be captured, see `NoiseScaleMeter`.

        Call it in steps that are measured. In other steps call `count_pass`.
        """
        collector, step = self._open_collector(), self._step
        if self._ddp is not None:
            refuse_join(self._ddp)
        with self._spoils_step:
            if not collector.norms.any_trained():
                return  # another optimizer's turn, with this one's parameters toggled off
            if step.passes and collector.gradients_dropped:
                collector.reset()
                step.passes, step.begun_again = [], True
            if last is None and collector.captures_freely:  # it may be the last
                capture_average |= len(step.passes) + 1 >= (self._fewest_passes or 1)
                step.too_short = not (capture_average or self._checking)
            given = one.weight is not None
            seen = one.weight if given else host.terms
            self.terms.look(loss, seen, which=len(step.passes), given=given)
            scaled = self._loss_scale if host.mean_loss is None else None
            one = one.with_loss(loss if host.mean_loss is None else host.mean_loss, scaled)
            step.passes.append(one)
            step.gathered = self._gathered.find_in_graph(loss) or step.gathered
            step.begun_in_a_pass |= torch._C._current_graph_task_id() != -1
            if step.begun_in_a_pass:
                return
            weights = one.weight if isinstance(one.weight, Tensor) and one.weight.dim() else None
            if weights is not None and weights.dim() > 1:  # of the terms in each row
                weights = weights.flatten(1).sum(1)
            if row_groups is not None:
                try:
                    Parts.from_batch(one.size, rows, weights, row_groups)
                except NotMeasured as reason:
                    step.misfit = reason
                of_pass = 1.0 if one.weight is None else one.weight
                grouped = GroupedPass(row_groups, weights, of_pass)
                step.passes[-1] = one._replace(grouped=grouped)
            if step.gathered is not None:  # a pass of ours would wait for other ranks
                row_groups = None
            collector.expect(rows=rows, last=last, row_weights=weights, row_groups=row_groups)
            collector.check_next_passes(self._checking)
            collector.before_backward(loss, one.size, capture_average=capture_average or bool(last))

    def count_pass(self, one: BackwardPass) -> None:
        """Count a backward pass of a step that is not measured.

        Most passes are of such steps, so this is kept short: training has emptied the processor's
        caches by then, and each further function call takes microseconds.
        """
        collector = self._open_collector()
        if collector.norms.any_trained():
            passes = self._step.passes
            if passes and collector.gradients_dropped:
                passes.clear()
            passes.append(one)

    def close_step(
        self, loss_divisor: float | None, unmeasured_examples: float, unmeasured_steps: int
    ) -> StepUnderWay:
        """Close the step under way and return it. If it is to be measured, reduce its norms.

        Args:
            loss_divisor: See `NoiseScaleMeter.step`.
            unmeasured_examples: This rank's examples since the last measured step.
            unmeasured_steps: Steps since the last measured step.
        """
        collector, step, beside = self._open_collector(), self._step, NOTHING_BESIDE
        with self._spoils_step:
            if step.due or collector.follows:
                sizes = [one.size for one in step.passes]
                collector.end_step(sizes, measured=step.due)
        with self._spoils_step:  # also after an error: all ranks say something at the same steps
            if step.due:
                beside = collector.next_word()
        if not step.due:
            self._step = StepUnderWay(step.due)
            return step
        if self._ddp is not None:
            refuse_join(self._ddp)
        seen = len(step.passes)
        small: Tensor | None = None
        big: Tensor | None = None
        layout = UNKNOWN
        heard = NOTHING_HEARD
        changes = UNTOUCHED
        try:
            with self._spoils_step:
                if seen:
                    self._fewest_passes = min(seen, self._fewest_passes or seen)
                if not step.begun_in_a_pass:
                    step.keep(collector.reached)
                small, big = self._norms(collector, step)  # in which ranks meet, so it comes first
                if self._in_model is not None:
                    self._in_model.check()
                if not step.begun_in_a_pass:
                    layout = step.layout(collector, loss_divisor)
                    loss = step.loss(loss_divisor, later=collector.divides_losses)
                    levels = self._levels(collector, step, seen, measured=small is not None)
                    heard = Heard(loss, levels)
                if not step.repeats_a_batch:
                    changes = self._changes(collector, step)
                step.left_alone = collector.left_alone
                self.accepted |= small is not None
        finally:
            with self._spoils_step:
                small = None if step.spoiled else small
                self.unread.add(
                    small,
                    big,
                    layout,
                    examples=float(sum(one.size for one in step.passes)),
                    unmeasured_examples=unmeasured_examples,
                    unmeasured_steps=unmeasured_steps,
                    changes=changes,
                    beside=beside,
                    heard=heard,
                )
        if not self.accepted:
            self._note_unseen_passes(seen)
        self._until_check = (self._until_check or _CHECK_EVERY) - 1
        self._step = StepUnderWay(step.due)
        with self._spoils_step:  # the next one
            collector.reset()
        return step

    def open_step(self, *, due: bool) -> None:
        """Begin a step that is to be measured or is not."""
        before, self._step.due = self._step.due, due
        if not due and not before:
            return
        with self._spoils_step:
            if self.collector is not None and not due:
                self.collector.unhook()
            self._look()

    @property
    def last_warning(self) -> str:
        """The last warning or error that left a step out; "" if there was none."""
        of_collector = "" if self.collector is None else self.collector.last_warning
        return self._warn.last or of_collector or self.guard.last

    @property
    def due(self) -> bool:
        """Whether the current step is to be measured."""
        return self._step.due

    def pause(self, paused: bool) -> None:
        """Ignore forward passes while paused."""
        self._paused = paused
        self._look()

    def ends_with(self, error: Exception) -> TypeGuard[NotMeasured]:
        """Return whether an error says that no step can be measured, and one process trains.

        Of several processes the others may be able to, and wait for this one at measured steps: so
        each such step is left out.
        """
        return isinstance(error, NotMeasured) and not self.accepted and self._alone

    def leave_step_out(self, error: Exception) -> None:
        """Leave the current step out, as its contents are not known; warn once with the reason."""
        self._step.spoiled = True
        self.guard.tell(STEPS_LOST, error)

    def close(self) -> None:
        """Remove every hook, and drop the steps that have not been read."""
        self.unread.clear()
        if self.collector is not None:
            self.collector.close()
            self.collector = self._ddp = self._in_model = None

    def _open_collector(self) -> Collector:
        if self.collector is None:
            raise RuntimeError(
                "This meter is closed. Make a new meter and load the `state_dict` of this one."
            )
        return self.collector

    def _look(self) -> None:
        if self.collector is not None:
            self.collector.watching = self._step.due and not self._paused

    @property
    def _checking(self) -> bool:
        """Whether to check that `p.grad` is what the passes made: at first, and now and then."""
        return self._clean_checks < _CHECKS or not self._until_check

    def note_check(self, *, clean: bool) -> None:
        """Note what a checked step turned out to be, once it is read."""
        self._clean_checks = self._clean_checks + 1 if clean else 0

    def _changes(self, collector: Collector, step: StepUnderWay) -> Changes:
        """Return what was done to the gradients of the step."""
        found = collector.changes
        sq_norms = found.sq_norms
        if sq_norms is not None:
            sq_norms = self._loss_scale.unscale(sq_norms)
        if found.gone:
            self.gone = collector.names_of_gone
        return Changes(sq_norms, found.gone, found.in_pieces or step.begun_in_a_pass)

    def _levels(
        self, collector: Collector, step: StepUnderWay, seen: int, *, measured: bool
    ) -> RankLevels:
        """Return what this rank says of the noise between and within groups of rows."""
        grouped = [one.grouped for one in step.passes if one.grouped is not None]
        if not grouped:
            return NO_LEVELS
        within = collector.within_groups() if measured and len(grouped) == seen else None
        if within is not None:
            within = within._replace(sq_norms=self._loss_scale.unscale(within.sq_norms))
        return levels_of_step(grouped, within)

    def _note_unseen_passes(self, seen: int) -> None:
        """Warn if no step had a backward pass so far, after some steps."""
        self._empty_steps = 0 if seen else self._empty_steps + 1
        if self._empty_steps == _MOST_EMPTY:
            self._warn(
                "No backward pass was seen in the first steps. Such steps are not measured. Call"
                " `self.manual_backward(loss)` in a LightningModule, or `meter.backward(loss,"
                " local_batch_size)` in a loop of your own, in place of `loss.backward()`."
            )

    def _norms(self, collector: Collector, step: StepUnderWay) -> tuple[Tensor | None, Tensor]:
        """Return the small norms of the step, None if they are not reliable, and the big norm."""
        if collector.averaged_too_often:
            self._warn(
                "Gradients were averaged over ranks more than once in one step, which mixes local"
                " and averaged gradients. Such steps are not measured. Wrap all but the last"
                " backward of a step in `model.no_sync()`; or compare micro-batches, under DDP:"
                ' `small_batch="micro_batch"`.'
            )
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        if step.misfit is not None:
            raise step.misfit
        if step.too_short:
            small = None  # `p.grad` may have been clipped since
        if step.repeats_a_batch:
            small = None
            self._warn(
                "Several backward passes of one step used the same batch. Such steps are not"
                " measured, as the number of examples in each pass is not known. If a pass is of a"
                " chunk of the batch, have the loader return the chunks as batches, call"
                " `manual_backward` once for each, and step after several batches. If it is of"
                " another loss, add the losses and call `manual_backward` once a batch."
            )
        if step.begun_again and collector.gradients_replaced:
            small = None
            self._warn(
                "Gradients were dropped after a backward pass, and others were in `p.grad` when the"
                " step ended, as with a cache that adds them up. Such steps are not measured. Let"
                " the passes of a step add up their gradients in `p.grad`."
            )
        grouped = [one.grouped for one in step.passes if one.grouped is not None]
        if len(grouped) > 1 and collector.compares != "ranks" and (name := split_group(grouped)):
            whole = len(grouped) == len(step.passes)
            variance = collector.variance_of_split(grouped) if whole else None
            # What a scaler may have unscaled by now does not go together with what was captured.
            fits = collector.average_captured or not collector.may_be_unscaled
            small = big + variance if variance is not None and fits else None
            step.shares_groups = True
            self._splits += 1
            if variance is None and self._splits > 1:
                self._warn(_SPLIT.format(name), about="split groups")
        if step.gathered is not None:
            small = None
            self._warn(
                f"The loss gathers rows of other ranks ({step.gathered}), so the gradients of the"
                " ranks are not independent of each other. Such steps are not measured. One process"
                " that accumulates two or more micro-batches can be measured: see the page on ways"
                " of training."
            )
        as_they_are_now = not collector.average_captured
        return (
            None
            if small is None
            else self._loss_scale.unscale(
                small, unscaled_with_gradients=collector.small_norms_are_late
            ),
            self._loss_scale.unscale(big, unscaled_with_gradients=as_they_are_now),
        )


class _SpoilsStep:
    """Has errors leave out the step that is under way, and no more.

    What shows that no step can be measured is raised, see `StepCapture.ends_with`. No generator, as
    it is entered several times a step.
    """

    def __init__(self, capture: StepCapture) -> None:
        self._capture = capture

    def __enter__(self) -> None: ...

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._capture.ends_with(error):
            return False
        self._capture.leave_step_out(error)
        return True
