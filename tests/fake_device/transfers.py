# SPDX-License-Identifier: Apache-2.0
"""What the host reads from a device and copies to or from it, by the line that asks for it."""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import noisescale
from fake_device.dispatched import Dispatched

PACKAGE = str(Path(noisescale.__file__).parent)
ON_BEHALF = ("/batches/to_device.py", "/collectors/devices.py")
"""Files that copy and read for others: what counts is the line that calls them."""

READ = "read"
TO_HOST = "blocking copy to host"
TO_HOST_LATER = "copy to host"
TO_DEVICE = "blocking copy to device"
TO_DEVICE_LATER = "copy to device"

READS = {
    "_coalesce", "_linalg_check_errors", "_local_scalar_dense", "_unique", "_unique2", "bincount",
    "equal", "masked_select", "nonzero", "nonzero_static", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive",
}  # fmt: skip
"""Operations whose result, or its size, the host waits for."""


class Transfer(NamedTuple):
    """A line that asks for it, and for what."""

    kind: str
    where: str
    """"noisescale/meter/meter.py:12", the innermost line of the package; "" outside of it."""


class Transfers(Dispatched):
    """Count transfers and launched operations of every device that is not a CPU.

    Of operations below autograd; those of the threads of a backward pass, too.

    Example:
        with Transfers() as transfers:
            loss.backward()
        assert not transfers.of_package()
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[Transfer] = Counter()
        self.launched = 0
        """Kernels: no views, no allocations."""

    def of_package(self) -> dict[Transfer, int]:
        """What lines of the package ask for."""
        return {transfer: n for transfer, n in self.counted.items() if transfer.where}

    def kinds(self, *, of_package: bool = False) -> Counter[str]:
        """How many there were of each kind."""
        kinds = Counter[str]()
        for transfer, n in (self.of_package() if of_package else self.counted).items():
            kinds[transfer.kind] += n
        return kinds

    def saw(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        self.launched += launches(function, args, kwargs, result)
        kind = kind_of(function, args, kwargs, result)
        if kind is not None:
            self.counted[Transfer(kind, line_of_package())] += 1


def kind_of(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> str | None:
    """What an operation transfers; None: nothing."""
    name = name_of(function)
    if name in READS:
        return READ if any(map(on_device, tree_leaves(args))) else None
    if name == "_to_copy":
        return _copy(args[0], result, kwargs.get("non_blocking", False))
    if name in ("copy_", "_foreach_copy_"):
        later = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        pairs = zip(tree_leaves(args[0]), tree_leaves(args[1]), strict=True)
        return next(filter(None, (_copy(source, into, later) for into, source in pairs)), None)
    if name == "lift_fresh":  # the last of what `torch.tensor(numbers, device=...)` does
        return TO_DEVICE if on_device(args[0]) else None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_") and on_device(args[0]):
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return READ  # how many they are
        if not all(map(on_device, indices)):
            return TO_DEVICE
    if name == "repeat_interleave" and on_device(args[0]) and kwargs.get("output_size") is None:
        return READ
    return None


def _copy(source: Tensor, into: Tensor, later: bool) -> str | None:
    """Of a copy between host and device. One from memory that is not pinned blocks always."""
    if on_device(source) == on_device(into):
        return None
    if on_device(source):
        return TO_HOST_LATER if later else TO_HOST
    return TO_DEVICE_LATER if later and source.is_pinned() else TO_DEVICE


def launches(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Count the kernels that an operation launches on a device, as CUDA would.

    One each, but for operations on lists: one for some hundred dense tensors, else one for each.
    """
    name, there = name_of(function), any(map(on_device, tree_leaves((args, kwargs, result))))
    if (
        not there
        or function.namespace != "aten"
        or is_view(function)
        or name.startswith(NO_KERNELS)
    ):
        return 0
    if name.startswith("_foreach_"):
        some = next(arg for arg in args if isinstance(arg, list | tuple))
        return math.ceil(len(some) / MOST_FUSED) if all(map(is_dense, some)) else len(some)
    return 1


MOST_FUSED = 110
"""Tensors in a list whose norms one kernel of CUDA takes (torch's MultiTensorApply.cuh)."""


def is_dense(x: Tensor) -> bool:
    """Whether all of the memory from its first number to its last is its own."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() == span or not x.numel()


NO_KERNELS = ("empty", "new_empty", "detach", "record_stream", "set_", "resize_", "lift_fresh")
"""What only makes or names tensors."""


def is_view(function: Any) -> bool:
    """Whether it only names memory of one of its arguments."""
    infos = [result.alias_info for result in function._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def name_of(function: Any) -> str:
    return function._schema.name.split("::")[1]


def on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")


def line_of_package() -> str:
    """The innermost line of the package that is running; "": none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith(ON_BEHALF):
            return f"noisescale{file[len(PACKAGE) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
