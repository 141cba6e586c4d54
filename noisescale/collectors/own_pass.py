# SPDX-License-Identifier: Apache-2.0
"""Tell hooks whether a backward pass of the package itself is running.

Hooks on modules see such a pass like one of the training. Hooks on tensors are not called in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from noisescale.collectors.names_of_hooks import function_of

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
