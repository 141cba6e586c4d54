# SPDX-License-Identifier: Apache-2.0
"""Whether a backward pass of the package's own is running.

Hooks on parameters, tensors and modules see such a pass as they see the training's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_running = 0  # for all threads: those of autograd call hooks as well


def measuring() -> bool:
    """Whether a backward pass is running that is not the training's, but measures its noise.

    Ask in a hook on a parameter, a tensor or a module that counts backward passes or keeps what it
    is given: with `small_batch="half"` a measured step has one pass more.

    Example:
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
    """Have `measuring` say so."""
    global _running
    _running += 1
    try:
        yield
    finally:
        _running -= 1
