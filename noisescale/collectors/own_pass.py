# SPDX-License-Identifier: Apache-2.0
"""Tell hooks whether a backward pass of the package itself is running.

Hooks on parameters, tensors and modules see such a pass like one of the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_running = 0  # for all threads: those of autograd call hooks as well


def measuring() -> bool:
    """Whether the running backward pass is one that noisescale added to measure the noise.

    Call it in a hook on a parameter, a tensor or a module, if the hook counts backward passes or
    keeps gradients: with `small_batch="half"` a measured step has one more pass.

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


@contextmanager
def own_pass() -> Iterator[None]:
    """Let `measuring` be True in a block."""
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1
