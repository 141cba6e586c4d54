# SPDX-License-Identifier: Apache-2.0
"""Norms of the two halves of one batch: the small batches of one process that does not accumulate.

One backward pass more, before the training's own, in which the rows of one half count positive and
those of the other negative, gives half the difference of their mean gradients, g_s. Then
tr(Σ) = B·|g_s|² and |G|² = |g|² - |g_s|² without bias, as of two micro-batches of B/2. The rows are
signed at a cut of the autograd graph (`cut`), which is proved at first (`proof`).

A step of several micro-batches is measured by these, which costs no pass.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.halves.calls import ModuleCalls
from noisescale.collectors.halves.cut import CutEdge, Pattern, find_again, find_cut
from noisescale.collectors.halves.graph import Graph, Output
from noisescale.collectors.halves.proof import LARGEST_ERROR, Proof
from noisescale.collectors.halves.retained import (
    retained_gradients_kept,
    unwatch,
    watch,
)
from noisescale.collectors.halves.row_pass import row_pass, signs
from noisescale.collectors.halves.upset import Buffers, SavedTensors, others_hooks
from noisescale.collectors.micro_batch import MicroBatchCollector
from noisescale.collectors.rows.window import UNKNOWN, Weight, WindowLayout, halves_of_a_batch
from noisescale.guard import RefusalError, keeps_errors
from noisescale.own_pass import measuring

_MOST_PATTERNS = 16

_ELSE = " Accumulate two or more micro-batches, which need none of this, or use several devices."


class Halves(NamedTuple):
    """What was measured of one batch."""

    sq_norms: Tensor
    """|g_s|², shape (entries,)."""
    rows: int
    which: int
    """Of the step's backward passes."""


class _LeftOutError(Exception):
    """Why a step is not measured, where that is no error."""


class HalvesCollector(MicroBatchCollector):
    """Squared norms of a step's gradient and of its halves, or of its micro-batches.

    Args:
        model: What is trained; hooks see its modules' outputs.
        norms: The parameters that are trained, and where their norms count.
        cut: Names of modules at whose outputs to cut; None: those that the training step calls.
        compiled: Whether some of it is: hooks would have it compiled once more.

    Raises:
        ValueError: If `cut` names no module.
    """

    least_micro_batches = 1

    def __init__(
        self,
        model: nn.Module,
        norms: GradientNorms,
        cut: Sequence[str] | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(norms)
        self._model = model
        self._cut = cut
        self._compiled = compiled
        self._calls = ModuleCalls(None if cut is None else named_modules(model, cut))
        self._buffers = Buffers(model)
        self._index_of = {id(p): index for index, p in enumerate(norms.parameters)}
        self._scalars = [i for i, p in enumerate(norms.parameters) if p.numel() == 1]
        self._patterns: dict[Pattern, None] = {}
        self._refused: set[Pattern] = set()
        self._proof: tuple[Proof, Pattern] | None = None
        self._unproved = True
        self._wanted = True
        self._passes_before = 1
        self._draws = 0
        self._halves: Halves | None = None
        self._compares = False
        self._which = 0
        self._told: set[str] = set()
        self._rows: int | None = None
        self._last: bool | None = None
        watch()
        self._unwatch = weakref.finalize(self, unwatch)
        self._watch()

    @property
    def wanted(self) -> bool:
        """Whether the next passes are measured."""
        return self._wanted

    @wanted.setter
    def wanted(self, wanted: bool) -> None:
        self._wanted = wanted
        self._watch()

    @property
    def takes_a_pass(self) -> bool:
        """Whether the next measured step will have a backward pass more: the last had one alone."""
        return self._passes_before <= 1

    def expect(self, *, rows: int | None, last: bool | None) -> None:
        """Say what is known of the next backward pass.

        Args:
            rows: Of its batch, where the size that is counted is another.
            last: Whether the step is taken after it.
        """
        self._rows, self._last = rows, last

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Measure the halves of a batch that is likely the step's only one, and do as `super`."""
        alone = not any(self._reached)
        likely = self.takes_a_pass if self._last is None else self._last
        self._compares = False
        self._which = len(self._reached)
        if alone:
            self._halves = self._proof = None
            rows = int(size) if self._rows is None else self._rows
            if likely and isinstance(loss, Tensor) and loss.requires_grad:
                self._measure(get_gradient_edge(loss), torch.ones_like(loss), size, rows)
            elif likely and loss.requires_grad:  # the pass begins at one of several tensors
                loss.register_hook(partial(self._measure_from, loss, size, rows))
        self._compares = alone
        self._rows = self._last = None
        super().before_backward(loss, size, capture_average=capture_average)

    def small_sq_norms(self) -> Tensor | None:
        """Σ|g_part|² over the halves or micro-batches since the last reset.

        Of one batch it is |g|² + |g_s|², the mean of both halves'.
        """
        small = super().small_sq_norms()
        self._calls.raise_error_of_hook()
        if sum(self._reached) > 1:
            return small
        self._end_proof()
        if small is None or self._halves is None or not self._reached[self._halves.which]:
            return None
        return small + self._halves.sq_norms

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Say what the norms are of: see `halves_of_a_batch`, or every micro-batch is a part."""
        if len(sizes) == 1 and self._halves is not None:
            return halves_of_a_batch(sizes[0], self._halves.rows, loss_divisor)
        return UNKNOWN if len(sizes) == 1 else super().layout(sizes, loss_divisor)

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Likewise; the weight of one batch alone is nothing to it."""
        if len(sizes) == 1 and self._halves is not None:
            return halves_of_a_batch(sizes[0], self._halves.rows, 1.0)
        return UNKNOWN if len(sizes) == 1 else super().weighted_layout(sizes, weights)

    def reset(self) -> None:
        """Begin another step."""
        if self._reached:
            self._passes_before = sum(self._reached)
        self._halves = None
        self._proof = None
        self._calls.forget()
        super().reset()

    def close(self) -> None:
        """Remove all hooks."""
        self._unwatch()
        self._calls.switch(False)
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        return {"draws": self._draws, "passes_before": self._passes_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; the cut is proved again."""
        self._draws = state.get("draws", 0)
        self._passes_before = state.get("passes_before", 1)

    def _watch(self) -> None:
        self._calls.switch(self._wanted and self._unproved and not self._compiled)

    def _measure_from(self, start: Any, size: float, rows: int, gradient: Tensor) -> None:
        if start.edge is not None:
            self._measure(start.edge, gradient, size, rows)

    @keeps_errors
    def _measure(self, loss: GradientEdge, gradient: Tensor, size: float, rows: int) -> None:
        calls, on = self._calls.outputs, self._calls.on
        self._calls.switch(False)
        try:
            if rows > size > 0:
                raise RefusalError(
                    "The size that is counted must be at least the rows of the batch, got"
                    f" {size:g} for {rows} rows: those of one example are not independent. Give"
                    " the model's output as (batch, rows, ...) and pass `rows`." + _ELSE
                )
            if rows < 2:
                raise _LeftOutError(
                    f"A batch of {rows} has no halves to compare: such steps are not measured. Use"
                    " batches of two rows or more, or accumulate two or more."
                )
            for pattern in self._patterns:
                edges = find_again(loss, rows, pattern)
                if edges is not None:
                    break
            else:
                if not on and not self._compiled:
                    self._unproved = True  # with what the modules give, at the next measured step
                    return
                found = self._begin_proof(loss, gradient, rows, calls)
                if found is None:
                    return
                edges = found
            norms = self.norms.none()
            with self._nothing_else_changed(first=False):
                self._draws += 1
                row_pass(
                    loss,
                    gradient,
                    edges,
                    signs(rows, self._draws, gradient.device),
                    self.norms.parameters,
                    partial(self.norms.add_one, norms),
                )
            self._halves = Halves(self.norms.sums(norms), rows, self._which)
        except _LeftOutError as reason:
            self._tell(str(reason))
        finally:
            self._calls.forget()

    def _begin_proof(
        self, loss: GradientEdge, gradient: Tensor, rows: int, calls: dict[Output, int]
    ) -> list[CutEdge] | None:
        """Find a cut, and go back once with the factor 2; the training's own pass has to agree."""
        if self._cut is not None and not calls:
            raise RefusalError(
                "`cut` must name modules whose outputs the loss is made of, got"
                f" {list(self._cut)!r}: none of them was called. Leave it out."
            )
        if self._compiled:
            calls = dict.fromkeys(compiled_outputs(loss), 0)
        cut = find_cut(loss, rows, calls, self._index_of, scalars=self._scalars)
        if cut.pattern in self._refused:
            return None
        if not cut.edges:
            if not cut.outside:
                return None  # another optimizer's loss
            raise RefusalError(
                f"`model` must hand on a tensor with the {rows} rows of the batch in front, got"
                " none between the loss and the parameters: its halves cannot be told apart."
                " Where an example has several rows, give them back as (batch, rows, ...); where"
                " the size that is counted is not the number of rows, pass `rows`." + _ELSE
            )
        self._name_others_hooks()
        left_out = [i for i in cut.outside if i in self._scalars]
        self._leave_out(left_out)
        proof = Proof(self.norms.names, left_out)
        saved = SavedTensors(Graph(loss))
        with saved.restored() as changed, self._nothing_else_changed(first=True):
            try:
                row_pass(
                    loss,
                    gradient,
                    cut.edges,
                    torch.full((rows,), 2.0, device=gradient.device),
                    self.norms.parameters,
                    proof.take_doubled,
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise RefusalError(
                    "`model` must stand a backward pass before the training's own, got"
                    f" {str(error).partition(chr(10))[0]!r} in it. Checkpointing needs"
                    " `use_reentrant=False`, and what torch.compile made"
                    " `torch._functorch.config.donated_buffer = False` before." + _ELSE
                ) from error
        if changed:
            raise RefusalError(
                "`model` must leave alone what its Functions save for the backward pass, as a"
                f" measured step has two, got {', '.join(sorted(set(changed)))}." + _ELSE
            )
        self._proof = proof, cut.pattern
        return cut.edges

    def _end_proof(self) -> None:
        """Take the cut for proved, or refuse it. Reads the device."""
        if self._proof is None:
            return
        (proof, pattern), self._proof = self._proof, None
        if not proof.reached:
            return
        share = proof.share()
        if share <= LARGEST_ERROR:
            self._patterns[pattern] = None
            while len(self._patterns) > _MOST_PATTERNS:
                del self._patterns[next(iter(self._patterns))]
            self._unproved = False
            return
        self._halves = None
        if share > LARGEST_ERROR:
            self._refused.add(pattern)
            raise RefusalError(
                "`model` must pass all that its gradient is made of through what has the rows of"
                f" the batch in front, got {share:.0%} of |2g|² amiss in the proof, most of it in"
                f" {proof.worst()}. Penalties on weights belong into the optimizer's"
                " `weight_decay`, checkpointing needs `use_reentrant=False`, and `cut` names"
                " modules at whose outputs rows can be told apart." + _ELSE
            )

    @keeps_errors
    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        super()._on_gradient(index, gradient)
        if self._armed and self._compares and self._proof is not None and not measuring():
            self._proof[0].take_own(index, gradient)

    def _leave_out(self, indices: Collection[int]) -> None:
        self.norms.leave_out(indices)
        if indices:
            names = ", ".join(self.norms.names[i] for i in indices)
            self._tell(
                f"The noise scale is that of all parameters but {names}: no rows of the batch can"
                " be told apart where it is used."
            )

    def _name_others_hooks(self) -> None:
        hooks = others_hooks(self._model, zip(self.norms.names, self.norms.parameters, strict=True))
        if hooks:
            self._tell(
                "A measured step has a backward pass more, which these hooks see as well:"
                f" {', '.join(hooks[:4])}. Where that matters, have them return at once while"
                " `noisescale.measuring()` is true."
            )

    @contextmanager
    def _nothing_else_changed(self, *, first: bool) -> Iterator[None]:
        with self._buffers.kept(first=first), retained_gradients_kept():
            yield

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, stacklevel=4)


def named_modules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of these names.

    Raises:
        ValueError: If one has none.
    """
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        known = ", ".join(list(modules)[1:6])
        raise ValueError(
            f"`cut` must name modules of the model, got {unknown[0]!r}. Its modules are {known} and"
            " so on: see `model.named_modules()`."
        )
    return [modules[name] for name in names]


def compiled_outputs(loss: GradientEdge) -> list[Output]:
    """Return what compiled parts of a model gave: no hook sees them."""
    graph = Graph(loss)
    return [
        (node, which)
        for node in graph.region(lambda _: False).nodes
        if node.name() == "CompiledFunctionBackward"
        for which in range(len(graph.shapes(node)))
    ]
