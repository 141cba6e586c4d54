# SPDX-License-Identifier: Apache-2.0
"""Hooks of others: what they are called, and whether a pass of the package itself calls them.

Hooks on modules see such a pass like one of the training. Hooks on tensors are not called in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.modules.module as of_modules

_running = 0  # for all threads: those of autograd call hooks as well


def measuring() -> bool:
    """Return whether the running backward pass is one that noisescale added to measure the noise.

    Call it in each backward hook on a module, and return at once while it is true: with
    `small_batch="half"` a measured step has one more pass. A model with other hooks on modules is
    refused. Hooks on parameters and other tensors are not called in that pass.

    Examples:
        >>> import torch
        >>> from noisescale import measuring
        >>> seen = []
        >>> weight = torch.ones(2, requires_grad=True)
        >>> handle = weight.register_hook(lambda g: None if measuring() else seen.append(g))
        >>> weight.sum().backward()
        >>> seen
        [tensor([1., 1.])]
    """
    return _running > 0


def asks_whether_measuring(hook: Any) -> bool:
    """Return whether a hook calls `measuring`, so that it knows of our passes."""
    code = getattr(function_of(hook), "__code__", None)
    return code is not None and measuring.__name__ in code.co_names


@contextmanager
def own_pass() -> Iterator[None]:
    """Let `measuring` be True in a block."""
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1


def function_of(hook: Any) -> Any:
    """Return the function that a hook calls in the end."""
    while isinstance(hook, partial | of_modules._WrappedHook):
        hook = hook.func if isinstance(hook, partial) else hook.hook
    return getattr(hook, "__func__", hook)


def name_of(hook: Any) -> str:
    """Return the full name of the function that a hook calls, or of an object's class."""
    function = function_of(hook)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__ or 'builtins'}.{named.__qualname__}"


def is_ours(name: str) -> bool:
    """Return whether a hook of this name is the package's own."""
    return name.partition(".")[0] == __name__.partition(".")[0]
