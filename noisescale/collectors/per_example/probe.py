# SPDX-License-Identifier: Apache-2.0
"""Find the parameters whose per-example norms can be trusted, in the first measured steps.

A layer's hooks see one use of its parameters, and nothing of others: weights tied to another
module or used by a function (`F.linear(x, embedding.weight)`), a module called twice, or whose
forward is bypassed. So in the first step every parameter's gradients, summed over examples, are
compared with the gradient that autograd computed; whatever does not agree is left out.

A gradient of zeros agrees with anything that is multiplied by zero, as is all of a ReZero block,
the A of LoRA, and what is below a head of zeros, until the first update. Such a parameter is
looked at again in the next steps, `LOOKS` at most, and then left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from noisescale.batches.to_device import to_device
from noisescale.collectors.devices import current_stream, keep_from, read
from noisescale.collectors.per_example.exclusions import LOOKS, Verdict
from noisescale.collectors.per_example.hooks import Use
from noisescale.collectors.per_example.layers import Layer
from noisescale.guard import HookErrors, keeps_errors

# Of the gradient's norm. The hooks' sums and autograd's differ by rounding alone; a second use of
# a parameter that adds less than this goes unnoticed, and matters as little.
_TOLERANCE = 0.05


class Seen(NamedTuple):
    """A layer's output in one backward pass."""

    layer: Layer
    shape: torch.Size
    """The shape of the gradient of the layer's output."""
    positions: int
    """Rows of features in the output, examples · positions; 0 if features are not the last."""
    constant: bool | Tensor
    """Whether the layer's input is no data; shape (1,) until that is read."""


class _Awaited(NamedTuple):
    """What the examples of a batch have shown of a parameter's gradient, before that comes."""

    total: Tensor
    spread: Tensor
    noise: float
    """How far the gradient may be off by rounding, relative to itself."""
    stream: torch.Stream | None
    """The stream on which `total` and `spread` were made."""


class _Ended(NamedTuple):
    """A backward pass that is over, and what takes its number of rows."""

    size: float
    seen: list[Seen]
    take_rows: Callable[[int | None], object]


class Probe(HookErrors):
    """Compare the gradients that the layers' formulas give with autograd's gradients.

    Args:
        parameters: All parameters.
        layers: The layers to check.
        verdicts: The verdict on each parameter so far.
        constants: Tensors whose memory, where it is a layer's input, is no data.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        layers: Sequence[Layer],
        verdicts: Sequence[Verdict],
        constants: Sequence[Tensor],
    ) -> None:
        self._parameters = parameters
        self._before = verdicts
        self._constants = {_address(c) for c in constants if c.numel()}
        candidates = [index for layer in layers for index in layer.indices.values()]
        self._candidates = candidates
        self._compared = [False] * len(parameters)
        self._looks_left = LOOKS
        self._handles = [
            parameters[index].register_hook(lambda g, index=index: self._on_gradient(index, g))
            for index in candidates
        ]
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what was seen."""
        self._error = None
        self._found: dict[int, Verdict] = {}
        self._checks: list[tuple[int, float, Tensor]] = []
        self._ended: list[_Ended] = []
        self._any_gradient = False
        self.begin_pass(live=False)

    def begin_pass(self, *, live: bool = True) -> None:
        """Prepare for a backward pass, or wait for it to begin."""
        self._live = live
        self._seen: list[Seen] = []
        self._awaited: dict[int, _Awaited] = {}

    def is_constant(self, x: Tensor) -> bool | Tensor:
        """Return whether a layer's input is not data: a buffer, a parameter or 0, 1, 2, ...

        Shape (1,) where only the device knows.
        """
        return _address(x) in self._constants or _counts_up(x)

    def on_output(self, use: Use, x: Tensor | None, d: Tensor) -> None:
        """Record a layer's input and its output's gradient; its parameters' gradients follow."""
        layer, names = use.layer, use.names
        again = any(seen.layer is layer for seen in self._seen)
        positions = math.prod(d.shape[:-1]) if layer.features_last else 0
        self._seen.append(Seen(layer, d.shape, positions, use.constant))
        noise = max(1e-3, 4 * torch.finfo(d.dtype).eps)  # rounding to 16 bits, under autocast
        for name in names:
            index = layer.indices[name]
            if again:
                self._judge(index, Verdict.USED_TWICE)
            if not layer.has_batch(d):
                self._judge(index, Verdict.NOT_BATCH_FIRST)
                return
        total: dict[str, Tensor] = {}
        spread: dict[str, Tensor] = {}
        for gradients in layer.in_chunks(x, d, names, use.statistics):
            for name, gradient in gradients.items():
                part, squares = gradient.total(), gradient.spread()
                total[name] = total[name] + part if name in total else part
                spread[name] = spread[name] + squares if name in spread else squares
        for name in names:
            self._awaited[layer.indices[name]] = _Awaited(
                total[name], spread[name], noise, current_stream(d.device)
            )

    @keeps_errors
    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        if not self._live:
            return
        self._any_gradient = True
        if index not in self._awaited or gradient.is_sparse:
            self._judge(index, Verdict.USED_ELSEWHERE)
            return
        total, spread, noise, stream = self._awaited.pop(index)
        with torch.no_grad():
            exact = gradient.to(total.dtype)
            off = torch.linalg.vector_norm(exact - total.view_as(exact))
            check = torch.stack([off, torch.linalg.vector_norm(exact), spread.sqrt()])
        self._checks.append((index, noise, check))
        keep_from(stream, (total, spread))  # a layer may have run on a stream of its own

    def end_pass(self, size: float, take_rows: Callable[[int | None], object]) -> None:
        """End a pass of `size` examples. `verdicts` calls `take_rows` with its `batch_rows`."""
        self._ended.append(_Ended(size, self._seen, take_rows))
        for index in self._awaited:
            self._judge(index, Verdict.USED_ELSEWHERE)
        self.begin_pass(live=False)

    def verdicts(
        self, group: dist.ProcessGroup | None, device: torch.device, *, conclusive: bool = True
    ) -> list[Verdict] | None:
        """Return the verdicts that all ranks agree on; None: look at another step.

        This waits for the device, and among ranks runs one collective and waits again. A step with
        infinite gradients (from a loss scale that is still too large) gives no verdict. A step in
        which a parameter's gradient is zero on all ranks gives no verdict on that parameter.

        Args:
            group: The ranks; None: one process.
            device: One that the group reduces on.
            conclusive: Whether this rank has seen the whole step.
        """
        votes = [True, *self._before, *self._compared]
        try:
            votes = self._votes(conclusive)
        finally:  # the other ranks wait for this one's votes, whatever became of them
            if group is not None:
                votes_of_all = to_device(torch.tensor(votes, device="cpu"), device)
                dist.all_reduce(votes_of_all, dist.ReduceOp.MAX, group)
                votes = votes_of_all.tolist()
            self.begin_step()
        inconclusive, *rest = votes
        if inconclusive:
            return None
        agreed = [Verdict(v) for v in rest[: len(self._before)]]
        self._compared = [bool(c) for c in rest[len(self._before) :]]
        zero = [
            index
            for index in self._candidates
            if agreed[index] == Verdict.MEASURED and not self._compared[index]
        ]
        if zero and not any(self._compared):
            return None  # a loss that was zero, say, tells as little as one that was not finite
        self._looks_left -= 1
        if zero and self._looks_left > 0:
            self._before = agreed
            return None
        for index in zero:
            agreed[index] = Verdict.ZERO_GRADIENT
        return agreed

    def _votes(self, conclusive: bool) -> list[int]:
        """Return whether the step says nothing, a verdict and whether it was compared for each."""
        conclusive &= self._any_gradient
        unknown = [
            seen.constant
            for one in self._ended
            for seen in one.seen
            if isinstance(seen.constant, Tensor)
        ]
        numbers = read([*unknown, *(check for *_, check in self._checks)])
        constant = iter(numbers[: len(unknown)])
        for one in self._ended:
            known = [
                seen._replace(constant=bool(next(constant)[0]))
                if isinstance(seen.constant, Tensor)
                else seen
                for seen in one.seen
            ]
            self._end(one._replace(seen=known))
        checks = numbers[len(unknown) :]
        checked = set()
        compared = list(self._compared)
        for (index, noise, _), (off, norm, spread) in zip(self._checks, checks, strict=True):
            conclusive &= math.isfinite(off) and math.isfinite(norm)
            checked.add(index)
            compared[index] |= norm > 0
            if not off <= _TOLERANCE * norm + noise * spread:
                self._judge(index, Verdict.USED_ELSEWHERE)
        for index in self._candidates:
            if index not in checked:
                self._judge(index, Verdict.NO_GRADIENT)
        found = [max(v, self._found.get(i, v)) for i, v in enumerate(self._before)]
        return [not conclusive, *found, *compared]

    def _end(self, one: _Ended) -> None:
        """Judge what has no rows in front in a pass, and hand on the number of rows."""
        rows = batch_rows(one.size, one.seen)
        for seen in one.seen:
            if seen.constant or seen.shape[0] != rows:
                for index in seen.layer.indices.values():
                    self._judge(index, Verdict.NOT_BATCH_FIRST)
        one.take_rows(rows)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _judge(self, index: int, verdict: Verdict) -> None:
        self._found[index] = max(verdict, self._found.get(index, verdict))


def batch_rows(size: float, seen: Sequence[Seen]) -> int | None:
    """Return the number of rows in the batch, from the outputs' first dimensions, or None.

    Args:
        size: This rank's examples in the pass, or its tokens.
        seen: The outputs.

    The result is `size` if an output has `size` rows. But if there is also an output (rows, t, ...)
    with rows · t = size, tokens are counted, and outputs of `size` rows were flattened. If tokens
    are counted, the result is the most common number of rows that is not above `size`, or else the
    most common number, which `layout` then refuses. Outputs whose second dimension is `size` have
    the batch there.
    """
    data = [s for s in seen if not s.constant]
    firsts = {s.shape[0] for s in data}
    if size in firsts:
        data = [s for s in data if 1 < s.shape[0] < size and s.positions == size]
        if not data:
            return int(size)
    data = [s for s in data if len(s.shape) < 3 or s.shape[1] != size]
    counts = Counter(s.shape[0] for s in data)
    counts = Counter({n: c for n, c in counts.items() if n <= size}) or counts
    return max(counts, key=lambda n: (counts[n], -n)) if counts else None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _counts_up(x: Tensor) -> bool | Tensor:
    """Return whether x is `arange`, as positions of an embedding are; shape (1,) on a device."""
    if x.is_floating_point() or x.is_complex() or x.dim() != 1 or len(x) < 2:
        return False
    counts = (x == torch.arange(len(x), device=x.device, dtype=x.dtype)).all()
    return bool(counts) if x.is_cpu else counts.view(1)
