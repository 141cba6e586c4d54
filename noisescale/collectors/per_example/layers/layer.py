# SPDX-License-Identifier: Apache-2.0
"""Layer: the base class of the formulas for one kind of layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from noisescale.collectors.per_example.norms import TEMPORARY_BYTES, ExampleGradient, Summed

Gradients = dict[str, ExampleGradient]
"""The gradients of parameters, by their names in the module."""

Statistics = tuple[Tensor, ...]
"""Mean and inverse standard deviation of what was normalized together, shape (b, ..., 1)."""


class Layer(ABC):
    """A module with a `weight`, a `bias` or both, and the gradients of these for each example.

    A subclass is for one kind of module: see `register_layer`.

    Args:
        module: The module.
        indices: A mapping from the names of its measured parameters to the collector's indices.
    """

    bytes_on_cpu: int | None = None
    """The most bytes that a chunk may take on CPU; None: the default."""

    features_last = True
    """Whether the output ends with features, and the dimensions before them are positions."""

    def __init__(self, module: Any, indices: dict[str, int]) -> None:
        self.module = module
        self.indices = indices

    @classmethod
    def supports(cls, module: Any) -> bool:
        """Return whether the formulas hold for a module of this kind, as it is configured."""
        return True

    def has_batch(self, d: Tensor) -> bool:
        """Return whether the output, with gradient d, has a batch in front and not features."""
        return d.dim() > 1

    def temporaries(self, x: Tensor | None, d: Tensor) -> int:
        """Return how many numbers `weight` and `bias` allocate for the whole batch."""
        return 0

    @abstractmethod
    def weight(self, x: Tensor, d: Tensor) -> ExampleGradient:
        """Describe the gradients of the weight.

        Args:
            x: The module's input, shape (b, ...), in at least 32 bits.
            d: The gradient of its output, in at least 32 bits.
        """

    def weight_by(self, statistics: Statistics, x: Tensor, d: Tensor) -> ExampleGradient:
        """Describe the gradients of the weight, with the result of `statistics`."""
        return self.weight(x, d)

    def bias(self, d: Tensor) -> ExampleGradient:
        """Describe the gradients of the bias."""
        return Summed(positions_in_the_middle(d))

    def statistics(self, output: Tensor) -> Statistics | None:
        """Return what the forward pass has computed that the formulas can use; None: nothing."""
        return None

    def in_chunks(
        self, x: Tensor | None, d: Tensor, names: list[str], statistics: Statistics | None = None
    ) -> Iterator[Gradients]:
        """Yield the gradients of some examples at a time, in at least 32 bits.

        Args:
            x: The module's input, shape (b, ...); may be None if `names` has no weight.
            d: The gradient of its output.
            names: Names of the parameters.
            statistics: The result of `statistics` for the output.
        """
        # Squares overflow 16 bits. Wider than its output an input is under autocast only.
        dtype = torch.promote_types(d.dtype, torch.float32)
        wanted = x if x is not None and "weight" in names else None
        copied = [y for y in (wanted, d) if y is not None and y.dtype != dtype]
        numbers = sum(y.numel() for y in copied) + self.temporaries(wanted, d)
        b = len(d)
        at_once = (d.is_cpu and self.bytes_on_cpu) or TEMPORARY_BYTES
        per_chunk = max(at_once * b // max(numbers * dtype.itemsize, 1), 1)
        for start in range(0, max(b, 1), per_chunk):
            some = slice(start, start + per_chunk)
            x_some = None if wanted is None else self._widen(wanted[some], dtype)
            stats = statistics and tuple(y[some].to(dtype) for y in statistics)
            yield self._gradients(x_some, d[some].to(dtype), names, stats)

    def _widen(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def _gradients(
        self, x: Tensor | None, d: Tensor, names: list[str], statistics: Statistics | None
    ) -> Gradients:
        found: Gradients = {}
        if x is not None:
            found["weight"] = (
                self.weight(x, d) if statistics is None else self.weight_by(statistics, x, d)
            )
        if "bias" in names:
            found["bias"] = self.bias(d)
        return found


def positions_in_the_middle(x: Tensor) -> Tensor:
    """Reshape a tensor (b, ..., features) to (b, t, features)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)
