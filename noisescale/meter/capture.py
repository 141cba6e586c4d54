# SPDX-License-Identifier: Apache-2.0
"""One optimizer step after another: its norms captured, and reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from noisescale.collectors.collector import Collector
from noisescale.collectors.ddp import refuse_join
from noisescale.collectors.loss_scale import LossScale
from noisescale.collectors.rows.step_rows import StepRows
from noisescale.collectors.rows.window_layout import UNKNOWN
from noisescale.guard import Guard, RefusalError, WarnOnce
from noisescale.meter.step_under_way import BackwardPass, StepUnderWay

STEPS_LOST = "A step's noise scale was not measured"


class StepCapture:
    """Has a collector capture each step, and sends what it captured.

    An error leaves out the step that it happens in, and no more. The other ranks take part in a
    collective at each measured step, so this one does as well, whatever became of it here.

    Args:
        collector: Its hooks are in the model.
        ddp: What it was made for, where that is DistributedDataParallel.
        grad_scaler: What scales the losses, if anything does.
        guard: Of the meter.
    """

    def __init__(
        self,
        collector: Collector,
        ddp: DistributedDataParallel | None,
        grad_scaler: GradScaler | None,
        guard: Guard,
    ) -> None:
        self.unread = StepRows(collector.norms, collector.group)
        """Measured steps that have been sent, and that nobody has read."""
        self._collector: Collector | None = collector
        self._ddp = ddp
        self._loss_scale = LossScale(grad_scaler)
        self._guard = guard
        self._warn = WarnOnce()
        self._step = StepUnderWay(due=True)
        self._paused = False
        self._accepted = False  # a step as this way of measuring needs it
        self._coverage_at_close = 1.0
        self._found_by_close: dict[str, Any] = {}

    @property
    def takes_a_pass(self) -> bool:
        """See `Collector`."""
        return self._collector is not None and self._collector.takes_a_pass

    @property
    def least_micro_batches(self) -> int:
        """See `Collector`."""
        return 1 if self._collector is None else self._collector.least_micro_batches

    @property
    def coverage(self) -> float:
        """See `Collector`."""
        return self._coverage_at_close if self._collector is None else self._collector.coverage

    def add_pass(
        self,
        loss: Tensor,
        one: BackwardPass,
        *,
        capture_average: bool,
        rows: int | None,
        last: bool | None,
    ) -> None:
        """Arrange for the next backward pass to be captured, see `NoiseScaleMeter`."""
        collector = self._open_collector()
        with self._spoils_step():
            if not collector.norms.any_trained():
                return  # another optimizer's turn, with this one's parameters toggled off
            step = self._step
            if step.passes and collector.gradients_dropped:
                collector.reset()
                step.passes = []
            step.passes.append(one)
            if step.due:
                collector.expect(rows=rows, last=last)
                collector.before_backward(loss, one.size, capture_average=capture_average)

    def close_step(self, loss_divisor: float | None, unmeasured_examples: float) -> StepUnderWay:
        """Close the step under way and return it. If it is to be measured, reduce its norms.

        Args:
            loss_divisor: See `NoiseScaleMeter.step`.
            unmeasured_examples: This rank's since the last measured step.
        """
        collector = self._open_collector()
        step = self._step
        if step.due:
            with self._spoils_step():
                step.keep(collector.reached)
            self._send(collector, step, loss_divisor, unmeasured_examples)
        self._step = StepUnderWay(step.due)
        with self._spoils_step():  # the next one
            collector.reset()
        return step

    def open_step(self, *, due: bool) -> None:
        """Begin a step that is to be measured or is not."""
        self._step.due = due
        with self._spoils_step():
            self._look()

    def pause(self, paused: bool) -> None:
        """See `NoiseScaleMeter.pause`."""
        self._paused = paused
        self._look()

    def leave_step_out(self, error: Exception) -> None:
        """See `NoiseScaleMeter`."""
        self._step.spoiled = True
        self._guard.tell(STEPS_LOST, error)

    def close(self) -> None:
        """Remove every hook, and drop the steps that have not been read."""
        self.unread.clear()
        if self._collector is not None:
            self._found_by_close = self._collector.state_dict()
            with self._guard("The coverage was not read"):
                self._coverage_at_close = self._collector.coverage
            self._collector.close()
            self._collector = self._ddp = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the collector found out about the model in its first steps."""
        return self._found_by_close if self._collector is None else self._collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        if self._collector is not None:
            self._collector.load_state_dict(state)

    def _open_collector(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("This meter is closed. Make a new one and load its `state_dict`.")
        if self._ddp is not None:
            refuse_join(self._ddp)
        return self._collector

    def _look(self) -> None:
        """Have the collector look at forward passes, or at none."""
        if self._collector is not None:
            self._collector.wanted = self._step.due and not self._paused

    @contextmanager
    def _spoils_step(self) -> Iterator[None]:
        """Have errors leave out the step that is under way, and no more.

        A refusal is raised until a step was as this way of measuring needs it.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, RefusalError) and not self._accepted:
                raise
            self.leave_step_out(error)

    def _send(
        self,
        collector: Collector,
        step: StepUnderWay,
        loss_divisor: float | None,
        unmeasured_examples: float,
    ) -> None:
        """Reduce the step's norms: whatever becomes of them here, the other ranks send theirs."""
        small: Tensor | None = None
        big: Tensor | None = None
        layout = UNKNOWN
        try:
            with self._spoils_step():
                small, big = self._norms(collector, step)
                layout = step.layout(collector, loss_divisor)
                self._accepted |= small is not None
        finally:
            with self._spoils_step():
                self.unread.add(
                    None if step.spoiled else small,
                    big,
                    layout,
                    examples=float(sum(one.size for one in step.passes)),
                    unmeasured_examples=unmeasured_examples,
                )

    def _norms(self, collector: Collector, step: StepUnderWay) -> tuple[Tensor | None, Tensor]:
        """The small norms of the step, None where there are none to rely on, and the big one."""
        if collector.averaged_too_often:
            self._warn(
                "Gradients were averaged over ranks more than once in one step, which mixes local"
                " and averaged ones: such steps are not measured. Wrap all but the last backward"
                " of a step in `model.no_sync()`, or compare micro-batches:"
                ' `small_batch="micro_batch"`.'
            )
        small, big = collector.small_sq_norms(), collector.big_sq_norms()
        if step.repeats_a_batch:
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
