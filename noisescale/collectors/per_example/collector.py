# SPDX-License-Identifier: Apache-2.0
"""Norms of every single example's gradient: the smallest small batch, and the least noisy.

No example's gradient is ever made. A forward hook keeps what a layer read; when the backward pass
brings the gradient of what it gave, the squared norms follow from the two (`layers`, `norms`), for
about the cost of a quarter of the backward pass, or next to nothing with the normalization layers
alone, which in transformers show the same noise scale (Gray et al. 2024).

The first measured step is a probe (`probe`): it finds the parameters for which this is
exact, warns about the others, and is not measured itself. Where some gradients are zero in it (a
head or a gate that starts at zero) the next steps are probes, too. From then on the noise scale,
big batch included, is that of the parameters that are left.

Private attribute read here, as of torch 2.13: `Variable._execution_engine.queue_callback`.

References:
    Gray et al. 2024, arXiv:2411.00999.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from noisescale.collectors.averaged_gradient import AveragedGradient
from noisescale.collectors.collector import Collector
from noisescale.collectors.gradient_norms import GradientNorms
from noisescale.collectors.groups import Groups
from noisescale.collectors.per_example.coverage import Coverage
from noisescale.collectors.per_example.exclusions import (
    Verdict,
    check_some_measured,
    find_layers,
    refuse_batch_norm,
    what_is_left,
)
from noisescale.collectors.per_example.hooks import LayerHooks, Use
from noisescale.collectors.per_example.layers import Layer
from noisescale.collectors.per_example.probe import Probe
from noisescale.collectors.rows.step_rows import Unread
from noisescale.collectors.rows.window_layout import (
    Weight,
    WindowLayout,
    each_example,
    weighted_examples,
)
from noisescale.collectors.squared_norms import sums_of
from noisescale.guard import WarnOnce, keeps_errors

Layers = Literal["all", "normalization"]


class PerExampleCollector(Collector):
    """Squared norms of single examples' gradients and of the step's gradient.

    The loss must be the mean over the rows of a batch. Rows are the first dimension of the layers'
    inputs. Rows must be independent: no batch normalization, no contrastive loss.

    Args:
        model: The model, in DistributedDataParallel or not.
        named_parameters: Its trained parameters, by their names in the model.
        groups: See `Groups`.
        group: The ranks that average their gradients; None: one process.
        layers: "normalization" measures LayerNorm, RMSNorm and GroupNorm alone.

    Raises:
        NotMeasured: If no parameter can be measured. `small_sq_norms` raises it after the first
            step, if that step shows that none can.
    """

    nothing_to_compare = "A step of one row has nothing to be compared with: it is not measured."

    how_to_compare = (
        "Train with batches of more rows, accumulate two or more micro-batches, or use more"
        " devices."
    )

    same_gradient = (
        "All rows of a batch had the same gradient. Such steps are not measured. Give each row an"
        " example of its own."
    )

    def __init__(
        self,
        model: nn.Module,
        named_parameters: Sequence[tuple[str, Parameter]],
        groups: Groups | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        layers: Layers = "all",
    ) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        refuse_batch_norm(self._model)
        super().__init__(GradientNorms(named_parameters, groups), group)
        self._normalization_only = layers == "normalization"
        parameters = self.norms.parameters
        self._layers, verdicts = find_layers(
            self._model, parameters, normalization_only=self._normalization_only
        )
        self._check_some_measured(verdicts)
        constants = [*self._model.buffers(), *self._model.parameters()]
        self._probe: Probe | None = Probe(parameters, self._layers, verdicts, constants)
        self._agreed: Sequence[Verdict] | None = None
        """What the probe found on all ranks. They are asked once: one alone would wait for ever."""
        self._settled: GradientNorms | None = None
        self._all_parameters = parameters
        self._left_out: list[Parameter] = []
        self._place = {index: index for index in range(len(parameters))}
        """Where the parameters are among those that are measured."""
        self._coverage = Coverage()
        self._found: dict[str, Any] = {}
        self._hooks = LayerHooks(self._on_output_gradient, self._is_constant)
        self._hooks.install(self._layers)
        self._entry_of = self.norms.entry_of
        self._passes: list[_Pass] = []
        self._live: _Pass | None = None
        self._warn = WarnOnce()

    @property
    def coverage(self) -> float:
        """Share of |g|² that is of measured parameters. Reads the device."""
        return self._coverage.share()

    @property
    def beside_rows(self) -> Sequence[Unread]:
        """The coverage."""
        return (self._coverage,)

    @property
    def _in_pieces(self) -> bool:
        return any(one.early for one in self._passes)

    def layout(self, sizes: Sequence[float], loss_divisor: float) -> WindowLayout:
        """Every row of every micro-batch is a part; see `each_example`."""
        return each_example(sizes, [one.rows for one in self._passes], loss_divisor)

    def weighted_layout(self, sizes: Sequence[float], weights: Sequence[Weight]) -> WindowLayout:
        """Return the layout with a weight for each micro-batch."""
        return weighted_examples(sizes, [one.rows for one in self._passes], weights)

    @property
    def cost(self) -> float:
        """The extra cost of a measured step, in plain steps."""
        return 0.3

    def before_backward(self, loss: Tensor, size: float, *, capture_average: bool = False) -> None:
        """Arrange for the backward pass from `loss` to be captured."""
        one = _Pass(size, self.norms.entries)
        self._passes.append(one)
        self._live = None
        if loss.requires_grad:
            loss.register_hook(partial(self._on_backward_start, one))
        self._average.before_backward(loss, capture=capture_average)

    def small_sq_norms(self) -> Tensor | None:
        """Sum over backward passes of rows · Σ_i |c_i|², c_i what row i added to `p.grad`.

        None in the first step or steps, which are probes and run a small collective. Also None if a
        pass was not captured reliably.
        """
        if self._probe is not None:
            self._settle(self._probe)
            return None
        self._raise_errors_of_hooks()
        if not self._passes or any(one.rows is None or not one.reliable for one in self._passes):
            return None
        if self._left_out:
            self._coverage.add(self.norms.parameters, self._left_out, device=self.device)
        return torch.stack([one.sums for one in self._passes if one.sums is not None]).sum(0)

    def reset(self) -> None:
        """Begin another step."""
        self._passes = []
        self._live = None
        self._hooks.forget_error()
        if self._probe is not None:
            self._probe.begin_step()
        if self._settled is not None:
            self.norms, self._settled = self._settled, None
            self._average = AveragedGradient(self.norms, self.group)
            place = {id(p): index for index, p in enumerate(self.norms.parameters)}
            self._place = {
                index: place[id(p)]
                for index, p in enumerate(self._all_parameters)
                if id(p) in place
            }
        super().reset()

    def close(self) -> None:
        """Remove all hooks."""
        if self._probe is not None:
            self._probe.close()
        self._hooks.install([])
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what the probe found, so that a resumed run need not probe again."""
        return {**self._found, "coverage": self._coverage.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what the probe found, if the parameters are the same; else probe again."""
        if self._probe is not None and state.get("names") == self.norms.names:
            verdicts = [Verdict(v) for v in state["verdicts"]]
            self._check_some_measured(verdicts)
            self._agreed = verdicts
            self._leave_out(self._probe, verdicts)
            self._coverage.load_state_dict(state["coverage"])
            self.reset()

    def _look(self) -> None:
        self._hooks.look(self.watching)

    def _is_constant(self, x: Tensor) -> bool | Tensor:
        return self._probe is not None and self._probe.is_constant(x)

    @keeps_errors
    def _on_output_gradient(self, use: Use, d: Tensor) -> None:
        live, layer = self._live, use.layer
        if live is None:
            if self._passes and self._passes[-1].sums is None:
                self._passes[-1].early = True
            return
        if use.over or layer in live.layers:
            live.reliable = False
        live.layers.add(layer)
        self._average.came.update(self._place[index] for index in layer.indices.values())
        self.norms.note_stream(d.device)
        x = use.take()
        if use.needs_input and x is None:
            live.reliable = False
            return
        with torch.no_grad(), torch.autocast(d.device.type, enabled=False):
            if self._probe is not None:
                self._probe.on_output(use, x, d)
            elif live.rows in (None, len(d)) and layer.has_batch(d):
                live.rows = len(d)
                for gradients in layer.in_chunks(x, d, use.names, use.statistics):
                    for name, gradient in gradients.items():
                        entry = self._entry_of[layer.indices[name]]
                        live.sq_norms[entry].append(gradient.sq_norms())
            else:
                live.reliable = False
                self._warn(
                    "Layers disagree on the number of rows in the batch, unlike in the first steps."
                    " Such steps are not measured. Make the batch the first dimension everywhere,"
                    ' and pass positions as (batch, length); or choose small_batch="micro_batch" or'
                    ' "rank".'
                )

    @keeps_errors
    def _on_backward_start(self, one: _Pass, _: Tensor) -> None:
        if not self._passes or one is not self._passes[-1] or one.sums is not None:
            return
        self._live = one
        if self._probe is not None:
            self._probe.begin_pass()
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_pass, one))

    @keeps_errors
    def _end_pass(self, one: _Pass) -> None:
        self._live = None
        if self._probe is not None:
            self._probe.end_pass(one.size, partial(setattr, one, "rows"))
        for sq_norms in one.sq_norms:
            self.norms.keep(sq_norms)
        one.close(self.device)

    def _settle(self, probe: Probe) -> None:
        """Leave out what the probe found to be inexact, on any rank; say so once."""
        if self._agreed is None:
            failed = self.failed or self._hooks.failed or probe.failed
            self._agreed = probe.verdicts(self.group, self.device, conclusive=not failed)
        self._raise_errors_of_hooks()
        if self._agreed is not None:
            self._leave_out(probe, self._agreed)

    def _leave_out(self, probe: Probe, verdicts: Sequence[Verdict]) -> None:
        """Go on with what can be measured, and end the probe once that is arranged."""
        self._check_some_measured(verdicts)
        for layer in self._layers:
            layer.indices = {
                n: i for n, i in layer.indices.items() if verdicts[i] == Verdict.MEASURED
            }
        self._layers = [layer for layer in self._layers if layer.indices]
        self._hooks.install(self._layers)
        measured = [i for i, verdict in enumerate(verdicts) if verdict == Verdict.MEASURED]
        self._settled = self.norms.select(measured)
        of_those = set(measured)
        self._left_out = [p for i, p in enumerate(self._all_parameters) if i not in of_those]
        self._found = {"names": list(self.norms.names), "verdicts": [int(v) for v in verdicts]}
        probe.close()
        self._probe = None
        if message := what_is_left(self.norms.names, self.norms.parameters, verdicts):
            self._warn(message)

    def _raise_errors_of_hooks(self) -> None:
        for hooked in (self, self._hooks, self._probe):
            if hooked is not None:
                hooked.raise_error_of_hook()

    def _check_some_measured(self, verdicts: Sequence[Verdict]) -> None:
        check_some_measured(self.norms.names, verdicts, normalization_only=self._normalization_only)


class _Pass:
    """One backward pass, and what was seen of it."""

    def __init__(self, size: float, entries: int) -> None:
        self.size = size
        self.rows: int | None = None
        self.early = False
        """Whether gradients came between the announcement and the beginning of the pass."""
        self.layers: set[Layer] = set()
        self.reliable = True
        self.sq_norms: list[list[Tensor]] = [[] for _ in range(entries)]
        self.sums: Tensor | None = None
        """rows · Σ_i |c_i|², shape (entries,), once the pass is over."""

    def close(self, device: torch.device) -> None:
        """Sum up over examples."""
        self.sums = sums_of(self.sq_norms, device=device).mul_(self.rows or 0)
        self.sq_norms = []
