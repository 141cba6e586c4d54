# SPDX-License-Identifier: Apache-2.0
"""The cuts of a model's graphs: each is found once, proved, and found again by its pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from noisescale.batches.batch_counter import sequence_first_in
from noisescale.batches.row_groups import RowGroups
from noisescale.collectors.devices import read
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.halves.apart import Derived, RowIndependence
from noisescale.collectors.halves.bearing import INSTEAD, Bearing
from noisescale.collectors.halves.calls import ModuleCalls
from noisescale.collectors.halves.cut import Cut, CutEdge, Pattern, find_again, find_cut
from noisescale.collectors.halves.graph import Graph, Output
from noisescale.collectors.halves.row_pass import FACTOR, LARGEST_ERROR, Proof, row_pass
from noisescale.collectors.halves.side_effects import (
    ChangingHooks,
    Values,
    hooks_of_tensors,
    hooks_on_modules,
    values_saved_in,
)
from noisescale.collectors.own_pass import is_ours
from noisescale.guard import NotMeasured, WarnLater
from noisescale.refusal import Refusal

_MOST_PATTERNS = 16

_NAMED = 4
"""The most hooks that a message names."""

_FEW = 16
"""Numbers of a parameter that may be left out, by name: temperatures, weights of losses."""


class _Kind(NamedTuple):
    """What graphs have in common if one cut serves them, and rows act on each other alike."""

    pattern: Pattern
    training: tuple[bool, ...]
    """Whether each module trains: a BatchNorm that was frozen may be trained from some step on."""
    grouped: bool
    """Whether rows of one group may act on each other."""


class _Proving(NamedTuple):
    """A proof under way."""

    proof: Proof
    kind: _Kind
    left_out: tuple[int, ...]
    """Parameters that are not measured, by index."""
    changing: ChangingHooks
    once: bool
    """Whether the kind ensures that the cut holds again: no other parameter is reached past it."""


class ProvedCuts:
    """The proved cuts of a model's graphs.

    The arguments are as in `HalvesCollector`; `names` is its `cut`. With `alone` False other ranks
    may make no pass more: graphs that exchange tensors with them are refused.
    """

    def __init__(
        self,
        model: nn.Module,
        norms: GradientNorms,
        names: Sequence[str] | None,
        *,
        compiled: bool,
        backward_twice: bool,
        alone: bool = True,
    ) -> None:
        self._model = model
        self._alone = alone
        self._norms = norms
        self._names = names
        self._compiled = compiled
        self.tell = WarnLater()
        self._apart = RowIndependence(model, self.tell, compiled=compiled)
        self._calls = ModuleCalls(None if names is None else named_modules(model, names))
        self.bearing = Bearing(model, backward_twice=backward_twice)
        self._index_of = {id(p): index for index, p in enumerate(norms.parameters)}
        self._scalars = [i for i, p in enumerate(norms.parameters) if p.numel() == 1]
        self._few = [i for i, p in enumerate(norms.parameters) if p.numel() <= _FEW]
        self._known: dict[_Kind, tuple[int, ...]] = {}
        """The parameters that are left out, for each proved cut."""
        self._refused: set[_Kind] = set()
        self._acting_in_groups: set[_Kind] = set()
        """What was refused for rows while groups were given."""
        self._proving: _Proving | None = None
        self._searching = True
        self.rows_are_apart = True
        """Whether no row acts on another in the graph whose cut was found last; else groups."""

    def watch(self, watching: bool) -> None:
        """Record the outputs of modules while watching, if a cut must be found."""
        self._calls.switch(watching and self._searching and not self._compiled)

    def forget(self) -> None:
        """Release the current step."""
        if self._proving is not None:
            self._proving.changing.restore()
            self._proving = None
        self.bearing.forget()
        self._calls.forget()

    def find(
        self, loss: GradientEdge, gradient: Tensor, rows: int, groups: RowGroups | None = None
    ) -> list[CutEdge] | None:
        """Return the edges of a cut; None if this step has none.

        The cut of a new kind of graph is proved first, see `settle`.

        Raises:
            NotMeasured: If there is no cut, or if halves at the cut would not show the batch's
                noise.
        """
        watched = self._calls.is_on
        self._calls.raise_error_of_hook()
        self._calls.switch(False)
        try:
            self._refuse_hooks_of_modules()
            training = self._training()
            for kind, left_out in self._known.items():
                if kind.training != training or (kind.grouped and groups is None):
                    continue
                edges = find_again(loss, rows, kind.pattern)
                if edges is not None:
                    self.bearing.check(loss.node)
                    self._norms.leave_out(left_out)
                    self.rows_are_apart = not kind.grouped
                    return edges
            if not watched and not self._compiled:
                self._searching = True  # with what modules give, at the next measured step
                return None
            if groups is not None:  # rows that do not act on each other tell more than groups
                with suppress(NotMeasured):
                    if edges := self._search(loss, gradient, rows, None, self._acting_in_groups):
                        return edges
            return self._search(loss, gradient, rows, groups, self._refused)
        finally:
            self._calls.forget()
            # This may be another optimizer's loss, and the one to cut follows in the same step.
            self._calls.switch(watched and self._searching)

    def _search(
        self,
        loss: GradientEdge,
        gradient: Tensor,
        rows: int,
        groups: RowGroups | None,
        refused: set[_Kind],
    ) -> list[CutEdge] | None:
        """Find a cut, and begin its proof: the training's own pass has to agree.

        Kinds of graphs in `refused` have none. A kind is added to it if rows act on each other.
        """
        graph = Graph(loss)
        cut = find_cut(graph, rows, self._outputs_in(graph), self._index_of, scalars=self._scalars)
        kind = _Kind(cut.pattern, self._training(), groups is not None)
        if kind in refused:
            return None
        if not self._alone and (name := exchanging(graph)):
            raise NotMeasured(
                f"The loss exchanges tensors with other ranks ({name}), which a pass more would do,"
                " too."
            )
        if not cut.edges:
            if not cut.outside:
                return None  # another optimizer's loss
            raise NotMeasured(
                f"`model` must pass on a tensor whose first dimension is the {rows} rows of the"
                " batch, got none between the loss and the parameters: the halves of the batch"
                " cannot be separated. If an example has several rows, return them as (batch, rows,"
                " ...). If the size that is counted is not the number of rows, pass `rows` to the"
                " meter, or `batch_size_fn` to a callback.",
                INSTEAD,
            )
        self.bearing.check(loss.node)
        _refuse(kind, self._apart.by_name(graph, cut, rows, groups), refused)
        left_out = self._small_parameters_past(graph, cut)
        self._leave_out(left_out)
        proof = Proof(self._norms.names, left_out)
        derived, saved = Derived([]), list[tuple[str, Tensor]]()
        if not self._apart.is_derived(kind):
            with self._a_pass_more(graph, saved):
                derived = self._apart.by_derivatives(graph, cut, rows, groups, gradient)
        with self._a_pass_more(graph, saved):
            factors, parameters = torch.full((rows,), FACTOR, device="cpu"), self._norms.parameters
            row_pass(loss, gradient, cut.edges, factors, parameters, proof.take_halved)
        if shares := self._read(saved, derived.shares):
            in_network, in_loss = shares
            meeting = derived.meeting
            meeting = meeting or self._apart.judge_derivatives(in_network, in_loss, kind)
            _refuse(kind, meeting, refused)
        self._tell_of_positions(graph, cut, rows)
        self.rows_are_apart = groups is None
        once = len(left_out) == len(cut.outside)
        changing = ChangingHooks(hooks_of_tensors(self._norms.parameters))
        self._proving = _Proving(proof, kind, left_out, changing, once)
        return cut.edges

    def _outputs_in(self, graph: Graph) -> dict[Output, int]:
        """Return the modules' outputs in the graph, and how deep each was called in others."""
        if self._names is not None and not self._calls.any:
            raise NotMeasured(
                "`cut` must name modules whose outputs the loss depends on, got"
                f" {list(self._names)!r}: none of them was called. Leave it out."
            )
        if self._compiled:
            return dict.fromkeys(compiled_outputs(graph), 0)
        return self._calls.outputs_in(graph)

    def _small_parameters_past(self, graph: Graph, cut: Cut) -> tuple[int, ...]:
        """Return parameters of few numbers that are reached past the cut, and not through it."""
        behind = graph.nodes_behind([edge.output[0] for edge in cut.region.stops])
        through = {id(node.variable) for node in behind if hasattr(node, "variable")}
        return tuple(
            i
            for i in cut.outside
            if i in self._few and id(self._norms.parameters[i]) not in through
        )

    @contextmanager
    def _a_pass_more(self, graph: Graph, restored: list[tuple[str, Tensor]]) -> Iterator[None]:
        """Leave everything as it is in a block with passes, and refuse where that cannot be."""
        with self.bearing.leave_no_trace():
            saved = Values([])
            try:
                saved = values_saved_in(graph)  # checkpoints go forward to be read
                with saved.hide_writes():
                    yield
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise NotMeasured(
                    "`model` must allow a backward pass before the training's own, got"
                    f" {str(error).partition(chr(10))[0]!r} in that pass. Checkpointing needs"
                    " `use_reentrant=False`. A compiled model needs"
                    " `torch._functorch.config.donated_buffer = False`, set before it is compiled.",
                    INSTEAD,
                ) from error
            finally:
                restored.extend(saved.restore())

    def _read(
        self, restored: Sequence[tuple[str, Tensor]], shares: Sequence[Tensor]
    ) -> list[float]:
        """Return numbers of the device: the host waits once.

        Raises:
            NotMeasured: If passes had changed what Functions save.
        """
        tensors = [differs for _, differs in restored]
        numbers = iter([one for (one,) in read([*tensors, *shares])])
        changed = {name for name, _ in restored if next(numbers)}
        if changed:
            raise NotMeasured(
                "`model` must not change what its Functions save for the backward pass, as a"
                f" measured step has two passes, got {', '.join(sorted(changed))}.",
                INSTEAD,
            )
        return list(numbers)

    @property
    def proving(self) -> bool:
        """Whether a cut is being proved: `compare` needs the gradients of the training's pass."""
        return self._proving is not None

    def compare(self, index: int, gradient: Tensor) -> None:
        """Receive a gradient of the training's own pass, if a cut is being proved."""
        if self._proving is not None:
            self._proving.proof.take_own(index, gradient)

    def settle(self) -> bool:
        """Accept the cut as proved, or refuse it. Reads the device.

        Returns:
            Whether halves at the cut are reliable; True if there was nothing to prove.

        Raises:
            NotMeasured: If the training's own pass did not agree.
        """
        if self._proving is None:
            return True
        (proof, kind, left_out, changing, once), self._proving = self._proving, None
        changing.restore()
        if changing.names:
            self._refused.add(kind)
            raise NotMeasured(
                "Hooks on tensors must not change gradients, as the additional pass of a measured"
                f" step calls none of them, got {', '.join(sorted(changing.names)[:_NAMED])}. Write"
                " what changes a gradient as a `torch.autograd.Function`, and pass"
                " `backward_twice=True`.",
                INSTEAD,
            )
        if not proof.reached:
            return False
        share = proof.share()
        if share <= LARGEST_ERROR:
            if once:
                self._known[kind] = left_out
                while len(self._known) > _MOST_PATTERNS:
                    del self._known[next(iter(self._known))]
            self._searching = not once
            return True
        if share > LARGEST_ERROR:
            self._refused.add(kind)
            raise NotMeasured(
                "All gradients of `model` must flow through tensors whose first dimension is the"
                f" rows of the batch, got an error of {share:.0%} of |g|² in the proof, most of it"
                f" in {proof.worst()}. Put penalties on weights into the optimizer's"
                " `weight_decay`. Checkpointing needs `use_reentrant=False`.",
                INSTEAD,
            )
        return False  # not finite

    def _training(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._model.modules())

    def _tell_of_positions(self, graph: Graph, cut: Cut, rows: int) -> None:
        module = sequence_first_in(self._model)
        if not module:
            return
        for edge in cut.region.stops:
            shape = graph.shape(edge.output)
            if len(shape) > 2 and shape[:2] == (rows, rows):
                self.tell(
                    f"Sequences have as many positions as the batch has rows, {rows}, and"
                    f" {module} has `batch_first=False`. The first dimension of tensors is assumed"
                    " to be the batch. If it is not, the noise scale is wrong: use another batch"
                    " size."
                )

    def _leave_out(self, indices: Collection[int]) -> None:
        self._norms.leave_out(indices)
        if indices:
            names = ", ".join(self._norms.names[i] for i in indices)
            self.tell(
                f"The noise scale covers all parameters but {names}: the rows of the batch cannot"
                " be separated where these are used."
            )

    def _refuse_hooks_of_modules(self) -> None:
        on_modules = hooks_on_modules(self._model.named_modules(), "backward")
        if hooks := [f"{hook} (on {at})" for hook, at in on_modules.items() if not is_ours(hook)]:
            raise NotMeasured(
                "`model` must have no backward hooks on its modules, as a measured step has one"
                f" more backward pass that would call them, got {', '.join(hooks[:_NAMED])}. Have"
                " each hook return at once while `noisescale.measuring()` is true.",
                INSTEAD,
            )


def _refuse(kind: _Kind, meeting: str, refused: set[_Kind]) -> None:
    """Refuse graphs of a kind for good if rows act on each other: `meeting` says where."""
    if meeting:
        refused.add(kind)
        raise NotMeasured(meeting + " Halves of such a batch do not show its noise.", INSTEAD)


def exchanging(graph: Graph) -> str:
    """Return the name of a Function in a graph whose backward pass waits for other ranks, or ""."""
    for node in graph.nodes:
        made_by = getattr(type(node), "_forward_cls", None)
        module = str(getattr(made_by, "__module__", ""))
        if module.startswith("torch.distributed.") or "SyncBatchNorm" in node.name():
            return str(node.name())
    return ""


def named_modules(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of these names.

    Raises:
        ValueError: If the model has no module of a name.
    """
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        known = ", ".join(list(modules)[1:6])
        raise Refusal(
            "cut",
            "name modules of the model",
            repr(unknown[0]),
            f"Its modules are {known} and so on: see `model.named_modules()`.",
        )
    return [modules[name] for name in names]


def compiled_outputs(graph: Graph) -> list[Output]:
    """Return the outputs of compiled parts of a model, which no hook sees."""
    return [
        (node, which)
        for node in graph.nodes
        if node.name() == "CompiledFunctionBackward"
        for which in range(len(graph.shapes(node)))
    ]
