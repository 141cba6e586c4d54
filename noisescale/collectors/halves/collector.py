# SPDX-License-Identifier: Apache-2.0
"""Norms of the two halves of one batch: the small batches of one process without accumulation.

One backward pass more, before the training's own, in which the rows of one half count positive and
those of the other negative, gives half the difference of their mean gradients, g_s. Then
tr(Σ) = B·|g_s|² and |G|² = |g|² - |g_s|² without bias, as of two micro-batches of B/2. The rows are
signed at a cut of the autograd graph (`cut`), which is proved at first (`proved_cuts`).

If rows come in groups that are not independent within, whole groups get one sign: see `parts`.

A step of several micro-batches is measured by these, which costs no pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from noisescale.batches.row_groups import RowGroups
from noisescale.batches.to_device import to_device
from noisescale.collectors.captured import Captured
from noisescale.collectors.collector import COST_OF_A_PASS
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.halves.bearing import INSTEAD
from noisescale.collectors.halves.cut import CutEdge
from noisescale.collectors.halves.graph import is_curved
from noisescale.collectors.halves.parts import Parts
from noisescale.collectors.halves.proved_cuts import ProvedCuts
from noisescale.collectors.halves.row_pass import RowsAtCut, row_pass, signs
from noisescale.collectors.halves.side_effects import unwatch, watch
from noisescale.collectors.halves.within_groups import halves_within, has_pairs
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.collectors.own_pass import measuring
from noisescale.collectors.rows.group_levels import GroupedPass, WithinBatch, variance_of_step
from noisescale.collectors.rows.step_norms import ROWS_WITHOUT_LOSS
from noisescale.collectors.rows.step_rows import MeasuredStep, Unread
from noisescale.collectors.rows.window_layout import UNKNOWN, Weight, WindowLayout
from noisescale.estimation.row_similarity import RowSimilarity
from noisescale.guard import NotMeasured, keeps_errors

_LONE_STEPS = 2  # of one batch each, from which on the next is expected to be one


class Halves(NamedTuple):
    """The norms of one batch."""

    sq_norms: Tensor
    """|g_s|², shape (entries,)."""
    which: int
    """The index of the backward pass in the step."""
    parts: Parts


class _Batch(NamedTuple):
    """What is known about a batch before its backward pass."""

    size: float
    """Examples, as they are counted."""
    rows: int | None
    """Rows; None: as many as are counted."""
    row_weights: Tensor | None
    row_groups: RowGroups | None
    which: int
    """The index of the backward pass in the step."""
    is_likely_alone: bool
    """Whether the step has likely no other batch."""
    looks_within: bool = True
    """Whether rows of one group may be compared, if they do not act on each other in the model."""


_NOTHING = _Batch(0.0, None, None, None, 0, is_likely_alone=True)


class HalvesCollector(MicroBatchCollector):
    """Squared norms of a step's gradient, and of its halves or its micro-batches.

    Args:
        model: The trained model; hooks read the outputs of its modules.
        norms: The parameters that are trained, and where their norms count.
        cut: Names of modules at whose outputs to cut; None: the modules that the training step
            calls.
        compiled: Whether a part of the model is compiled: hooks would compile it again.
        backward_twice: Whether the user says that what is not known bears a second backward pass.

    Raises:
        ValueError: If `cut` names no module.
    """

    _saved = ("_draws", "_lone_steps", "_grouped", "_shares_groups")

    compares = "halves"

    same_gradient = (
        "All rows of a batch, or all micro-batches of a step, had the same gradient. Such steps are"
        " not measured. Give each row and each micro-batch an example of its own."
    )

    def __init__(
        self,
        model: nn.Module,
        norms: GradientNorms,
        cut: Sequence[str] | None = None,
        *,
        compiled: bool = False,
        backward_twice: bool = False,
    ) -> None:
        super().__init__(norms, group=None)
        self.least_micro_batches = 1  # it has two halves
        self._cuts = ProvedCuts(model, norms, cut, compiled=compiled, backward_twice=backward_twice)
        self._at_cut = RowsAtCut(RowSimilarity() if self._apart is None else self._apart.found)
        self._runs_python = False
        """Whether the last measured graph has Functions, which may take one row for all."""
        self._lone_steps = _LONE_STEPS
        self._draws = 0
        self._grouped = False
        """Whether the last measured step had halves within groups of rows."""
        self._shares_groups = False
        """Whether micro-batches were seen to share groups: the halves of the first one count."""
        self._passes = 1
        """The micro-batches of the last step."""
        self._halves: Halves | None = None
        self._within: WithinBatch | None = None
        self._refusal: NotMeasured | None = None
        self._untried = False
        self._no_halves = ""
        self._refused_short: NotMeasured | None = None
        """Why a step of one batch, where steps have several, was refused: none is tried again."""
        self._expected = _NOTHING
        self._last: bool | None = None
        watch()
        self._unwatch = weakref.finalize(self, unwatch)
        self._look()

    @property
    def cost(self) -> float:
        """The extra cost of a measured step, in plain steps; larger with passes of our own."""
        more = int(self._grouped)
        if self._takes_a_pass:
            return COST_OF_A_PASS * (1 + more)
        return super().cost + COST_OF_A_PASS / self._passes * (more + self._shares_groups)

    @property
    def _takes_a_pass(self) -> bool:
        """Whether the next measured step is likely to have a backward pass more, of ours.

        As the last steps had a batch alone. One such step may be the short last window of an
        epoch's accumulation.
        """
        return self._lone_steps >= _LONE_STEPS

    def expect(
        self,
        *,
        rows: int | None,
        last: bool | None,
        row_weights: Tensor | None = None,
        row_groups: RowGroups | None = None,
    ) -> None:
        """Receive what is known about the next backward pass."""
        self._last = last
        self._expected = _NOTHING._replace(
            rows=rows, row_weights=row_weights, row_groups=row_groups
        )

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Measure the halves of a batch that is likely the step's only one, and do as `super`."""
        likely = self._takes_a_pass if self._last is None else self._last
        likely &= self._lone_steps > 0 or self._refused_short is None
        if self._is_first_to_reach:
            self._halves, self._refusal, self._untried = None, None, not likely
            self._within = None
            batch = self._expected._replace(
                size=size, which=len(self._step.passes), is_likely_alone=likely
            )
            wanted = likely or batch.row_groups is not None
            if wanted and isinstance(loss, Tensor) and loss.requires_grad:
                self._measure(get_gradient_edge(loss), torch.ones_like(loss), batch)
            elif wanted and loss.requires_grad:  # the pass begins at one of several tensors
                loss.register_hook(partial(self._measure_from, loss, batch))
        self._last, self._expected = None, _NOTHING
        super().before_backward(loss, size, capture_average=capture_average)

    def small_sq_norms(self) -> Tensor | None:
        """Return Σ|g_part|² over the halves or micro-batches since the last reset.

        The result for one batch is |g|² + |g_s|², the mean over both halves.

        Raises:
            NotMeasured: If halves of the step's only batch would not show its noise. The first of
                several batches may be refused: these are measured all the same.
        """
        small = super().small_sq_norms()
        if sum(self.reached) > 1:
            return small
        try:
            if self._refusal is not None:
                raise self._refusal
            proved, halves = self._cuts.settle(), self._halves
            if halves is None and self._refused_short and self._lone_steps and not self._untried:
                raise self._refused_short  # steps of one batch have become usual
        except NotMeasured as reason:
            if self._lone_steps:
                self._cuts.tell.release()
                raise
            # The short last step of an epoch's accumulation. Its remedy would be to accumulate.
            self._untried, self._refused_short = True, reason
            return None
        self._cuts.tell.release()
        if not proved or small is None or halves is None or not self.reached[halves.which]:
            return None
        return halves.parts.sq_norms(halves.sq_norms, small)

    def within_groups(self) -> WithinBatch | None:
        """Return the halves within the groups of the step's first batch; None if not known."""
        if self._within is not None and not self._settles():
            self._within = None
        self._grouped = self._within is not None
        return self._within

    def variance_of_split(self, passes: Sequence[GroupedPass]) -> Tensor | None:
        """Return the variance by both kinds of halves of the step's first batch, see `super`."""
        self._shares_groups = True
        if self._halves is None or self._within is None:
            return None
        if not self._settles():
            self._within = None
            return None
        groups = self._halves.parts.number
        if groups < 2:
            return None
        odd = groups / (groups - 1) if groups % 2 else 1.0
        return variance_of_step(passes, self._halves.sq_norms * odd, self._within)

    def _settles(self) -> bool:
        """Return whether the cut is proved: if it is not, micro-batches are measured without."""
        try:
            return self._cuts.settle()
        except NotMeasured:
            return False

    @property
    def left_alone(self) -> bool:
        """Whether the step had one batch, where steps have several, and none of its halves."""
        return sum(self.reached) == 1 and self._untried

    @property
    def _in_pieces(self) -> bool:
        lone = sum(self.reached) == 1 and self._halves is None
        return super()._in_pieces or (lone and self._step.nested)

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Say what the norms are of: see `Parts.layout`, or every micro-batch is a part."""
        if len(sizes) == 1 and self._halves is not None:
            return self._halves.parts.layout(loss_divisor)
        return UNKNOWN if len(sizes) == 1 else super().layout(sizes, loss_divisor)

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Return the layout with weights. In a single batch only weights of rows have an effect."""
        if len(sizes) == 1 and self._halves is not None:
            return self._halves.parts.layout()
        return UNKNOWN if len(sizes) == 1 else super().weighted_layout(sizes, weights)

    @property
    def beside_rows(self) -> Sequence[Unread]:
        """What shows how alike rows are at the cut."""
        return (self._at_cut,)

    def end_step(self, sizes: Sequence[float], *, measured: bool) -> None:
        """Do as `super`, and note what the step is measured by."""
        if self._apart is not None and measured:
            self._apart.kind = "halves" if len(sizes) == 1 else "micro-batches"
        super().end_step(sizes, measured=measured)

    def take(self, step: MeasuredStep) -> None:
        """Do as `super`, and look for halves that show nothing."""
        super().take(step)
        if self._apart is not None and self._apart.kind == "halves" and self._runs_python:
            self._apart.take_halves(step.norms)

    @property
    def _looks_at_cut(self) -> bool:
        """Whether rows at the cut are compared. A loss scale that changes is in all of them."""
        return self._apart is not None and not (self._apart.is_over or self.may_be_unscaled)

    @property
    def last_warning(self) -> str:
        """The last warning of a batch without halves."""
        return self._no_halves

    def reset(self) -> None:
        """Begin another step."""
        self._within = None
        if passes := sum(self.reached):  # none where only another optimizer's loss was seen
            self._lone_steps = self._lone_steps + 1 if passes == 1 else 0
            self._passes = passes
            if passes > 1:  # micro-batches need no cut, past which parameters are left out
                self.norms.leave_out(())
        self._halves = self._refusal = None
        self._cuts.tell.drop()
        self._cuts.forget()
        super().reset()

    def unhook(self) -> None:
        """Do as `super`: a step is not measured."""
        self._at_cut.leave_gap()
        super().unhook()

    def close(self) -> None:
        """Remove all hooks."""
        self._unwatch()
        self._cuts.watch(False)
        super().close()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`, or from one of another way; the cut is proved again."""
        super().load_state_dict(
            {"draws": 0, "lone_steps": _LONE_STEPS, "grouped": False, "shares_groups": False}
            | state
        )

    def _look(self) -> None:
        self._cuts.watch(self.watching)

    @property
    def _is_first_to_reach(self) -> bool:
        """Whether no earlier pass of the step reached a measured parameter."""
        return not any(self.reached)

    @keeps_errors
    def _measure_from(self, start: Any, batch: _Batch, gradient: Tensor) -> None:
        if start.edge is None:
            return
        unseen = gradient.dim() > 0  # the loss is computed outside of the model
        groups = batch.row_groups
        apart = groups is not None and groups.apart
        self._measure(start.edge, gradient, batch._replace(looks_within=apart or not unseen))
        if unseen and self._halves is not None and not apart:
            self._cuts.tell(
                "The loss is computed from the model's output outside of the model, where it cannot"
                " be checked. The noise scale is right only if rows do not act on each other there,"
                " as they do in contrastive losses." + INSTEAD
            )

    @keeps_errors
    def _measure(self, loss: GradientEdge, gradient: Tensor, batch: _Batch) -> None:
        try:
            self._measure_halves(loss, gradient, batch)
        except NotMeasured as reason:  # other batches may follow in the step
            self._refusal = reason if batch.is_likely_alone else None

    def _measure_halves(self, loss: GradientEdge, gradient: Tensor, batch: _Batch) -> None:
        if batch.rows == 1 < batch.size:
            self._tell_of_no_halves(
                f"A batch of {batch.size:g} in one row has no halves to compare. Such steps are not"
                " measured. Accumulate two or more micro-batches, or use several devices."
            )
            return
        parts = Parts.from_batch(batch.size, batch.rows, batch.row_weights, batch.row_groups)
        if parts.number > parts.size > 0:
            raise NotMeasured(
                f"The size that is counted must be at least the {parts.kind} of the batch, got"
                f" {parts.size:g} for {parts.number} {parts.kind}: the rows of one example are not"
                " independent. Give the model's output as (batch, rows, ...) and pass `rows`, or"
                " say which rows belong together by `group_fn` (`row_groups` of the meter).",
                INSTEAD,
            )
        if parts.number < 2 and batch.is_likely_alone:
            of = parts.number if parts.groups is None else "one group"
            self._tell_of_no_halves(
                f"A batch of {of} has no halves to compare. Such steps are not measured. Use"
                f" batches of two {parts.kind} or more, or accumulate two or more micro-batches."
            )
            return
        edges = self._cuts.find(loss, gradient, parts.rows, parts.groups)
        if edges is None:
            return
        with self._cuts.bearing.leave_no_trace():
            self._draws += 1
            if batch.is_likely_alone or self._shares_groups:
                self._measure_whole(loss, gradient, edges, batch, parts)
            groups = parts.groups
            apart = batch.looks_within and self._cuts.rows_are_apart
            if groups is not None and has_pairs(groups) and apart:
                self._within = halves_within(
                    loss, gradient, edges, groups, self._draws, self.norms, batch.which
                )

    def _measure_whole(
        self,
        loss: GradientEdge,
        gradient: Tensor,
        edges: list[CutEdge],
        batch: _Batch,
        parts: Parts,
    ) -> None:
        """Run the pass of the halves of the batch."""
        captured, sizes = Captured(self.norms), list[Tensor]()
        row_pass(
            loss,
            gradient,
            edges,
            signs(parts.number, self._draws, parts.groups),
            self.norms.parameters,
            captured.add,
            sizes,
        )
        captured.norm_kept()
        sq_norms = self.norms.sums(captured.found)
        # Noted on the devices of the cut.
        of_rows = torch.stack([to_device(one, self.device).square() for one in sizes]).sum(0)
        if parts.row_weights is None:
            few = parts.lack_losses(of_rows != 0)
            sq_norms = sq_norms.masked_fill(few, ROWS_WITHOUT_LOSS)
        self._runs_python = self._cuts.bearing.runs_python
        if self._looks_at_cut and parts.groups is None and not is_curved(loss.node):
            self._at_cut.add(of_rows, batch.size)
        self._halves = Halves(sq_norms, batch.which, parts)

    def _tell_of_no_halves(self, message: str) -> None:
        self._no_halves = message
        self._cuts.tell(message)

    @keeps_errors
    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        super()._on_gradient(index, gradient)
        if self._live is not None and self._is_first_to_reach and not measuring():
            self._cuts.compare(index, gradient)
