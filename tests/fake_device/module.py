# SPDX-License-Identifier: Apache-2.0
"""`torch.fake`: what torch and Lightning ask the module of a device for."""

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fake_device.build import library

DEVICES = 2


@functools.cache
def register() -> None:
    """Make "fake" a device, for the rest of this process and for its forks.

    Raises:
        CannotBuildError: If it cannot be compiled.
    """
    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.backend_capability["gloo"].append("fake")
    # Else the first backend that a test registers for the device is its default from there on.
    dist.Backend.default_device_backend_map["fake"] = "gloo"
    # A forked process makes its pool of threads anew where it first needs one. The threads of two
    # devices would at once, and torch asserts.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


@contextmanager
def without_float64() -> Iterator[None]:
    """Refuse float64 as Macs' MPS does: with a TypeError."""
    torch.ops.fake_device.set_float64(False)
    try:
        yield
    finally:
        torch.ops.fake_device.set_float64(True)


current_device = torch.accelerator.current_device_index


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def new_stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device("fake", _index(device)), priority=priority)


def new_event(enable_timing: bool = False) -> torch.Event:
    return torch.Event("fake", enable_timing=enable_timing)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


def manual_seed(seed: int) -> None:
    torch.ops.fake_device.manual_seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for index in range(DEVICES):
        torch.ops.fake_device.manual_seed(index, seed)


def get_rng_state(device: Any = None) -> Tensor:
    return torch.ops.fake_device.rng_state(_index(device))


def set_rng_state(state: Tensor, device: Any = None) -> None:
    torch.ops.fake_device.set_rng_state(_index(device), state)


class device(torch.accelerator.device_index):  # noqa: N801
    """As `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        super().__init__(_index(device))


def _index(device: Any) -> int:
    """The index of a device, of which an index and a name are given too; None: the current one."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


FUNCTIONS = (
    set_device, synchronize, current_stream, stream, manual_seed, manual_seed_all,
    get_rng_state, set_rng_state, device,
)  # fmt: skip


def _module() -> ModuleType:
    module: Any = ModuleType("torch.fake")
    for function in FUNCTIONS:
        setattr(module, function.__name__, function)
    module.current_device = current_device
    module.Stream, module.Event = new_stream, new_event
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: DEVICES
    module.memory_allocated = torch.ops.fake_device.allocated_bytes  # on both devices
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    module._lazy_init = module.empty_cache = lambda: None
    return module
